"""Cases of gathers, scatters and dynamic slices."""

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardopt.separability._relations import (
    Columns,
    Known,
    Relation,
    Same,
    Shapes,
    Split,
    Total,
    is_unscaled,
)
from support.relation_meaning import (
    Numbers,
    Operand,
    RuleCase,
    draw_relation,
    draw_shapes,
    indices_below,
)
from support.rule_cases.reductions import draw_pieces, natural_operand

DTYPES = ("float64", "float64", "float32", "int8", "int32", "uint8")
MODES = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP)


class Lookup(NamedTuple):
    """A random lookup of slices in an operand.

    Attributes:
      num_pieces: the number of pieces.
      operand, indices, slices: the shapes of the operand, of the indices, and of all slices.
      sizes: the slice sizes in both traces.
      index_map: the operand's dim for each column of the indices.
      collapsed, batching, index_batching, offsets: as in `lax.GatherDimensionNumbers`.
    """

    num_pieces: int
    operand: Shapes
    indices: Shapes
    slices: Shapes
    sizes: Shapes
    index_map: tuple[int, ...]
    collapsed: tuple[int, ...]
    batching: tuple[int, ...]
    index_batching: tuple[int, ...]
    offsets: tuple[int, ...]


def draw_lookup(rng: np.random.Generator) -> Lookup:
    num_pieces = draw_pieces(rng)
    operand = draw_shapes(rng, num_pieces, int(rng.integers(1, 4)), sizes=(1, 2, 3), most_uneven=1)
    ndim = len(operand[0])
    batch = draw_shapes(rng, num_pieces, int(rng.integers(0, 3)), sizes=(1, 2, 3), most_uneven=1)
    batching = ()
    index_batching = ()
    dims = list(map(int, rng.permutation(ndim)))
    if rng.random() < 0.4 and batch[0]:
        place = int(rng.integers(len(batch[0])))
        batching = (dims.pop(),)
        index_batching = (place,)
        batch = tuple(  # pyright: ignore
            (*sizes[:place], shape[batching[0]], *sizes[place + 1 :])
            for sizes, shape in zip(batch, operand, strict=True)
        )
    if rng.random() < 0.3 and batch[0] and dims:  # as many lookups as there are rows
        place = int(rng.integers(len(batch[0])))
        if place not in index_batching:
            batch = tuple(  # pyright: ignore
                (*sizes[:place], shape[dims[0]], *sizes[place + 1 :])
                for sizes, shape in zip(batch, operand, strict=True)
            )
    index_map = tuple(dims[: rng.integers(0 if len(dims) == 0 else 1, min(2, len(dims)) + 1)])
    whole_sizes = [1] * ndim
    piece = [1] * ndim
    collapsed = []
    for dim in range(ndim):
        if dim in batching:
            continue
        style = rng.random()
        if style < 0.5 and dim in index_map:
            collapsed.append(dim)
        elif style < 0.9:
            whole_sizes[dim], piece[dim] = operand[0][dim], operand[1][dim]
        else:
            whole_sizes[dim] = piece[dim] = min(1, operand[1][dim])
    window = [dim for dim in range(ndim) if dim not in (*collapsed, *batching)]
    rank = len(batch[0]) + len(window)
    offsets = tuple(sorted(map(int, rng.permutation(rank)[: len(window)])))
    slices = []
    for sizes, rows in ((whole_sizes, batch[0]), (piece, batch[1])):
        in_window = iter(sizes[dim] for dim in window)
        in_batch = iter(rows)
        slices.append(
            tuple(next(in_window) if dim in offsets else next(in_batch) for dim in range(rank))
        )
    indices = (*batch[0], len(index_map)), (*batch[1], len(index_map))
    return Lookup(num_pieces, operand, indices, (slices[0], slices[1]), (tuple(whole_sizes), tuple(piece)), index_map, tuple(sorted(collapsed)), batching, index_batching, offsets)  # fmt: skip


def _numbers_near(size: int) -> Numbers:
    return lambda rng, shape, dtype: rng.integers(0, size + 1, shape).astype(dtype)


def draw_indices(rng: np.random.Generator, lookup: Lookup) -> Operand:
    """Return indices: of one relation, or row numbers in a column of known numbers."""
    shapes = lookup.indices
    numbers = _numbers_near(max(1, min([lookup.operand[1][d] for d in lookup.index_map] or [1])))
    if rng.random() < 0.3:
        operand = natural_operand(rng, shapes, np.int32, lookup.num_pieces)
        if is_unscaled(operand.relation):
            return dataclasses.replace(operand, numbers=numbers)
    if rng.random() < 0.5 or not lookup.index_map:
        relation = draw_relation(rng, shapes, np.int32, lookup.num_pieces, (Same, Split))
        if isinstance(relation, Same | Split):
            relation = relation.__class__(**{**relation.__dict__, "ratio": Fraction(1)})
        return Operand(relation, shapes, np.int32, numbers)
    column: Shapes = ((*shapes[0][:-1], 1), (*shapes[1][:-1], 1))
    columns: list[Relation] = []
    for _ in lookup.index_map:
        relation = draw_relation(rng, column, np.int32, lookup.num_pieces, (Same, Split))
        columns.append(relation.__class__(**{**relation.__dict__, "ratio": Fraction(1)}))
    dims = [d for d in range(len(column[0]) - 1) if column[0][d] != column[1][d]]
    if dims:
        place = int(rng.integers(len(columns)))
        known = [np.arange(shape[dims[0]]) for shape in column]
        style = rng.choice(["rows", "rows", "reversed", "repeated", "shuffled"])
        if style == "reversed":
            known = [rows[::-1] for rows in known]
        if style == "repeated":
            known = [rows // 2 for rows in known]
        if style == "shuffled":
            known = [rng.permutation(known[0]), known[1]]
        sizes = [-1 if dim == dims[0] else 1 for dim in range(len(column[0]))]
        columns[place] = Known(*[rows.astype(np.int32).reshape(sizes) for rows in known])
    relation = Columns(tuple(columns)) if len(columns) > 1 else columns[0]
    return Operand(relation, shapes, np.int32, numbers)


def _operand(rng: np.random.Generator, shapes: Shapes, dtype: Any, num_pieces: int) -> Operand:
    if rng.random() < 0.6:
        return natural_operand(rng, shapes, dtype, num_pieces)
    kinds = (Same, Split, Same, Split, Total, Known) if rng.random() < 0.8 else (Known, Same)
    return Operand(draw_relation(rng, shapes, dtype, num_pieces, kinds), shapes, dtype)


def gathered(rng: np.random.Generator) -> RuleCase:
    """Return a case of a lookup with random places of dims."""
    lookup = draw_lookup(rng)
    numbers = lax.GatherDimensionNumbers(lookup.offsets, lookup.collapsed, lookup.index_map, lookup.batching, lookup.index_batching)  # fmt: skip
    mode = MODES[rng.integers(2)]
    fill = [None, 7][int(rng.random() < 0.3)]
    runs = [
        functools.partial(
            lax.gather, dimension_numbers=numbers, slice_sizes=sizes, mode=mode, fill_value=fill
        )
        for sizes in lookup.sizes
    ]
    operand = _operand(rng, lookup.operand, jnp.dtype(rng.choice(DTYPES)), lookup.num_pieces)
    return RuleCase([operand, draw_indices(rng, lookup)], (runs[0], runs[1]), lookup.num_pieces)


def scattered(function: Callable[..., Any], rng: np.random.Generator) -> RuleCase:
    """Return a case of a scatter with random places of dims."""
    lookup = draw_lookup(rng)
    numbers = lax.ScatterDimensionNumbers(lookup.offsets, lookup.collapsed, lookup.index_map, lookup.batching, lookup.index_batching)  # fmt: skip
    dtype = jnp.dtype(rng.choice(DTYPES))
    run = functools.partial(function, dimension_numbers=numbers, mode=MODES[rng.integers(2)])
    operand = _operand(rng, lookup.operand, dtype, lookup.num_pieces)
    if rng.random() < 0.3:
        operand = Operand(
            Known(*[np.zeros((1,) * len(lookup.operand[0]), dtype)] * 2), lookup.operand, dtype
        )
    updates = _operand(rng, lookup.slices, dtype, lookup.num_pieces)
    operands = [operand, draw_indices(rng, lookup), updates]
    return RuleCase(operands, (run, run), lookup.num_pieces)


def _labels(rng: np.random.Generator, shape: Shapes) -> Operand:
    return Operand([Split(0), Split(0), Same()][rng.integers(3)], shape, np.int32, indices_below(3))


def rows_of_table(rng: np.random.Generator) -> RuleCase:
    """Return a case of entries of a table that labels of rows choose, along any dim of the table."""
    num_pieces = draw_pieces(rng)
    rows = int(rng.integers(1, 4))
    dim = int(rng.integers(2))
    table = Operand(
        [Same(), Same(Fraction(2)), Same(Fraction(1, num_pieces)), Total(Fraction(1))][
            rng.integers(4)
        ],
        ((3, 3), (3, 3)),
    )
    labels = _labels(rng, ((rows * num_pieces,), (rows,)))
    mode = str(rng.choice(["clip", "fill"]))

    def run(table, labels):
        return jnp.take(table, labels, axis=dim, mode=mode)

    return RuleCase([table, labels], (run, run), num_pieces)


def slices_of_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of slices of rows, whose starts are the same in all pieces."""
    num_pieces = draw_pieces(rng)
    rows = int(rng.integers(1, 4))
    features = 3
    sizes: Shapes = (rows * num_pieces, features), (rows, features)
    relation = [Split(0), Same(), Split(0, ratio=Fraction(2))][rng.integers(3)]
    takes_rows, takes_features = rng.random(2) < 0.5
    # starts without a sign are not counted from the end, which depends on the number of rows
    starts = Operand(Same(), ((2,), (2,)), np.uint32, indices_below(3))

    def function(rows):
        lengths = 1 if takes_rows else rows, 1 if takes_features else features

        def run(x, starts):
            return jax.vmap(lambda start: lax.dynamic_slice(x, (start, start), lengths))(starts)

        return run

    functions = function(rows * num_pieces), function(rows)
    return RuleCase([Operand(relation, sizes), starts], functions, num_pieces)


def entries_of_rows(function: str, rng: np.random.Generator) -> RuleCase:
    """Return a case of an entry of each row, which a label of this row chooses: it is read, written
    or added to.
    """
    num_pieces = draw_pieces(rng)
    rows = int(rng.integers(1, 4))
    sizes: Shapes = (rows * num_pieces, 3), (rows, 3)
    ratio = [Fraction(1), Fraction(1), Fraction(2)][rng.integers(3)]
    entries = Operand([Split(0, ratio=ratio), Same(ratio)][rng.integers(2)], sizes)
    labels = _labels(rng, (sizes[0][:1], sizes[1][:1]))
    updates = Operand([Split(0), Split(0), Same()][rng.integers(3)], labels.shapes)
    order = [
        lambda numbers: numbers,
        lambda numbers: numbers,
        lambda numbers: numbers[::-1],
        lambda numbers: numbers // 2,
        lambda numbers: numbers * 0,
    ][rng.integers(5)]
    first = bool(rng.random() < 0.7)

    def run(x, labels, updates):
        rows = order(jnp.arange(x.shape[0]))
        place = (rows, labels) if first else (labels, rows)
        x = x if first else x.T
        if function == "gather":
            return x[place]
        return x.at[place].set(updates) if function == "scatter" else x.at[place].add(updates)

    return RuleCase([entries, labels, updates], (run, run), num_pieces)


def entries_of_paired_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of entries of rows, by indices of these rows or of rows in another order."""
    num_pieces = draw_pieces(rng)
    rows = 2 * int(rng.integers(1, 3))
    sizes: Shapes = (rows * num_pieces, 3), (rows, 3)
    x, labels = (
        Operand([Split(0), Split(0, 2), Same()][kind], sizes, dtype, numbers)
        for kind, dtype, numbers in zip(
            rng.integers(0, 3, 2), (np.float64, np.uint32), (None, indices_below(3)), strict=True
        )
    )

    def run(x, labels):
        return jax.vmap(lambda row, places: row[places])(x, labels)

    return RuleCase([x, labels], (run, run), num_pieces)


def drawn_entries(rng: np.random.Generator) -> RuleCase:
    """Return a case of entries of a table that all share. One of their two indices is drawn."""
    table = Operand(Same(), ((8, 8), (8, 8)))
    columns = Columns((Same(drawn=True), Same()))
    indices = Operand(columns, ((4, 2), (4, 2)), np.int32, indices_below(8))
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))

    def run(table, indices):
        return lax.gather(table, indices, numbers, (1, 1))

    return RuleCase([table, indices], (run, run), draw_pieces(rng))


def applied(rng: np.random.Generator) -> RuleCase:
    """Return a case of a scatter that applies a function to entries."""
    function = [jnp.sin, lambda x: x + 1, lambda x: 0 * x][rng.integers(3)]

    def run(operand, indices, updates, dimension_numbers, mode):
        return lax.scatter_apply(
            operand, indices, function, dimension_numbers, update_shape=updates.shape, mode=mode
        )

    return scattered(run, rng)


def _slice_case(rng: np.random.Generator, updates: bool) -> RuleCase:
    num_pieces = draw_pieces(rng)
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 4)), sizes=(1, 2, 3))
    whole_sizes = list(shapes[0])
    piece = list(shapes[1])
    for dim in range(len(whole_sizes)):
        style = rng.random()
        if style < 0.25:
            piece[dim] = int(rng.integers(1, piece[dim] + 1))
            whole_sizes[dim] = piece[dim] * (
                shapes[0][dim] // shapes[1][dim] if rng.random() < 0.5 else 1
            )
    dtype = jnp.dtype(rng.choice(DTYPES))
    operand = _operand(rng, shapes, dtype, num_pieces)
    starts = []
    for _ in whole_sizes:
        relation = draw_relation(rng, ((), ()), np.int32, num_pieces, (Same, Known))
        starts.append(Operand(relation, ((), ()), np.int32, _numbers_near(3)))
    sizes: Shapes = (tuple(whole_sizes), tuple(piece))
    if updates:
        update = _operand(rng, sizes, dtype, num_pieces)

        def write(x, update, *starts):
            return lax.dynamic_update_slice(x, update, starts)

        return RuleCase([operand, update, *starts], (write, write), num_pieces)
    runs = [lambda x, *starts, size=size: lax.dynamic_slice(x, starts, size) for size in sizes]
    return RuleCase([operand, *starts], (runs[0], runs[1]), num_pieces)


CASES = {
    "gather": [
        drawn_entries,
        gathered,
        rows_of_table,
        slices_of_rows,
        functools.partial(entries_of_rows, "gather"),
        entries_of_paired_rows,
    ],
    "scatter": [
        functools.partial(scattered, lax.scatter),
        applied,
        functools.partial(entries_of_rows, "scatter"),
    ],
    "scatter-add": [
        functools.partial(scattered, lax.scatter_add),
        functools.partial(entries_of_rows, "scatter-add"),
    ],
    "dynamic_slice": [functools.partial(_slice_case, updates=False)],
    "dynamic_update_slice": [functools.partial(_slice_case, updates=True)],
}
