"""Small whole numbers that follow from constants and the number of the device, computed for every device."""

import math
import re
from collections.abc import Sequence

import numpy as np

from shardopt.hlo.proof._lines import Line, dtype_of
from shardopt.hlo.proof._value import (
    Data,
    Dim,
    Factor,
    Hidden,
    Positions,
    Value,
    partition,
    same_everywhere,
    whole,
)

LIMIT = 1 << 16
"""The largest number of elements, over all devices, whose numbers are followed."""

DTYPES = {
    "pred": np.bool_,
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"u{bits // 8}").type for bits in (8, 16, 32, 64)},
}


def known(array: np.ndarray, devices: int, order: int) -> Value:
    """Return the value with known numbers `[1 or devices, *shape]`."""
    data = Data.of(array)
    array = data.array
    shape = array.shape[1:]
    varying = [dim for dim, size in enumerate(shape) if size > 1 and (array != array.take([0], dim + 1)).any()]
    dims: list[Dim] = [
        whole(size, devices) if dim in varying else same_everywhere(size, devices) for dim, size in enumerate(shape)
    ]
    hidden: tuple[Hidden, ...] = ()
    if len(array) > 1:
        rows = array.reshape(devices, -1)
        if len(varying) == 1 and (np.diff(array, axis=varying[0] + 1) == 1).all():
            dims[varying[0]] = (Factor(shape[varying[0]], -1, Positions.of(rows[:, 0])),)
        else:
            classes = Positions.of(np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1))
            hidden = (Hidden("device", partition(classes), len(np.unique(classes.array)), order),)
    fill = float(array.flat[0]) if array.size and (array == array.flat[0]).all() else None
    return Value(shape, tuple(dims), hidden, constant=True, fill=fill, data=data)


def literal(line: Line, devices: int) -> Value:
    """Return the value of a constant."""
    dtype, shape = dtype_of(line.shape), line.dims
    text = line.rest.partition(")")[0]
    size = math.prod(shape)
    numbers_text = re.sub(r"/\*.*?\*/", "", text).replace("{", " ").replace("}", " ").replace(",", " ").split()
    if "..." not in text and size <= LIMIT and len(numbers_text) in (1, size):
        if dtype == "pred":
            numbers = [part in ("true", "1") for part in numbers_text]
        elif dtype in DTYPES:
            numbers = [int(part) for part in numbers_text]
        else:
            numbers = None
        if numbers is not None:
            array = np.broadcast_to(
                np.array(numbers, DTYPES[dtype]).reshape(shape if len(numbers) == size else ()), shape
            )
            return known(array[None], devices, line.order)
        if len(set(numbers_text)) == 1 and re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", numbers_text[0]):
            return Value(
                shape,
                tuple(same_everywhere(n, devices) for n in shape),
                constant=True,
                fill=float(numbers_text[0]),
            )
    dims = tuple(whole(n, devices) for n in shape) if len(set(numbers_text)) > 1 else None
    if dims is None:
        dims = tuple((same_everywhere if size == 1 or "..." not in text else whole)(n, devices) for n in shape)
    return Value(shape, dims, constant=True)


def iota(line: Line, devices: int) -> Value:
    """Return the value that counts along a dim."""
    (dim,) = line.integers("iota_dimension")
    shape, dtype = line.dims, dtype_of(line.shape)
    if math.prod(shape) <= LIMIT and dtype in DTYPES:
        row = np.arange(shape[dim]).reshape([-1 if i == dim else 1 for i in range(len(shape))])
        return known(np.broadcast_to(row, shape).astype(DTYPES[dtype])[None], devices, line.order)
    dims = tuple((whole if i == dim else same_everywhere)(size, devices) for i, size in enumerate(shape))
    return Value(shape, dims, constant=True)


def evaluate(line: Line, values: Sequence[Value], devices: int) -> np.ndarray | None:
    """Return the numbers of the result if those of all operands are known, and few."""
    if not values or any(value.data is None for value in values):
        return None
    dtype = DTYPES.get(dtype_of(line.shape))
    arrays = [value.data.array for value in values if value.data is not None]
    rows = max(len(array) for array in arrays)
    if dtype is None or rows * math.prod(line.dims) > LIMIT:
        return None
    with np.errstate(all="ignore"):
        result = _evaluated(line, arrays, rows)
    if result is None or result.shape[1:] != line.dims:
        return None
    return result.astype(dtype)


_BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def _evaluated(line: Line, arrays: list[np.ndarray], rows: int) -> np.ndarray | None:
    opcode, first = line.opcode, arrays[0]
    if opcode in _BINARY:
        return _BINARY[opcode](*arrays)
    if opcode == "compare":
        return _COMPARE[line.attributes["direction"]](*arrays)
    if opcode in ("divide", "remainder"):
        divisor = np.where(arrays[1] == 0, 1, arrays[1])
        quotient = np.abs(first) // np.abs(divisor) * np.sign(first) * np.sign(divisor)
        if (arrays[1] == 0).any():
            return None
        return quotient if opcode == "divide" else first - quotient * divisor
    if opcode == "select":
        return np.where(*_expanded(arrays, line.dims))
    if opcode == "clamp":
        low, x, high = _expanded(arrays, line.dims)
        return np.minimum(np.maximum(x, low), high)
    if opcode == "not":
        return np.logical_not(first) if first.dtype == bool else np.invert(first)
    if opcode in ("negate", "abs", "sign"):
        return {"negate": np.negative, "abs": np.abs, "sign": np.sign}[opcode](first)
    if opcode in ("copy", "convert"):
        return first
    if opcode in ("reshape", "bitcast"):
        return first.reshape(len(first), *line.dims) if first.size == len(first) * math.prod(line.dims) else None
    if opcode == "broadcast":
        shape = [1] * len(line.dims)
        for size, dim in zip(first.shape[1:], line.integers("dimensions"), strict=True):
            shape[dim] = size
        return np.broadcast_to(first.reshape(len(first), *shape), (len(first), *line.dims))
    if opcode == "transpose":
        return first.transpose(0, *[dim + 1 for dim in line.integers("dimensions")])
    if opcode == "concatenate":
        (dim,) = line.integers("dimensions")
        return np.concatenate([np.broadcast_to(a, (rows, *a.shape[1:])) for a in arrays], axis=dim + 1)
    if opcode == "slice":
        bounds = [tuple(map(int, part.split(":"))) for part in re.findall(r"\[([\d:]+)\]", line.attributes["slice"])]
        return first[(slice(None), *(slice(*bound) for bound in bounds))]
    if opcode == "dynamic-slice":
        sizes = line.integers("dynamic_slice_sizes")
        pieces = []
        for row in range(rows):
            source = first[row % len(first)]
            starts = [int(a[row % len(a)]) for a in arrays[1:]]
            starts = [min(max(s, 0), n - k) for s, n, k in zip(starts, source.shape, sizes, strict=True)]
            pieces.append(source[tuple(slice(s, s + k) for s, k in zip(starts, sizes, strict=True))])
        return np.stack(pieces)
    return None


def _expanded(arrays: list[np.ndarray], shape: tuple[int, ...]) -> list[np.ndarray]:
    """Give scalars the shape of the arrays."""
    return [a.reshape(len(a), *[1] * len(shape)) if a.ndim == 1 and shape else a for a in arrays]
