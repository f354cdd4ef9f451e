"""Numbers that follow from the trace alone, such as 1/B, arange(B) and masks: computed with numpy, on no device.

An array is kept with size 1 along the dims along which all its numbers are equal.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from shardopt.separability.relations import (
    Known,
    Same,
    Shapes,
    Site,
    Split,
    Unknown,
    Value,
    close,
    growth,
    tolerance_of,
)

MOST = 1 << 21
"""Numbers of the largest array that is computed."""
MOST_EQUAL = 1 << 12
"""The same of an array that has one shape in both traces, of which hardly any rule asks the numbers."""

ENTRY_BY_ENTRY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "square": np.square,
    "floor": np.floor,
    "ceil": np.ceil,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "rem": np.fmod,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "stop_gradient": lambda x: x,
    "name": lambda x: x,
    "convert_element_type": lambda x: x,
    "select_n": lambda which, *cases: np.select([which == i for i in range(len(cases))], cases, 0),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "div": lambda x, y: np.trunc(np.divide(x, y)) if x.dtype.kind in "biu" else np.divide(x, y),
}
REDUCE = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min, "reduce_and": np.all, "reduce_or": np.any}


def as_numbers(value: Any) -> np.ndarray | None:
    """Return a literal or a closed-over array as numpy has it; None if numpy has no such numbers, or it is large."""
    if getattr(value, "size", 1) > MOST or (
        hasattr(value, "dtype") and getattr(value.dtype, "kind", "?") not in "biufcV"
    ):
        return None
    array = np.asarray(value)
    if array.dtype == jax.dtypes.float0:  # the tangents of integers, which are nothing
        return np.zeros(array.shape, bool)
    if array.dtype.kind == "V":  # bfloat16 and its like
        return array.astype(np.float32)
    return array if array.dtype.kind in "biufc" else None


def fold(site: Site, values: Sequence[Value]) -> Known | None:
    """Return the numbers that an equation gives, if those of its operands are known and it is cheap to compute them."""
    if site.num_results != 1 or not all(isinstance(value, Known) for value in values):
        return None
    known = [value for value in values if isinstance(value, Known)]
    arrays = []
    most = MOST if len(set(site.result())) > 1 or any(not one.equal for one in known) else MOST_EQUAL
    with np.errstate(all="ignore"):
        for eqn, shape, operands in (
            (site.whole, site.result()[0], [one.whole for one in known]),
            (site.piece, site.result()[1], [one.piece for one in known]),
        ):
            array = _compute(eqn, shape, operands, most)
            if array is None or array.size > most:
                return None
            arrays.append(_compact(array))
    op = next((one.op for one in known if one.op is not None), site.op)
    return Known(arrays[0], arrays[1], op)


def _compact(array: np.ndarray) -> np.ndarray:
    for dim, size in enumerate(array.shape):
        if size > 1:
            first = array.take([0], dim)
            if np.array_equal(array, np.broadcast_to(first, array.shape)):
                array = first
    return array


def _compute(eqn: JaxprEqn, shape: tuple[int, ...], args: list[np.ndarray], most: int) -> np.ndarray | None:
    name, params = eqn.primitive.name, eqn.params
    dtype = getattr(eqn.outvars[0].aval, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcV":
        return None
    if name in ENTRY_BY_ENTRY or name == "integer_pow":
        if math.prod(np.broadcast_shapes(*(arg.shape for arg in args))) > most:
            return None
        array = np.asarray(
            args[0].astype(float) ** params["y"] if name == "integer_pow" else ENTRY_BY_ENTRY[name](*args)
        )
        array = array.astype(np.float32 if dtype.kind == "V" else dtype)
        return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if name == "iota":
        size, dim = shape[params["dimension"]], params["dimension"]
        if size > most:
            return None
        return np.arange(size).astype(dtype).reshape([-1 if i == dim else 1 for i in range(len(shape))])
    if name == "broadcast_in_dim":
        sizes = [1] * len(shape)
        for size, dim in zip(args[0].shape, params["broadcast_dimensions"], strict=True):
            sizes[dim] = size
        return args[0].reshape(sizes)
    if name == "squeeze":
        return args[0].squeeze(params["dimensions"])
    if name == "transpose":
        return args[0].transpose(params["permutation"])
    if name in ("reshape", "concatenate", "slice", "rev"):
        if name == "reshape" and args[0].size == 1:
            return args[0].reshape((1,) * len(shape))
        full = [np.broadcast_to(arg, var.aval.shape) for arg, var in zip(args, eqn.invars, strict=True)]  # pyright: ignore
        if sum(array.size for array in full) > most:
            return None
        if name == "slice":
            strides = params["strides"] or (1,) * len(shape)
            return full[0][tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]
        if name == "rev":
            return np.flip(full[0], params["dimensions"])
        return full[0].reshape(shape) if name == "reshape" else np.concatenate(full, params["dimension"])
    if name in REDUCE:
        full_shape = eqn.invars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
        reduced = REDUCE[name](args[0], axis=tuple(params["axes"]))
        repeated = math.prod(full_shape[dim] for dim in params["axes"] if args[0].shape[dim] == 1)
        return reduced * repeated if name == "reduce_sum" else reduced
    return None


def relation_of(known: Known, shapes: Shapes, pieces: int, dtype: Any) -> Value:
    """Return how known numbers of the whole follow from those of the pieces, all pieces having the same.

    The numbers themselves are compared, so the relation is right for these numbers.
    """
    if known.whole.shape == known.piece.shape:  # of size 1 where the shapes differ: equal entries
        ratio = _ratio(known.whole, known.piece, tolerance_of(dtype))
        if ratio is not None and all(
            known.whole.shape[dim] == 1 for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1
        ):
            return Same(ratio)
    dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    for dim in dims:
        if growth(shapes, [dim]) != pieces or any(known.whole.shape[other] > 1 for other in dims if other != dim):
            continue
        if known.piece.shape[dim] == shapes[1][dim]:
            repeated = np.concatenate([known.piece] * pieces, dim)
            if repeated.shape == known.whole.shape and np.array_equal(repeated, known.whole):
                return Split(dim)
    return Unknown("position" if dims else "count", known.op)


def _ratio(whole: np.ndarray, piece: np.ndarray, tolerance: float) -> float | None:
    """Return the number that the piece's numbers are to be multiplied with; None if there is none."""
    if np.array_equal(whole, piece, equal_nan=whole.dtype.kind in "fc"):
        return 1.0
    if whole.dtype.kind not in "iuf" or not np.array_equal(whole != 0, piece != 0):
        return None
    with np.errstate(all="ignore"):
        ratios = (whole / piece)[piece != 0].astype(float)
    first = float(ratios.flat[0])
    if not math.isfinite(first) or not all(close(first, float(one), tolerance) for one in (ratios.min(), ratios.max())):
        return None
    return first


def source_rows(known: np.ndarray, size: int) -> np.ndarray | None:
    """Return indices as numbers within a dim, as gathers clamp or wrap none; None if one is outside."""
    rows = known.reshape(-1)
    if rows.dtype.kind not in "iu" or (rows.size and (rows.min() < 0 or rows.max() >= size)):
        return None
    return rows
