"""Cases of equations that move entries."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardopt.separability._relations import Columns, Known, Same, Shapes, Split
from support.relation_meaning import Operand, RuleCase, draw_operands, draw_relation, draw_shapes
from support.rule_cases.reductions import draw_pieces

DTYPES = ("float64", "float64", "float32", "int8", "uint8", "int32", "bool")


def moved(
    params: Callable[[np.random.Generator, Shapes, int], Sequence[Callable[[Any], Any]]],
    rng: np.random.Generator,
    *,
    sizes: Sequence[int] = (1, 2, 3, 4),
    least_ndim: int = 1,
) -> RuleCase:
    """Return a case of functions of one operand, which `params` draws for the whole and a piece.

    At times it draws them apart.
    """
    num_pieces = draw_pieces(rng)
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(least_ndim, 4)), sizes=sizes)
    whole_function, piece = params(rng, shapes, num_pieces)
    if rng.random() < 0.1:
        piece = params(rng, shapes, num_pieces)[1]
    operands = draw_operands(rng, shapes, jnp.dtype(rng.choice(DTYPES)), num_pieces, 1)
    return RuleCase(operands, (whole_function, piece), num_pieces)


def reshaped(rng: np.random.Generator) -> RuleCase:
    """Return a case of a reshape between two groupings of the same small dims."""
    num_pieces = draw_pieces(rng)
    count = int(rng.integers(1, 5))
    piece = [int(rng.integers(1, 4)) for _ in range(count)]
    whole_sizes = list(piece)
    for dim in rng.permutation(count)[: rng.integers(0, 3)]:
        whole_sizes[dim] *= num_pieces if rng.random() < 0.9 else 2

    def grouped(cuts: Sequence[int]) -> Shapes:
        bounds = [0, *cuts, count]
        return tuple(  # pyright: ignore
            tuple(math.prod(sizes[a:b]) for a, b in itertools.pairwise(bounds))
            for sizes in (whole_sizes, piece)
        )

    def cuts() -> list[int]:
        return [i for i in range(1, count) if rng.random() < 0.5]

    old = grouped(cuts())
    new = grouped(cuts())
    operands = draw_operands(rng, old, jnp.dtype(rng.choice(DTYPES)), num_pieces, 1)
    runs = [functools.partial(lax.reshape, new_sizes=shape) for shape in new]
    return RuleCase(operands, (runs[0], runs[1]), num_pieces)


def _broadcast(rng: np.random.Generator, shapes: Shapes, num_pieces: int) -> list[Callable]:
    ndim = len(shapes[0]) + int(rng.integers(0, 3))
    dims = sorted(map(int, rng.permutation(ndim)[: len(shapes[0])]))
    runs = []
    extra = [int(rng.integers(1, 4)) for _ in range(ndim)]
    grows = rng.random(ndim) < 0.3
    spreads = rng.random(ndim) < 0.3
    for shape, factor in zip(shapes, (num_pieces, 1), strict=True):
        sizes = [size * (factor if grow else 1) for size, grow in zip(extra, grows, strict=True)]
        for dim, size in zip(dims, shape, strict=True):
            sizes[dim] = sizes[dim] if size == 1 and spreads[dim] else size
        runs.append(
            functools.partial(
                lax.broadcast_in_dim, shape=tuple(sizes), broadcast_dimensions=tuple(dims)
            )
        )
    return runs


def _same(function: Callable[[Any], Any]) -> list[Callable]:
    return [function, function]


def _transposed(rng: np.random.Generator, shapes: Shapes, num_pieces: int) -> list[Callable]:
    order = tuple(map(int, rng.permutation(len(shapes[0]))))
    return _same(lambda x: lax.transpose(x, order))


def _squeezed(rng: np.random.Generator, shapes: Shapes, num_pieces: int) -> list[Callable]:
    dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if sizes == (1, 1)]
    dims = [dim for dim in dims if rng.random() < 0.8]
    return _same(lambda x: lax.squeeze(x, dims) if dims else lax.squeeze_p.bind(x, dimensions=()))


def _sliced(rng: np.random.Generator, shapes: Shapes, num_pieces: int) -> list[Callable]:
    bounds: tuple[list, list] = [], []
    for whole_size, piece in zip(*shapes, strict=True):
        start = int(rng.integers(0, piece + 1))
        stop = int(rng.integers(start, piece + 1))
        stride = 1 if rng.random() < 0.6 else 2
        style = rng.choice(["full", "same", "scaled", "from the end", "full"])
        if style == "full":
            pair = (0, whole_size, 1), (0, piece, 1)
        elif style == "same":
            pair = (start, stop, stride), (start, stop, stride)
        elif style == "from the end":
            pair = (
                (whole_size - piece + start, whole_size - piece + stop, stride),
                (start, stop, stride),
            )
        else:
            factor = whole_size // piece
            pair = (start * factor, stop * factor, stride), (start, stop, stride)
        bounds[0].append(pair[0])
        bounds[1].append(pair[1])
    return [
        functools.partial(
            lax.slice,
            start_indices=[b[0] for b in bound],
            limit_indices=[b[1] for b in bound],
            strides=[b[2] for b in bound] if any(b[2] > 1 for b in bound) else None,
        )
        for bound in bounds
    ]


def _reversed(rng: np.random.Generator, shapes: Shapes, num_pieces: int) -> list[Callable]:
    dims = tuple(dim for dim in range(len(shapes[0])) if rng.random() < 0.6)
    return _same(lambda x: lax.rev(x, dims))


def _tiled(rng: np.random.Generator, shapes: Shapes, num_pieces: int) -> list[Callable]:
    reps = [int(rng.integers(1, 3)) for _ in shapes[0]]
    whole_reps = [rep * (num_pieces if rng.random() < 0.2 else 1) for rep in reps]
    return [functools.partial(lax.tile_p.bind, reps=tuple(r)) for r in (whole_reps, reps)]


def padded(rng: np.random.Generator) -> RuleCase:
    """Return a case of a padding, which may cut and spread entries."""
    num_pieces = draw_pieces(rng)
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 4)), sizes=(2, 3, 4))
    config = [
        (0, 0, 0)
        if rng.random() < 0.5
        else (int(rng.integers(-1, 3)), int(rng.integers(-1, 3)), int(rng.random() < 0.2))
        for _ in shapes[0]
    ]
    dtype = jnp.dtype(rng.choice(DTYPES))
    operand = draw_operands(rng, shapes, dtype, num_pieces, 1)[0]
    value = Operand(draw_relation(rng, ((), ()), dtype, num_pieces), ((), ()), dtype)
    run = functools.partial(lax.pad, padding_config=config)
    return RuleCase([operand, value], (run, run), num_pieces)


def joined(rng: np.random.Generator) -> RuleCase:
    """Return a case of a concatenation of operands of other lengths."""
    num_pieces = draw_pieces(rng)
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 4)))
    dim = int(rng.integers(len(shapes[0])))
    dtype = jnp.dtype(rng.choice(DTYPES))
    operands = draw_operands(rng, shapes, dtype, num_pieces, int(rng.integers(2, 4)))
    if isinstance(operands[0].relation, Split) and rng.random() < 0.5:
        dim = operands[0].relation.dim
    factor = shapes[0][dim] // shapes[1][dim]
    for i in range(1, len(operands)):
        length = int(rng.integers(1, 5))
        growth = factor if rng.random() < 0.8 else 1
        other: Shapes = tuple(  # pyright: ignore
            (*shape[:dim], length * f, *shape[dim + 1 :])
            for shape, f in zip(shapes, (growth, 1), strict=True)
        )
        fits = operands[i].relation == operands[0].relation and not isinstance(
            operands[i].relation, Known
        )
        relation = operands[i].relation
        if isinstance(relation, Split) and (
            other[0][relation.dim] != other[1][relation.dim] * num_pieces
            or other[1][relation.dim] % relation.blocks
        ):
            fits = False
        if not fits:
            relation = draw_relation(rng, other, dtype, num_pieces)
        if rng.random() < 0.2:
            relation = Same()
        operands[i] = Operand(relation, other, dtype)

    def run(*arrays):
        return lax.concatenate(arrays, dim)

    return RuleCase(operands, (run, run), num_pieces)


def joined_columns(rng: np.random.Generator) -> RuleCase:
    """Return a case of indices [rows, 1] of several dims that are put side by side."""
    num_pieces = draw_pieces(rng)
    rows = int(rng.integers(1, 4))
    shapes: Shapes = ((rows * num_pieces, 1), (rows, 1))
    dtype = np.dtype(np.int32)
    operands = draw_operands(rng, shapes, dtype, num_pieces, 2, (Same, Split, Known))

    def run(*arrays):
        return lax.concatenate(arrays, 1)

    return RuleCase(operands, (run, run), num_pieces)


def columns_sliced(rng: np.random.Generator) -> RuleCase:
    """Return a case of a slice of columns of several relations."""
    num_pieces = draw_pieces(rng)
    rows = int(rng.integers(1, 4))
    shapes: Shapes = ((rows * num_pieces, 3), (rows, 3))
    column: Shapes = ((rows * num_pieces, 1), (rows, 1))
    columns = Columns(
        tuple(draw_relation(rng, column, np.int32, num_pieces, (Same, Split)) for _ in range(3))
    )
    start = int(rng.integers(0, 3))
    whole_stop, piece_stop = (shapes[0][0], rows) if rng.random() < 0.7 else (num_pieces, 1)
    runs = [
        functools.partial(lax.slice, start_indices=(0, start), limit_indices=(stop, 3))
        for stop in (whole_stop, piece_stop)
    ]
    return RuleCase([Operand(columns, shapes, np.int32)], (runs[0], runs[1]), num_pieces)


def _split(rng: np.random.Generator, shapes: Shapes, num_pieces: int) -> list[Callable]:
    dim = int(rng.integers(len(shapes[0])))
    whole_size = shapes[0][dim]
    piece = shapes[1][dim]
    cut = int(rng.integers(0, piece + 1))
    style = rng.choice(["same", "scaled", "other"])
    first = {
        "same": cut,
        "scaled": cut * (whole_size // piece),
        "other": whole_size - (piece - cut),
    }[style]
    return [
        functools.partial(lax.split, sizes=sizes, axis=dim)
        for sizes in ((first, whole_size - first), (cut, piece - cut))
    ]


def stacked(rng: np.random.Generator) -> RuleCase:
    """Return a case of operands that are joined along a new dim."""
    num_pieces = draw_pieces(rng)
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(0, 3)))
    dim = int(rng.integers(0, len(shapes[0]) + 1))
    operands = draw_operands(
        rng, shapes, jnp.dtype(rng.choice(DTYPES)), num_pieces, int(rng.integers(1, 4))
    )

    def run(*arrays):
        return lax.stack_p.bind(*arrays, axis=dim)

    return RuleCase(operands, (run, run), num_pieces)


def _unstacked(rng: np.random.Generator, shapes: Shapes, num_pieces: int) -> list[Callable]:
    dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) == 1]
    if not dims:
        return _same(lambda x: lax.unstack_p.bind(x[None], axis=0))
    dim = int(rng.choice(dims))
    return _same(lambda x: lax.unstack_p.bind(x, axis=dim))


CASES = {
    "reshape": [reshaped],
    "broadcast_in_dim": [functools.partial(moved, _broadcast, least_ndim=0, sizes=(1, 1, 2, 3))],
    "transpose": [functools.partial(moved, _transposed)],
    "squeeze": [functools.partial(moved, _squeezed, sizes=(1, 1, 2))],
    "slice": [functools.partial(moved, _sliced, sizes=(1, 2, 4, 6)), columns_sliced],
    "rev": [functools.partial(moved, _reversed)],
    "tile": [functools.partial(moved, _tiled)],
    "pad": [padded],
    "concatenate": [joined, joined_columns],
    "split": [functools.partial(moved, _split, sizes=(1, 2, 4))],
}
if hasattr(lax, "stack_p"):
    CASES |= {"stack": [stacked], "unstack": [functools.partial(moved, _unstacked)]}
