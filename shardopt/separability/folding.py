"""The numbers in a trace that follow from the trace alone: 1/B, arange(B), masks; computed with numpy, on no device.

An array is kept with size 1 along the dims along which it is everywhere the same.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from shardopt.separability.values import Const, Site, Value

LIMIT = 1 << 14
"""Entries of the largest array that is worth knowing."""

NUMPY: dict[str, Callable[..., np.ndarray]] = {
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
    "stop_gradient": lambda x: x,
    "select_n": lambda which, *cases: np.select([which == i for i in range(len(cases))], cases, 0),
    "clamp": lambda low, x, high: np.clip(x, low, high),
}
REDUCE = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min, "reduce_and": np.all, "reduce_or": np.any}


def as_number(value: Any) -> np.ndarray | None:
    """Return a literal or a closed-over array as numpy has it; None for what it does not know or what is large."""
    if getattr(value, "size", 1) > LIMIT or (hasattr(value, "dtype") and not hasattr(value.dtype, "kind")):
        return None
    if hasattr(value, "dtype") and value.dtype.kind not in "biufcV":
        return None
    array = np.asarray(value)
    if array.dtype.kind == "V":  # bfloat16 and the like
        return array.astype(np.float32)
    return array if array.dtype.kind in "biufc" else None


def fold(site: Site, values: Sequence[Value]) -> tuple[np.ndarray, ...] | None:
    """Return the numbers that come out of an equation in each trace, if they are known and few."""
    given: list[tuple[np.ndarray, ...]] = []
    for value in values:
        if not isinstance(value, Const) or value.values is None:
            return None
        given.append(value.values)
    found = []
    with np.errstate(all="ignore"):
        for k, eqn in enumerate(site.eqns):
            array = _fold(eqn, site.outs()[k], [one[k] for one in given])
            if array is None or array.size > LIMIT:
                return None
            found.append(array)
    return tuple(found)


def _fold(eqn: JaxprEqn, shape: tuple[int, ...], args: list[np.ndarray]) -> np.ndarray | None:
    name, params = eqn.primitive.name, eqn.params
    if name in NUMPY or name in ("div", "integer_pow", "convert_element_type"):
        if math.prod(np.broadcast_shapes(*(arg.shape for arg in args))) > LIMIT:
            return None
        dtype = getattr(eqn.outvars[0].aval, "dtype", None)
        if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcV":
            return None
        found = np.asarray(_entry_by_entry(name, params, args))
        found = found.astype(np.float32 if dtype.kind == "V" else dtype)
        return found.reshape((1,) * (len(shape) - found.ndim) + found.shape)
    if name == "iota":
        size, dim = shape[params["dimension"]], params["dimension"]
        return (
            np.arange(size).reshape([-1 if one == dim else 1 for one in range(len(shape))]) if size <= LIMIT else None
        )
    if name == "broadcast_in_dim":
        sizes = [1] * len(shape)
        for size, dim in zip(args[0].shape, params["broadcast_dimensions"], strict=True):
            sizes[dim] = size
        return args[0].reshape(sizes)
    if name == "squeeze":
        return args[0].squeeze(params["dimensions"])
    if name == "transpose":
        return args[0].transpose(params["permutation"])
    if name in ("reshape", "concatenate"):
        full = [arg.size == 1 for arg in args]
        if name == "reshape" and full[0]:
            return args[0].reshape((1,) * len(shape))
        if math.prod(shape) > LIMIT:
            return None
        whole = [
            np.broadcast_to(arg, var.aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
            for arg, var in zip(args, eqn.invars, strict=True)
        ]
        return whole[0].reshape(shape) if name == "reshape" else np.concatenate(whole, params["dimension"])
    if name in REDUCE:
        whole = eqn.invars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
        found = REDUCE[name](args[0], axis=tuple(params["axes"]))
        uniform = math.prod(whole[dim] for dim in params["axes"] if args[0].shape[dim] == 1)
        return found * uniform if name == "reduce_sum" else found
    return None


def _entry_by_entry(name: str, params: dict[str, Any], args: list[np.ndarray]) -> np.ndarray:
    if name == "convert_element_type":
        return args[0]
    if name == "integer_pow":
        return args[0].astype(float) ** params["y"]
    if name == "div":
        integers = args[0].dtype.kind in "biu"
        return np.trunc(np.divide(*args)) if integers else np.divide(*args)
    return NUMPY[name](*args)
