"""The meaning of the relations of the proof, and the check of one rule against it.

A relation stands for pairs (value of the whole batch, values of the pieces). `draw_pair` draws such
a pair, and `violation` says why a pair is none of them. `check_rule` draws the operands of a rule,
and runs its function on the whole and on the pieces. Then it checks the results against the
relations that the rule answers. So a rule is tested alone, in corners that no whole loss reaches.

"exact" promises these things, and `check_rule` checks them:

- Integers, booleans and floats of 8 bits: every bit. Ratios are exact fractions, and a sum that
  wraps is no sum.
- Other floats: up to the rounding of the dtype of the result, and up to the order of the terms of a
  sum. The difference may be `ROUNDINGS` times the machine epsilon, relative to the largest number.

A value that is `drawn` follows from a random key, and each piece has another key. Its relation
holds if all pieces draw the same number. So operands are drawn twice. With equal draws all
relations must hold. With different draws the relations must hold that are not `drawn`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from shardopt.separability._proof import DifferentTracesError, ProofSettings
from shardopt.separability._relations import (
    Columns,
    Extreme,
    Known,
    Relation,
    Same,
    Shapes,
    Shifted,
    Split,
    Total,
    Unrelated,
    as_drawn,
    differing_dims,
    is_drawn,
    sizes_of_dim,
)
from shardopt.separability._walk import relate_jaxprs
from shardopt.trace._jaxprs import equations
from support.piecewise import as_users_have_it

AXIS = "data"
"""The mesh axis of cases with collectives."""
OTHER_AXIS = "model"
OTHER_DEVICES = 2
"""A mesh axis that divides the work of every piece in the same way, and its size."""
SCALE = 0.5
"""The derivative of the whole loss is this many times the sum of the derivatives of the pieces."""
ROUNDINGS = 64
"""The number of roundings that two sums of the same terms may differ by."""

Numbers = Callable[[np.random.Generator, tuple[int, ...], np.dtype], np.ndarray]
Pair = tuple[np.ndarray, list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a rule.

    Attributes:
      relation: the relation that its values have.
      shapes: its shapes in the whole trace and in the piece trace.
      dtype: its dtype.
      numbers: draws the numbers of a value that is free; by default `any_numbers`.
    """

    relation: Relation
    shapes: Shapes
    dtype: Any = np.float64
    numbers: Numbers | None = None


@dataclasses.dataclass(frozen=True)
class RuleCase:
    """An equation, or a small function, on the whole batch and on a piece.

    Attributes:
      operands: its operands.
      functions: the function on the whole batch, and on a piece.
      num_pieces: the number of pieces.
      settings: further fields of `ProofSettings`. With `training`, gradients are checked too.
      axis: whether the function names the mesh axis `AXIS`, which has the pieces.
      other_axis: whether it names the mesh axis `OTHER_AXIS`, which has no pieces.
      violation: says why results do not have a relation, see `violation`.
      joint_violation: says why results do not have their relations together, from all relations,
        the whole results and the results of each piece.
    """

    operands: Sequence[Operand]
    functions: tuple[Callable[..., Any], Callable[..., Any]]
    num_pieces: int
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    axis: bool = False
    other_axis: bool = False
    violation: "Callable[[Relation, Any, Sequence[Any]], str | None] | None" = None
    joint_violation: "Callable[[Sequence[Relation], Any, Any], str | None] | None" = None


def check_rule(case: RuleCase, rng: np.random.Generator, draws: int = 1) -> list[Relation]:
    """Return the relations that a rule answers, after a check that concrete results have them.

    Raises:
      AssertionError: if the concrete results do not have the relations.
    """
    with as_users_have_it(), np.errstate(all="ignore"):
        jaxprs = traces(case)
        relations = relations_of(case, jaxprs)
        check_answer(case, jaxprs, relations, rng, draws)
    return relations


def relations_of(case: RuleCase, jaxprs: Sequence[jex.ClosedJaxpr]) -> list[Relation]:
    """Return the relations that a rule answers; nothing is known if the traces differ."""
    proof = ProofSettings(relate_jaxprs, case.num_pieces, **case.settings)
    try:
        return relate_jaxprs(proof, *jaxprs, [operand.relation for operand in case.operands])
    except DifferentTracesError:
        return [Unrelated("traces")] * len(jaxprs[0].out_avals)


def check_answer(
    case: RuleCase,
    jaxprs: Sequence[jex.ClosedJaxpr],
    relations: Sequence[Relation],
    rng: np.random.Generator,
    draws: int = 1,
) -> None:
    """Check that concrete results of a case have relations.

    Raises:
      AssertionError: if they do not.
    """
    if all(isinstance(relation, Unrelated) for relation in relations):
        return
    if case.other_axis:
        _check_over_other_axis(case, rng, jaxprs, relations)
        return
    has_draws = any(is_drawn(operand.relation) for operand in case.operands)
    trains = bool(case.settings.get("training"))
    forward_jaxprs = [list(jaxprs)]
    if trains:
        forward_jaxprs.append([_forward(case, *pair) for pair in enumerate(jaxprs)])
    for equal_draws in [True] * draws + [False] * has_draws:
        pairs = [
            _draw_operand(rng, operand, case.num_pieces, equal_draws) for operand in case.operands
        ]
        for whole_jaxpr, piece_jaxpr in forward_jaxprs:
            (whole_results,) = _run(case, whole_jaxpr, [[whole_value] for whole_value, _ in pairs])
            piece_results = _run(case, piece_jaxpr, [pieces for _, pieces in pairs])
            if case.joint_violation:
                problem = case.joint_violation(relations, whole_results, piece_results)
                assert problem is None, _message(case, jaxprs, relations, 0, problem, pairs)
            for k, relation in enumerate(relations):
                if not equal_draws and is_drawn(relation):
                    continue
                pieces = [results[k] for results in piece_results]
                problem = (case.violation or violation)(relation, whole_results[k], pieces)
                assert problem is None, _message(case, jaxprs, relations, k, problem, pairs)
        if trains and equal_draws:
            _check_gradients(case, rng, jaxprs, relations, pairs)


def _forward(case: RuleCase, i: int, jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Return the trace of the results as the forward pass of training computes them."""
    function = jex.jaxpr_as_fun(jaxpr)
    operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    forward = jax.make_jaxpr(
        lambda *operands: jax.vjp(function, *operands)[0], axis_env=_axis_env(case, i)
    )
    return forward(*operands)


def _check_over_other_axis(
    case: RuleCase,
    rng: np.random.Generator,
    jaxprs: Sequence[jex.ClosedJaxpr],
    relations: Sequence[Relation],
) -> None:
    """Check the results on each device of an axis without pieces, whose operands differ."""
    drawn = [
        [_draw_operand(rng, operand, case.num_pieces, True) for operand in case.operands]
        for _ in range(OTHER_DEVICES)
    ]

    def results(jaxpr: jex.ClosedJaxpr, values: Sequence[Sequence[np.ndarray]]) -> list[Any]:
        function = jax.vmap(jex.jaxpr_as_fun(jaxpr), axis_name=OTHER_AXIS)
        return function(*[np.stack(of_devices) for of_devices in zip(*values, strict=True)])

    whole_results = results(jaxprs[0], [[pair[0] for pair in pairs] for pairs in drawn])
    pieces = [
        results(jaxprs[1], [[pair[1][i] for pair in pairs] for pairs in drawn])
        for i in range(case.num_pieces)
    ]
    for device, pairs in enumerate(drawn):
        for k, relation in enumerate(relations):
            problem = violation(
                relation, whole_results[k][device], [piece[k][device] for piece in pieces]
            )
            assert problem is None, _message(case, jaxprs, relations, k, problem, pairs)


def traces(case: RuleCase) -> list[jex.ClosedJaxpr]:
    """Return the traces of a case on the whole batch and on a piece."""
    jaxprs = []
    for i, function in enumerate(case.functions):
        operands = [jax.ShapeDtypeStruct(x.shapes[i], x.dtype) for x in case.operands]
        jaxprs.append(jax.make_jaxpr(function, axis_env=_axis_env(case, i))(*operands))
    return jaxprs


def _axis_env(case: RuleCase, i: int) -> list[tuple[str, int]]:
    """Return the mesh axes of the trace on the whole batch (0) or on a piece (1)."""
    sizes = [(AXIS, (1, case.num_pieces)[i])] if case.axis else []
    return sizes + ([(OTHER_AXIS, OTHER_DEVICES)] if case.other_axis else [])


def primitives_of(case: RuleCase) -> set[str]:
    """Return the names of the primitives in the trace of a case on the whole batch."""
    with as_users_have_it():
        return {eqn.primitive.name for eqn in equations(traces(case)[0])}


# --- drawing --------------------------------------------------------------------------------------


def draw_pair(
    rng: np.random.Generator,
    relation: Relation,
    shapes: Shapes,
    dtype: Any,
    num_pieces: int,
    numbers: Numbers | None = None,
) -> Pair:
    """Return a value of the whole batch and its values on the pieces that have a relation.

    All pieces draw the same random numbers.
    """
    dtype = np.dtype(dtype)
    numbers = numbers or any_numbers
    if isinstance(relation, Unrelated):
        return numbers(rng, shapes[0], dtype), [
            numbers(rng, shapes[1], dtype) for _ in range(num_pieces)
        ]
    if isinstance(relation, Known):
        values = [
            np.broadcast_to(known, shape).astype(dtype)
            for known, shape in zip(
                (relation.whole_values, relation.piece_values), shapes, strict=True
            )
        ]
        return values[0], [values[1]] * num_pieces
    if isinstance(relation, Columns):
        column_shapes = (*shapes[0][:-1], 1), (*shapes[1][:-1], 1)
        columns = [
            draw_pair(rng, column, column_shapes, dtype, num_pieces, numbers)
            for column in relation.columns
        ]
        pieces = [
            np.concatenate([column[1][i] for column in columns], -1) for i in range(num_pieces)
        ]
        return np.concatenate([column[0] for column in columns], -1), pieces
    if isinstance(relation, Shifted):
        rows = draw_pair(rng, relation.split, shapes, dtype, num_pieces, numbers)
        totals = draw_pair(rng, relation.total, shapes, dtype, num_pieces, numbers)
        return rows[0] + totals[0], [q + t for q, t in zip(rows[1], totals[1], strict=True)]
    uneven = differing_dims(shapes)
    if isinstance(relation, Extreme):
        parts = [_equal_entries(numbers, rng, shapes[1], uneven, dtype) for _ in range(num_pieces)]
        reduce = np.max if relation.kind == "max" else np.min
        return _spread(reduce(np.stack(parts), 0), shapes[0], uneven), [
            _spread(part, shapes[1], uneven) for part in parts
        ]
    ratio = relation.ratio
    if isinstance(relation, Same):
        base = _limited(_equal_entries(numbers, rng, shapes[1], uneven, dtype), dtype, ratio, 1)
        piece = _spread(_times(base, ratio.denominator, dtype), shapes[1], uneven)
        return _spread(_times(base, ratio.numerator, dtype), shapes[0], uneven), [
            piece
        ] * num_pieces
    other_dims = [dim for dim in uneven if not isinstance(relation, Split) or dim != relation.dim]
    terms = num_pieces if isinstance(relation, Total) else 1
    bases = [
        _limited(_equal_entries(numbers, rng, shapes[1], other_dims, dtype), dtype, ratio, terms)
        for _ in range(num_pieces)
    ]
    pieces = [
        _spread(_times(base, ratio.denominator, dtype), shapes[1], other_dims) for base in bases
    ]
    scaled = [_times(base, ratio.numerator, dtype) for base in bases]
    whole_value = (
        np.sum(scaled, 0, dtype=dtype)
        if isinstance(relation, Total)
        else joined_pieces(relation, scaled)
    )
    return _spread(whole_value, shapes[0], other_dims), pieces


def any_numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return random numbers: integers of up to 16 bits from the whole range of their dtype."""
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        low = np.iinfo(dtype).min
        high = np.iinfo(dtype).max
        return rng.integers(max(low, -(2**20)), min(high, 2**20), shape, endpoint=True).astype(
            dtype
        )
    values = rng.normal(size=shape)
    if dtype.kind == "c":
        values = values + 1j * rng.normal(size=shape)
    return np.asarray(values).astype(dtype)


def indices_below(size: int) -> Numbers:
    """Return a draw of numbers from 0 to `size` - 1."""
    return lambda rng, shape, dtype: rng.integers(0, size, shape).astype(dtype)


def positive_numbers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Return positive numbers."""
    return (np.abs(any_numbers(rng, shape, dtype)) + np.asarray(0.1)).astype(dtype)


def _draw_operand(
    rng: np.random.Generator, operand: Operand, num_pieces: int, equal_draws: bool
) -> Pair:
    arguments = operand.relation, operand.shapes, operand.dtype, num_pieces, operand.numbers
    pair = draw_pair(rng, *arguments)
    if equal_draws or not is_drawn(operand.relation):
        return pair
    return pair[0], [draw_pair(rng, *arguments)[1][i] for i in range(num_pieces)]


def _equal_entries(
    numbers: Numbers,
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dims: Sequence[int],
    dtype: np.dtype,
) -> np.ndarray:
    """Return numbers of size 1 along dims of equal entries."""
    return numbers(rng, tuple(1 if dim in dims else size for dim, size in enumerate(shape)), dtype)


def _spread(values: np.ndarray, shape: tuple[int, ...], dims: Sequence[int]) -> np.ndarray:
    sizes = tuple(
        shape[dim] if dim in dims else values.shape[dim] for dim in range(len(values.shape))
    )
    return np.broadcast_to(values, sizes)


def _limited(base: np.ndarray, dtype: np.dtype, ratio: Fraction, terms: int) -> np.ndarray:
    """Return integers so small that their multiples, and sums of so many terms, fit the dtype."""
    factor = max(abs(ratio.numerator), ratio.denominator) * terms * (2 if ratio < 0 else 1)
    if dtype.kind not in "iu" or factor == 1:
        return base
    return np.asarray(base.astype(object) // factor).astype(dtype)


def _times(base: np.ndarray, factor: int, dtype: np.dtype) -> np.ndarray:
    return base if factor == 1 else (base * np.asarray(factor).astype(dtype)).astype(dtype)


def joined_pieces(relation: Split, pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the concatenation of pieces in the blocks of a relation."""
    dim = relation.dim
    blocks = [np.split(piece, relation.blocks, dim) for piece in pieces]
    return np.concatenate([part[k] for k in range(relation.blocks) for part in blocks], dim)


# --- checking -------------------------------------------------------------------------------------


def violation(relation: Relation, whole_value: Any, pieces: Sequence[Any]) -> str | None:
    """Return why a value of the whole batch and its values on pieces do not have a relation.

    None if they have it.
    """
    if isinstance(relation, Unrelated):
        return None
    whole_value = np.asarray(whole_value)
    pieces = [np.asarray(piece) for piece in pieces]
    shapes = whole_value.shape, pieces[0].shape
    if isinstance(relation, Known):
        return _known_violation(relation, whole_value, pieces)
    if isinstance(relation, Columns):
        if len(relation.columns) != whole_value.shape[-1]:
            return "it has another number of columns"
        problems = [
            violation(
                column, whole_value[..., k : k + 1], [piece[..., k : k + 1] for piece in pieces]
            )
            for k, column in enumerate(relation.columns)
        ]
        return next((problem for problem in problems if problem), None)
    tolerance = _tolerance([whole_value, *pieces])
    whole_value = _exact(whole_value)
    pieces = [_exact(piece) for piece in pieces]
    row_dim = (
        relation.dim
        if isinstance(relation, Split)
        else relation.split.dim
        if isinstance(relation, Shifted)
        else None
    )
    for dim in differing_dims(shapes):
        if dim != row_dim and not all(
            _equal(value, np.broadcast_to(value.take([0], dim), value.shape), tolerance)
            for value in (whole_value, *pieces)
            if value.size
        ):
            return f"its entries along dim {dim}, of equal entries, differ"
    if isinstance(relation, Split):
        sizes = shapes[0][relation.dim], shapes[1][relation.dim]
        if sizes[0] != sizes[1] * len(pieces) or sizes[1] % relation.blocks:
            return f"its dim {relation.dim} has sizes {sizes}"
    dims = [dim for dim in differing_dims(shapes) if dim != row_dim]
    whole_value = _unspread(whole_value, dims)
    pieces = [_unspread(piece, dims) for piece in pieces]
    if isinstance(relation, Shifted):
        return _shifted_violation(relation, whole_value, pieces, tolerance)
    if isinstance(relation, Extreme):
        reduce = np.maximum if relation.kind == "max" else np.minimum
        extreme = pieces[0]
        for piece in pieces[1:]:
            extreme = reduce(extreme, piece)
        return (
            None if _equal(whole_value, extreme, 0) else f"{whole_value} is not the {relation.kind}"
        )
    if isinstance(relation, Same):
        alike = all(_equal(pieces[0], piece, tolerance) for piece in pieces)
        expected = pieces[0]
        if not alike:
            return "its pieces differ"
    elif isinstance(relation, Total):
        expected = sum(pieces[1:], start=pieces[0])
    else:
        expected = joined_pieces(relation, pieces)
    numerator, denominator = _fraction(relation.ratio, whole_value)
    if _equal(whole_value * denominator, expected * numerator, tolerance):
        is_multiple = isinstance(relation, Total) or relation.ratio != 1
        return None if is_multiple else _sign_violation(whole_value, expected)
    return f"{whole_value} is not {relation.ratio} times {expected}"


def _known_violation(
    relation: Known, whole_value: np.ndarray, pieces: Sequence[np.ndarray]
) -> str | None:
    for known, value in [
        (relation.whole_values, whole_value),
        *[(relation.piece_values, piece) for piece in pieces],
    ]:
        try:
            numbers = np.broadcast_to(known, value.shape)
        except ValueError:
            return f"its numbers have shape {known.shape}, not {value.shape}"
        if not _equal(_exact(numbers), _exact(value), _tolerance([value])):
            return f"its numbers are {value}, not {numbers}"
        problem = _sign_violation(numbers, value)
        if problem:
            return problem
    return None


def _sign_violation(numbers: np.ndarray, others: np.ndarray) -> str | None:
    """Return that zeros have other signs in equal numbers; None if not, or if they have no signs."""
    if numbers.dtype.kind != "f" or others.dtype.kind != "f":
        return None
    zeros = (numbers == 0) & (others == 0)
    if np.any(zeros & (np.signbit(numbers) != np.signbit(others))):
        return f"zeros of {numbers} have other signs in {others}"
    return None


def _shifted_violation(
    relation: Shifted, whole_value: np.ndarray, pieces: Sequence[np.ndarray], tolerance: float
) -> str | None:
    """Return why there are no rows Q_i and totals T_i with W = r concat(Q_i) + c sum T_i and P_i =
    Q_i + T_i.

    The residuals R_i = W_i - r P_i are c sum T - r T_i, which are constant along the rows. Their
    sum is (n c - r) sum T.
    """
    rows = relation.split
    share = relation.total.ratio
    numbers = joined_pieces(rows, [np.full(piece.shape, i) for i, piece in enumerate(pieces)])
    residuals = whole_value - float(rows.ratio) * joined_pieces(rows, pieces)
    sums = 0.0
    for i in range(len(pieces)):
        of_piece = np.moveaxis(residuals, rows.dim, -1)[np.moveaxis(numbers, rows.dim, -1) == i]
        of_piece = of_piece.reshape(
            *np.moveaxis(residuals, rows.dim, -1).shape[:-1], pieces[0].shape[rows.dim]
        )
        if not _equal(of_piece, np.broadcast_to(of_piece[..., :1], of_piece.shape), tolerance):
            return "the total is not the same for all rows of a piece"
        sums = sums + of_piece[..., 0]
    if len(pieces) * share == rows.ratio and not _equal(
        np.asarray(sums), np.zeros_like(sums), tolerance
    ):
        return "no totals explain the difference"
    return None


def _tolerance(values: Sequence[np.ndarray]) -> float:
    dtype = values[0].dtype
    if dtype.kind in "biu" or dtype.itemsize == 1:
        return 0.0
    sizes = [np.abs(_exact(value)) for value in values]
    largest = max((float(size[np.isfinite(size)].max(initial=0.0)) for size in sizes), default=0.0)
    return ROUNDINGS * float(jnp.finfo(dtype).eps) * (1.0 + largest)


def _exact(value: np.ndarray) -> np.ndarray:
    if value.dtype.kind in "iub":
        return value.astype(object)
    return value if value.dtype.kind == "c" else value.astype(np.float64)


def _fraction(ratio: Fraction, whole_value: np.ndarray) -> tuple[Any, Any]:
    if whole_value.dtype != object:
        return float(ratio), 1
    return ratio.numerator, ratio.denominator


def _unspread(value: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    for dim in dims:
        value = value.take([0], dim) if value.shape[dim] else value
    return value


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    a = np.asarray(a)
    b = np.asarray(b)
    if a.shape != b.shape:
        return False
    if a.dtype == object:
        return bool(np.all(a == b))
    return bool(np.all(np.isclose(a, b, rtol=0, atol=tolerance, equal_nan=True)))


@functools.lru_cache(maxsize=8)
def _compiled(jaxpr: jex.ClosedJaxpr) -> Callable[..., Any]:
    return jax.jit(jex.jaxpr_as_fun(jaxpr))


def _run(
    case: RuleCase, jaxpr: jex.ClosedJaxpr, operands: Sequence[Sequence[np.ndarray]]
) -> list[list[np.ndarray]]:
    """Return the results on each of several pieces, from operands on each of them."""
    function = _compiled(jaxpr)
    if case.axis:
        stacked = [np.stack(values) for values in operands]
        results = jax.vmap(function, axis_name=AXIS)(*stacked)
        return [[np.asarray(result)[i] for result in results] for i in range(len(operands[0]))]
    return [
        [np.asarray(result) for result in function(*values)]
        for values in zip(*operands, strict=True)
    ]


def _check_gradients(
    case: RuleCase,
    rng: np.random.Generator,
    jaxprs: Sequence[jex.ClosedJaxpr],
    relations: Sequence[Relation],
    pairs: Sequence[Pair],
) -> None:
    """Check the cotangents of some operands, for cotangents of some results.

    A cotangent is a derivative of the loss. The loss of the whole batch is `SCALE` times the
    sum of the losses of the pieces.
    """
    known = (Same, Split, Total)
    if not all(isinstance(relation, known) for relation in relations):
        return
    operands = [
        i
        for i, operand in enumerate(case.operands)
        if isinstance(operand.relation, known) and rng.random() < 0.8
    ]
    results = [i for i in range(len(relations)) if rng.random() < 0.7] or [0]
    cotangents = [
        _draw_cotangent(rng, relations[i], [jaxpr.out_avals[i].shape for jaxpr in jaxprs], case)
        for i in results
    ]

    def pulled_back(jaxpr: jex.ClosedJaxpr, values: list[Any], cotangents: list[Any]) -> list[Any]:
        def of_operands(*differentiated: jax.Array) -> list[jax.Array]:
            filled = list(values)
            for i, value in zip(operands, differentiated, strict=True):
                filled[i] = value
            outputs = jex.jaxpr_as_fun(jaxpr)(*filled)
            return [outputs[i] for i in results]

        _, pull_back = jax.vjp(of_operands, *[jnp.asarray(values[i]) for i in operands])
        return [np.asarray(cotangent) for cotangent in pull_back(cotangents)]

    whole_gradients = pulled_back(
        jaxprs[0], [pair[0] for pair in pairs], [pair[0] for pair in cotangents]
    )
    pieces = [
        pulled_back(jaxprs[1], [pair[1][i] for pair in pairs], [pair[1][i] for pair in cotangents])
        for i in range(case.num_pieces)
    ]
    for k, i in enumerate(operands):
        operand = case.operands[i]
        row_dim = operand.relation.dim if isinstance(operand.relation, Split) else None
        # entries that are equal, because they are one number, have its gradient together
        dims = tuple(dim for dim in differing_dims(operand.shapes) if dim != row_dim)
        whole_gradient, *piece_gradients = [
            gradients[k].sum(dims, keepdims=True) for gradients in (whole_gradients, *pieces)
        ]
        relation = _relation_of_cotangent(operand.relation)
        problem = violation(relation, whole_gradient, piece_gradients)
        gradients = [_relation_of_cotangent(operand.relation) for operand in case.operands]
        assert problem is None, _message(case, jaxprs, gradients, i, f"gradient: {problem}", pairs)


def _relation_of_cotangent(relation: Relation) -> Relation:
    if isinstance(relation, Total):
        return Same(SCALE / relation.ratio)
    if isinstance(relation, Same):
        return Total(SCALE / relation.ratio)
    assert isinstance(relation, Split)
    return dataclasses.replace(relation, ratio=SCALE / relation.ratio)


def _draw_cotangent(
    rng: np.random.Generator, relation: Relation, shapes: Sequence[Any], case: RuleCase
) -> Pair:
    cotangent = _relation_of_cotangent(relation)
    pieces = [rng.normal(size=shapes[1]) for _ in range(case.num_pieces)]
    if isinstance(cotangent, Same):
        return cotangent.ratio * pieces[0], [pieces[0]] * case.num_pieces
    assert isinstance(cotangent, Split | Total)
    whole_value = sum(pieces) if isinstance(cotangent, Total) else joined_pieces(cotangent, pieces)
    return np.asarray(cotangent.ratio * whole_value), pieces


def _message(
    case: RuleCase,
    jaxprs: Sequence[Any],
    relations: Sequence[Relation],
    k: int,
    problem: str,
    pairs: Sequence[Pair],
) -> str:
    operands = "\n".join(
        f"  {operand.relation} {operand.shapes} {np.dtype(operand.dtype)}"
        for operand in case.operands
    )
    return (
        f"result {k} is said to be {relations[k]}, but {problem}\n{case.num_pieces} pieces,"
        f" operands:\n{operands}\nwhole: {jaxprs[0]}\npiece: {jaxprs[1]}\n{pairs}"
    )


# --- random operands ------------------------------------------------------------------------------


def draw_shapes(
    rng: np.random.Generator,
    num_pieces: int,
    ndim: int,
    *,
    most_uneven: int = 2,
    sizes: Sequence[int] = (1, 2, 3, 4),
) -> Shapes:
    """Return random shapes of a value in the whole trace and in the piece trace.

    Up to `most_uneven` dims have other sizes in the whole trace: n times the size in most cases.
    A dim that is empty in a piece may have an entry in the whole trace.
    """
    piece = [int(rng.choice(sizes)) for _ in range(ndim)]
    whole_shape = list(piece)
    for dim in rng.permutation(ndim)[: rng.integers(0, most_uneven + 1)]:
        factor = num_pieces if rng.random() < 0.85 else int(rng.integers(2, 5))
        whole_shape[dim] = piece[dim] * factor
        if not piece[dim] and rng.random() < 0.5:
            whole_shape[dim] = 1
    return tuple(whole_shape), tuple(piece)


KINDS = (Same, Split, Total, Shifted, Extreme, Known)


def draw_operands(
    rng: np.random.Generator,
    shapes: Shapes,
    dtype: Any,
    num_pieces: int,
    count: int,
    kinds: Sequence[type] = KINDS,
) -> list[Operand]:
    """Return random operands of one shape and dtype: often rows of one place and values that all
    pieces share, which most rules know. At times all are known numbers.
    """
    mood = rng.random()
    if mood < 0.55:
        kinds = (Same, Split)
    elif mood < 0.65 and Known in kinds:
        kinds = (Known,)
    elif mood < 0.75 and Total in kinds:
        kinds = (Split, Total)
    relations = [draw_relation(rng, shapes, dtype, num_pieces, kinds) for _ in range(count)]
    first = relations[0]
    for i in range(1, count):
        if isinstance(first, Shifted) and rng.random() < 0.5:
            relations[i] = [first.split, first.total, Same()][rng.integers(3)]
        elif rng.random() < 0.6:
            relations[i] = first
    return [Operand(relation, shapes, dtype) for relation in relations]


def draw_relation(
    rng: np.random.Generator,
    shapes: Shapes,
    dtype: Any,
    num_pieces: int,
    kinds: Sequence[type] = KINDS,
) -> Relation:
    """Return a random relation that a value of these shapes and this dtype can have."""
    dtype = np.dtype(dtype)
    if any(0 in sizes_of_dim(shapes, dim) for dim in differing_dims(shapes)):
        # only constants may be empty in one of the traces
        return Known(*[any_numbers(rng, shape, dtype) for shape in shapes])
    row_dims = [
        dim
        for dim, (whole_size, piece) in enumerate(zip(*shapes, strict=True))
        if whole_size == piece * num_pieces and piece
    ]
    fitting = [kind for kind in kinds if kind not in (Split, Shifted) or row_dims]
    if dtype.kind not in "iufcV":
        fitting = [kind for kind in fitting if kind is not Total]
    if dtype.kind not in "fcV":
        fitting = [kind for kind in fitting if kind is not Shifted]
    kind = fitting[rng.integers(len(fitting))] if fitting else Same
    relation = _relation_of_kind(rng, kind, shapes, dtype, num_pieces, row_dims)
    return as_drawn(relation) if kind is not Known and rng.random() < 0.2 else relation


def _relation_of_kind(
    rng: np.random.Generator,
    kind: type,
    shapes: Shapes,
    dtype: np.dtype,
    num_pieces: int,
    row_dims: Sequence[int],
) -> Relation:
    ratio = draw_ratio(rng, dtype, num_pieces)
    if kind is Same:
        return Same(ratio)
    if kind is Total:
        return Total(ratio)
    if kind is Extreme:
        return Extreme(str(rng.choice(["max", "min"])))
    if kind is Known:
        return _draw_known(rng, shapes, dtype, num_pieces)
    dim = int(rng.choice(row_dims))
    divisors = [count for count in (1, 1, 2, 3) if shapes[1][dim] % count == 0]
    split = Split(dim, int(rng.choice(divisors)), ratio)
    if kind is Shifted:
        return Shifted(split, Total(draw_ratio(rng, dtype, num_pieces)))
    return split


def draw_ratio(rng: np.random.Generator, dtype: np.dtype, num_pieces: int) -> Fraction:
    """Return a random ratio: 1 in most cases."""
    if dtype.kind == "b" or rng.random() < 0.6:
        return Fraction(1)
    ratios = [Fraction(2), Fraction(1, 2), Fraction(1, num_pieces), Fraction(num_pieces)]
    return ratios[rng.integers(len(ratios))]


def _draw_known(
    rng: np.random.Generator, shapes: Shapes, dtype: np.dtype, num_pieces: int
) -> Known:
    style = rng.choice(["equal", "ratio", "rows", "any", "zeros", "zero in one", "signed zeros"])
    unit_shape = tuple(1 for _ in shapes[0])
    if style == "zeros":
        return Known(np.zeros(unit_shape, dtype), np.zeros(unit_shape, dtype))
    if style == "signed zeros":
        return Known(*[rng.choice([0, -0.0], unit_shape).astype(dtype) for _ in range(2)])
    if style == "zero in one":
        values = [np.zeros(unit_shape, dtype), np.ones(unit_shape, dtype)]
        rng.shuffle(values)
        return Known(*values)
    if style in ("equal", "ratio"):
        uneven = differing_dims(shapes)
        ratio = Fraction(1) if style == "equal" else draw_ratio(rng, dtype, num_pieces)
        whole_value, pieces = draw_pair(
            rng,
            Same(ratio),
            tuple(
                tuple(1 if dim in uneven else size for dim, size in enumerate(shape))
                for shape in shapes
            ),  # pyright: ignore
            dtype,
            num_pieces,
        )
        return Known(whole_value, pieces[0])
    piece = any_numbers(rng, shapes[1], dtype)
    dims = differing_dims(shapes)
    if style == "rows" and len(dims) == 1 and shapes[0][dims[0]] == shapes[1][dims[0]] * num_pieces:
        return Known(np.concatenate([piece] * num_pieces, dims[0]), piece)
    return Known(any_numbers(rng, shapes[0], dtype), piece)
