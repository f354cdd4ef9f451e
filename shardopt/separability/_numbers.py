"""Computes numbers that follow from the trace alone, such as 1/B, arange(B) and masks, with numpy
on the host.

An array has size 1 along dims along which all its numbers are equal.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from shardopt.separability._relations import (
    EquationPair,
    Known,
    Relation,
    Same,
    Shapes,
    Split,
    Unrelated,
    differing_dims,
    equal_numbers,
    growth,
    is_plain_zero,
)
from shardopt.trace._jaxprs import shape_of

MAX_SIZE = 1 << 21
"""The size of the largest array that is computed."""
MAX_EQUAL_SIZE = 1 << 12
"""The size of the largest array that is computed if it is equal in both traces: hardly any rule
needs such numbers.
"""

ENTRY_BY_ENTRY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.bitwise_not,
    "rem": np.fmod,
    **dict.fromkeys(["copy", "stop_gradient", "name", "convert_element_type"], lambda x: x),
    # an index out of bounds takes the first or last case, as in XLA
    "select_n": lambda index, *cases: np.select(
        [index <= i for i in range(len(cases))], cases, cases[-1]
    ),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "div": lambda x, y: np.floor_divide(x, y) if x.dtype.kind in "iu" else np.divide(x, y),
}


def as_numbers(value: Any) -> np.ndarray | None:
    """Return a literal or a constant of a trace as a numpy array.

    None if it is too large, numpy has no such dtype, or this process cannot read it: a tracer of the
    user's own `jit`, or an array of other processes.
    """
    if isinstance(value, Tracer) or not getattr(value, "is_fully_addressable", True):
        return None
    if getattr(value, "size", 1) > MAX_SIZE or (
        hasattr(value, "dtype") and getattr(value.dtype, "kind", "?") not in "biufcV"
    ):
        return None
    array = np.asarray(value)
    if array.dtype == jax.dtypes.float0:  # the tangents of integers, which hold no numbers
        return np.zeros(array.shape, bool)
    if array.dtype.kind == "V":  # bfloat16 and similar dtypes
        return array.astype(np.float32)
    return array


def fold_constants(site: EquationPair, relations: Sequence[Relation]) -> Known | None:
    """Return the numbers that an equation computes.

    None if an operand is not known or the computation is too large. None too for what jumps, such as
    a comparison, if it takes floats: a device may round them otherwise.
    """
    known = [relation for relation in relations if isinstance(relation, Known)]
    if site.num_results != 1 or len(known) != len(relations):
        return None
    from_floats = any(numbers.whole_values.dtype.kind in "fc" for numbers in known)
    jumps = site.name in ("sign", "rem") or not jnp.issubdtype(site.dtype, jnp.inexact)
    if from_floats and jumps:
        return None
    arrays = []
    are_equal = len(set(site.result_shapes())) == 1 and all(
        numbers.same_numbers for numbers in known
    )
    max_size = MAX_EQUAL_SIZE if are_equal else MAX_SIZE
    with np.errstate(all="ignore"):
        for eqn, shape, args in (
            (site.whole_eqn, site.result_shapes()[0], [numbers.whole_values for numbers in known]),
            (site.piece_eqn, site.result_shapes()[1], [numbers.piece_values for numbers in known]),
        ):
            array = _compute(eqn, shape, args, max_size)
            if array is None or array.size > max_size:
                return None
            if array.dtype.kind == "V":  # bfloat16 and similar dtypes
                array = array.astype(np.float32)
            arrays.append(_compress(array))
    op = next((numbers.op for numbers in known if numbers.op is not None), site.op)
    return Known(arrays[0], arrays[1], op)


def _compress(array: np.ndarray) -> np.ndarray:
    """Return an array with size 1 along dims along which all its numbers are equal."""
    for dim, size in enumerate(array.shape):
        if size > 1:
            first = array.take([0], dim)
            if equal_numbers(array, first):
                array = first
    return array


def _compute(
    eqn: JaxprEqn, shape: tuple[int, ...], args: list[np.ndarray], max_size: int
) -> np.ndarray | None:
    """Return the numbers of a result from the numbers of its operands.

    None if the computation is unknown or too large.
    """
    name = eqn.primitive.name
    params = eqn.params
    dtype = getattr(eqn.outvars[0].aval, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcV":
        return None
    if not _is_defined(name, args, dtype):
        return None
    if name in ENTRY_BY_ENTRY:
        if math.prod(np.broadcast_shapes(*(arg.shape for arg in args))) > max_size:
            return None
        array = np.asarray(ENTRY_BY_ENTRY[name](*args)).astype(dtype)
        return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if name == "iota":
        dim = params["dimension"]
        size = shape[dim]
        sizes = [1] * len(shape)
        sizes[dim] = size
        return None if size > max_size else np.arange(size).astype(dtype).reshape(sizes)
    if name == "reduce_sum":
        full_shape = shape_of(eqn.invars[0])
        axes = params["axes"]
        num_repeats = math.prod(full_shape[dim] for dim in axes if args[0].shape[dim] == 1)
        return (args[0].sum(axes) * num_repeats).astype(dtype)
    return _moved(eqn, shape, args, max_size)


def _moved(
    eqn: JaxprEqn, shape: tuple[int, ...], args: list[np.ndarray], max_size: int
) -> np.ndarray | None:
    """Return the numbers of a result that has the operands' numbers in other places."""
    params = eqn.params
    match eqn.primitive.name:
        case "broadcast_in_dim":
            added = {*range(len(shape))} - {*params["broadcast_dimensions"]}
            return np.expand_dims(args[0], list(added))
        case "squeeze":
            return args[0].squeeze(params["dimensions"])
        case "transpose":
            return args[0].transpose(params["permutation"])
        case "reshape" if params["dimensions"] is not None:  # it transposes first
            return None
        case "reshape" if args[0].size == 1:
            return args[0].reshape((1,) * len(shape))
    full_shapes = list(map(shape_of, eqn.invars))
    if sum(map(math.prod, full_shapes)) > max_size:
        return None
    full_args = list(map(np.broadcast_to, args, full_shapes))
    match eqn.primitive.name:
        case "reshape":
            return full_args[0].reshape(shape)
        case "concatenate":
            return np.concatenate(full_args, params["dimension"])
        case "slice":
            strides = params["strides"] or (1,) * len(shape)
            bounds = params["start_indices"], params["limit_indices"], strides
            return full_args[0][tuple(map(slice, *bounds))]
    return None


def _is_defined(name: str, args: Sequence[np.ndarray], dtype: np.dtype) -> bool:
    """Return whether numpy and XLA give the same: not for quotients of negative integers, for
    integers divided by 0, or made of numbers that they cannot hold. And not for the sign of a zero
    that follows from -0.0.
    """
    # sums of numbers of 8 bits are rounded after each term
    if name == "reduce_sum" and dtype.itemsize == 1:
        return False
    if name in ("max", "min", "clamp", "sign", "reduce_sum"):
        return all(map(is_plain_zero, (arg[arg == 0] for arg in args)))
    if name in ("div", "rem") and dtype.kind in "iu":
        return bool(np.all(args[0] >= 0) and np.all(args[1] > 0))
    return True


def relation_of_numbers(known: Known, shapes: Shapes, num_pieces: int, dtype: Any) -> Relation:
    """Return `Same` or `Split` for known numbers, by comparing the numbers.

    `Unrelated` if neither is right.

    Args:
      known: the numbers in the whole trace and in the piece trace.
      shapes: the shapes of the value in the whole trace and in the piece trace.
      num_pieces: n. All pieces have the same numbers.
      dtype: the dtype of the value, to whose rounding the ratio is exact.
    """
    whole_values = known.whole_values
    piece_values = known.piece_values
    dims = differing_dims(shapes)
    # with size 1 along dims where the shapes differ: equal entries
    if whole_values.shape == piece_values.shape:
        ratio = _common_ratio(whole_values, piece_values, num_pieces, dtype)
        if ratio is not None and all(whole_values.shape[dim] == 1 for dim in dims):
            return Same(ratio)
    for dim in dims:
        if growth(shapes, [dim]) != num_pieces or any(
            whole_values.shape[i] > 1 for i in dims if i != dim
        ):
            continue
        if piece_values.shape[dim] == shapes[1][dim]:
            repeated = np.concatenate([piece_values] * num_pieces, dim)
            if repeated.shape == whole_values.shape and equal_numbers(repeated, whole_values):
                return Split(dim)
    return Unrelated("position" if dims else "count", known.op)


def _common_ratio(
    whole_values: np.ndarray, piece_values: np.ndarray, num_pieces: int, dtype: Any
) -> Fraction | None:
    """Return a number r with whole_values = r * piece_values, up to the rounding of the result.

    None if there is none. A power of n comes first: of rounded numbers, several ratios may be right.
    A negative ratio would change the sign of a zero, and numbers of 8 bits are not rounded: 1/6 as
    float8_e4m3fn is 3% more than a third of 1/2.
    """
    if equal_numbers(whole_values, piece_values):
        return Fraction(1)
    nonzero = piece_values != 0
    if whole_values.dtype.kind not in "iuf" or dtype.itemsize == 1 or not nonzero.any():
        return None
    pair = whole_values[nonzero].flat[0].item(), piece_values[nonzero].flat[0].item()
    if not all(map(math.isfinite, pair)):
        return None
    powers = [Fraction(num_pieces) ** k for k in (-1, 1, -2, 2)]
    for ratio in (*powers, Fraction(pair[0]) / Fraction(pair[1])):
        if ratio > 0 and (
            _rounds_to(piece_values, ratio, whole_values, dtype)
            or _rounds_to(whole_values, 1 / ratio, piece_values, dtype)
        ):
            return ratio
    return None


def _rounds_to(values: np.ndarray, ratio: Fraction, expected: np.ndarray, dtype: Any) -> bool:
    """Return whether the numbers times a ratio are the expected ones, rounded to their dtype.

    Integers are not rounded.
    """
    if dtype.kind in "iu":
        products = values.astype(object) * ratio
        return bool(np.all(products == expected))
    with np.errstate(all="ignore"):
        products = values.astype(float) * ratio.numerator / ratio.denominator
        return equal_numbers(products.astype(dtype).astype(float), expected.astype(float))


def row_numbers(indices: np.ndarray, size: int) -> np.ndarray | None:
    """Return indices into a dim as a flat array.

    None if an index is out of bounds, where gathers clamp, wrap or fill.
    """
    rows = indices.reshape(-1)
    if rows.dtype.kind not in "iu" or (rows.size and (rows.min() < 0 or rows.max() >= size)):
        return None
    return rows
