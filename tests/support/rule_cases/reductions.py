"""Cases of reductions, products, convolutions and matrix decompositions."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardopt.separability._relations import Same, Shapes, Split, differing_dims, growth
from support.relation_meaning import (
    Operand,
    RuleCase,
    draw_operands,
    draw_relation,
    draw_shapes,
)
from support.rule_cases.elementwise import FLOATS, INTEGERS, REALS

Axes = tuple[int, ...]
COMPLEX = ("complex64", "complex128")


def sum_of_known_numbers(rng: np.random.Generator) -> RuleCase:
    """Return a case of a mean of ones, which the trace knows. Numbers of 8 bits stop to grow."""
    num_pieces = draw_pieces(rng)
    rows = int(rng.choice([16, 32]))
    dtype = jnp.dtype(rng.choice(["float8_e4m3fn", "float8_e5m2", "float32"]))

    def function(rows: int) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            total = lax.reduce_sum(jnp.asarray(np.ones(rows, dtype)), (0,))
            return x + (total / jnp.asarray(rows, dtype)).astype(x.dtype)

        return run

    functions = function(rows * num_pieces), function(rows)
    return RuleCase([Operand(Same(), ((), ()))], functions, num_pieces)


def draw_pieces(rng: np.random.Generator) -> int:
    return int(rng.choice([2, 2, 3, 4]))


def of_operand(
    function: Callable[..., Any],
    dtypes: Sequence[str],
    rng: np.random.Generator,
    *,
    least_ndim: int = 1,
    sizes: Sequence[int] = (1, 2, 3, 4),
    operands: int = 1,
) -> RuleCase:
    """Return a case of `function(dims, *operands)`, where dims are random dims of the operands.

    At times a piece has other dims than the whole.
    """
    num_pieces = draw_pieces(rng)
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(least_ndim, 4)), sizes=sizes)
    ndim = len(shapes[0])
    dims = tuple(sorted(map(int, rng.permutation(ndim)[: rng.integers(1, ndim + 1)])))
    drawn = draw_operands(rng, shapes, jnp.dtype(rng.choice(dtypes)), num_pieces, operands)
    piece_dims = dims
    if rng.random() < 0.2:
        piece_dims = tuple(sorted(map(int, rng.permutation(ndim)[: len(dims)])))
    functions = functools.partial(function, dims), functools.partial(function, piece_dims)
    return RuleCase(drawn, functions, num_pieces)


def natural_operand(
    rng: np.random.Generator, shapes: Shapes, dtype: Any, num_pieces: int
) -> Operand:
    """Return an operand that is split along its only dim of rows, if it has one. At times it has
    another random relation.
    """
    uneven = differing_dims(shapes)
    relation = draw_relation(rng, shapes, dtype, num_pieces)
    if rng.random() < 0.7:
        relation = Same()
        if len(uneven) == 1 and growth(shapes, uneven) == num_pieces:
            blocks = 1 if rng.random() < 0.8 else int(np.gcd(2, shapes[1][uneven[0]]))
            relation = Split(uneven[0], blocks)
    return Operand(relation, shapes, dtype)


def _reduced(reduce: Callable[[Any, Axes], Any]) -> Callable[[Axes, Any], Any]:
    return lambda dims, x: reduce(x, dims)


def _along(function: Callable[[Any, int], Any]) -> Callable[[Axes, Any], Any]:
    return lambda dims, x: function(x, dims[0])


def _sorted(dims: Axes, *operands: Any) -> Any:
    return lax.sort(
        operands, dimension=dims[-1], num_keys=1 + (len(dims) > 1) * (len(operands) > 1)
    )


def windowed(reducer: str, rng: np.random.Generator) -> RuleCase:
    """Return a case of a window with random sizes, strides, dilations and padding."""
    num_pieces = draw_pieces(rng)
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 4)), sizes=(1, 2, 3))
    window = []
    strides = []
    base = []
    dilations = []
    padding = []
    for _ in shapes[0]:
        trivial = rng.random() < 0.6
        window.append(1 if trivial else int(rng.integers(1, 3)))
        strides.append(1 if rng.random() < 0.8 else 2)
        base.append(1 if rng.random() < 0.9 else 2)
        dilations.append(1 if rng.random() < 0.8 else 2)
        padding.append((0, 0) if rng.random() < 0.8 else (1, int(rng.integers(0, 2))))
    dtype = jnp.dtype(rng.choice(REALS if reducer == "add" else FLOATS))
    start, function = {
        "add": (0, lax.add),
        "max": (-np.inf, lax.max),
        "min": (np.inf, lax.min),
    }[reducer]

    def run(x):
        return lax.reduce_window(
            x, np.asarray(start, dtype), function, window, strides, padding, base, dilations
        )

    return RuleCase(draw_operands(rng, shapes, dtype, num_pieces, 1), (run, run), num_pieces)


def decomposed(
    function: Callable[..., Any],
    rng: np.random.Generator,
    *,
    widths: Sequence[int | None] = (2,),
    numbers: Callable | None = None,
    wide: bool = False,
) -> RuleCase:
    """Return a case of matrices [..., 2, width] for each operand; of vectors where it is None.

    Wide matrices may have n times as many columns in the whole trace, or n times as many rows.
    """
    num_pieces = draw_pieces(rng)
    batch = draw_shapes(rng, num_pieces, int(rng.integers(0, 3)), sizes=(1, 2, 3))
    operands = []
    for width in widths:
        shapes: Shapes = tuple((*shape, 2, *(() if width is None else (width,))) for shape in batch)  # pyright: ignore
        if wide and rng.random() < 0.2:
            shapes = (*shapes[0][:-1], width * num_pieces), shapes[1]
        elif wide and rng.random() < 0.2:
            shapes = (*shapes[0][:-2], 2 * num_pieces, width), shapes[1]
        relation = draw_relation(rng, shapes, np.float64, num_pieces, (Same, Split))
        operands.append(Operand(relation, shapes, np.float64, numbers))
    return RuleCase(operands, (function, function), num_pieces)


def definite(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return matrices that are far from singular."""
    numbers = 0.3 * rng.normal(size=shape)
    return (numbers + 2 * np.eye(*np.broadcast_shapes(shape[-2:], (1, 1)))).astype(dtype)


def solved(rng: np.random.Generator) -> RuleCase:
    """Return a case of triangular systems, with rows as systems or as columns of a right side."""
    num_pieces = draw_pieces(rng)
    is_left_side = bool(rng.random() < 0.6)
    batch = draw_shapes(rng, num_pieces, int(rng.integers(0, 2)), sizes=(1, 2, 3))
    columns = int(rng.integers(1, 4))
    factor = num_pieces if rng.random() < 0.5 else 1
    sides = (
        [(2, columns * factor), (2, columns)]
        if is_left_side
        else [(columns * factor, 2), (columns, 2)]
    )
    matrix_shapes: Shapes = tuple((*shape, 2, 2) for shape in batch)  # pyright: ignore
    side_shapes: Shapes = tuple((*shape, *side) for shape, side in zip(batch, sides, strict=True))  # pyright: ignore
    operands = [
        Operand(
            draw_relation(rng, shapes, np.float64, num_pieces, kinds), shapes, np.float64, numbers
        )
        for shapes, kinds, numbers in [
            (matrix_shapes, (Same, Split), definite),
            (side_shapes, (Same, Split) if rng.random() < 0.8 else (Same,), None),
        ]
    ]

    def run(matrix, side):
        return jax.lax.linalg.triangular_solve(matrix, side, left_side=is_left_side, lower=True)

    return RuleCase(operands, (run, run), num_pieces)


def multiplied(rng: np.random.Generator) -> RuleCase:
    """Return a case of a product with random batch, contracted and free dims in random order."""
    num_pieces = draw_pieces(rng)
    counts = [int(rng.integers(0, 2)), int(rng.integers(0, 3)), *map(int, rng.integers(0, 2, 2))]
    kinds = [kind for kind, count in zip("bclr", counts, strict=True) for _ in range(count)]
    piece = [int(rng.integers(1, 4)) for _ in kinds]
    whole_sizes = [
        size * (num_pieces if rng.random() < 0.35 else 2 if rng.random() < 0.05 else 1)
        for size in piece
    ]
    sides = []
    for letters in ("bcl", "bcr"):
        members = [i for i, kind in enumerate(kinds) if kind in letters]
        sides.append([members[i] for i in rng.permutation(len(members))])
    numbers = tuple(
        tuple(
            tuple(side.index(i) for i, kind in enumerate(kinds) if kind == letter) for side in sides
        )
        for letter in "cb"
    )
    dtype = jnp.dtype(rng.choice(REALS))
    operands = []
    for side in sides:
        shapes = tuple(whole_sizes[i] for i in side), tuple(piece[i] for i in side)
        operands.append(natural_operand(rng, shapes, dtype, num_pieces))

    def run(x, y):
        return lax.dot_general(x, y, numbers)

    return RuleCase(operands, (run, run), num_pieces)


def convolved(rng: np.random.Generator) -> RuleCase:
    """Return a case of a convolution with random groups, padding, strides and places of dims."""
    num_pieces = draw_pieces(rng)
    style = rng.choice(["plain", "feature", "batch", "rows are groups", "rows are batch groups"])
    batch, in_features, out_features, size, window = map(int, rng.integers(1, 4, 5))
    uneven = rng.choice(["batch", "in", "out", "space", "window", "none", "batch"])
    factor = {
        name: num_pieces if uneven == name else 1
        for name in ("batch", "in", "out", "space", "window")
    }

    def sizes(is_whole: bool) -> tuple[int, int, Axes, Axes]:
        f = {name: value if is_whole else 1 for name, value in factor.items()}
        rows = num_pieces if is_whole else 1
        groups = {
            "feature": 2,
            "rows are groups": 2 * rows,
        }.get(style, 1)
        batch_groups = {"batch": 2, "rows are batch groups": 2 * rows}.get(style, 1)
        image = (
            batch * f["batch"] * batch_groups,
            in_features * f["in"] * groups,
            3 + size * f["space"],
        )
        kernel = (
            out_features * f["out"] * groups * batch_groups,
            in_features * f["in"],
            window * f["window"],
        )
        return groups, batch_groups, image, kernel

    strides = int(rng.integers(1, 3))
    padding = (int(rng.integers(0, 3)), int(rng.integers(0, 2)))
    dilations = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    names = [
        str(rng.choice(options))
        for options in (["NCW", "NWC"], ["OIW", "WIO"], ["NCW", "NWC", "CNW"])
    ]

    def placed(shape: Axes, letters: str, order: str) -> Axes:
        return tuple(shape[order.index(letter)] for letter in letters)

    def run(is_whole: bool):
        groups, batch_groups, _, _ = sizes(is_whole)
        return lambda x, y: lax.conv_general_dilated(
            x,
            y,
            (strides,),
            [padding],
            (dilations[0],),
            (dilations[1],),
            names,  # pyright: ignore
            groups,
            batch_groups,
        )

    operands = []
    dtype = jnp.dtype(rng.choice(("float64", "float32", "int32")))
    for place, name, order in ((2, names[0], "NCW"), (3, names[1], "OIW")):
        shapes = placed(sizes(True)[place], name, order), placed(sizes(False)[place], name, order)  # pyright: ignore
        operands.append(natural_operand(rng, shapes, dtype, num_pieces))
    return RuleCase(operands, (run(True), run(False)), num_pieces)


def transformed(rng: np.random.Generator) -> RuleCase:
    """Return a case of a Fourier transform of the last dims."""
    num_pieces = draw_pieces(rng)
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 4)), sizes=(1, 2, 3))
    count = int(rng.integers(1, len(shapes[0]) + 1))
    relation = draw_relation(rng, shapes, np.dtype("complex128"), num_pieces)
    runs = [
        functools.partial(jax.lax.fft, fft_type="FFT", fft_lengths=shape[len(shape) - count :])
        for shape in shapes
    ]
    return RuleCase([Operand(relation, shapes, np.complex128)], (runs[0], runs[1]), num_pieces)


def _rows(table: dict[str, Callable], dtypes: Sequence[str], **options: Any) -> dict[str, list]:
    return {
        name: [functools.partial(of_operand, function, dtypes, **options)]
        for name, function in table.items()
    }


def _matrices(table: dict[str, Callable], **options: Any) -> dict[str, list]:
    return {
        name: [functools.partial(decomposed, function, **options)]
        for name, function in table.items()
    }


def symmetric(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    matrix = definite(rng, shape, dtype)
    return matrix @ matrix.swapaxes(-1, -2) if shape[-1] == shape[-2] else matrix


linalg = jax.lax.linalg
INTS_AND_BOOLS = (*INTEGERS, "bool")

CASES = {
    **_rows({"reduce_sum": _reduced(lambda x, dims: lax.reduce_sum(x, dims)), "reduce_max": _reduced(lambda x, dims: lax.reduce_max(x, dims)), "reduce_min": _reduced(lambda x, dims: lax.reduce_min(x, dims)), "reduce_prod": _reduced(lambda x, dims: lax.reduce_prod(x, dims))}, REALS, sizes=(0, 1, 2, 3)),
    **_rows({"reduce_and": _reduced(lambda x, dims: lax.reduce_and(x, dims)), "reduce_or": _reduced(lambda x, dims: lax.reduce_or(x, dims)), "reduce_xor": _reduced(lambda x, dims: lax.reduce_xor(x, dims))}, INTS_AND_BOOLS),
    **_rows({"argmax": _along(lambda x, dim: lax.argmax(x, dim, np.int32)), "argmin": _along(lambda x, dim: lax.argmin(x, dim, np.int32)), "cumsum": _along(lax.cumsum), "cumprod": _along(lax.cumprod), "cummax": _along(lax.cummax), "cummin": _along(lax.cummin)}, REALS),
    **_rows({"cumlogsumexp": _along(lax.cumlogsumexp)}, ("float64", "float32")),
    "sort": [functools.partial(of_operand, _sorted, REALS, operands=count) for count in (1, 2)],
    "top_k": [functools.partial(of_operand, lambda dims, x: lax.top_k(x, 1), FLOATS)],
    **{f"reduce_window_{name}": [functools.partial(windowed, function)] for name, function in (("sum", "add"), ("max", "max"), ("min", "min"))},
    "dot_general": [multiplied],
    "conv_general_dilated": [convolved],
    "fft": [transformed],
    **_matrices({"cholesky": lambda x: linalg.cholesky(x, symmetrize_input=False), "eigh": lambda x: linalg.eigh(x)[1]}, numbers=symmetric),
    **_matrices({"lu": lambda x: linalg.lu(x)[0], "qr": linalg.qr, "svd": lambda x: linalg.svd(x)[1]}, numbers=definite, wide=True),
    **_matrices({"eig": lambda x: linalg.eig(x)[0]}, numbers=definite),
    "lu_pivots_to_permutation": [functools.partial(decomposed, lambda x: linalg.lu_pivots_to_permutation(linalg.lu(x)[1], 2), numbers=definite)],
    "triangular_solve": [solved],
}  # fmt: skip
CASES["reduce_sum"].append(sum_of_known_numbers)
