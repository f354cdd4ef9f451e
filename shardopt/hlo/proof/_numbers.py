"""Small whole numbers that follow from constants and the number of the device, computed for every
device.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from shardopt.hlo.proof import _interpret_numpy
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
    varying = [
        dim
        for dim, size in enumerate(shape)
        if size > 1 and (array != array.take([0], dim + 1)).any()
    ]
    dims: list[Dim] = [
        whole(size, devices) if dim in varying else same_everywhere(size, devices)
        for dim, size in enumerate(shape)
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
    numbers_text = (
        re.sub(r"/\*.*?\*/", "", text).replace("{", " ").replace("}", " ").replace(",", " ").split()
    )
    if "..." not in text and size <= LIMIT and len(numbers_text) in (1, size):
        if dtype == "pred":
            numbers = [part in ("true", "1") for part in numbers_text]
        elif dtype in DTYPES:
            numbers = [int(part) for part in numbers_text]
        else:
            numbers = None
        if numbers is not None:
            array = np.broadcast_to(
                np.array(numbers, DTYPES[dtype]).reshape(shape if len(numbers) == size else ()),
                shape,
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
        dims = tuple(
            (same_everywhere if size == 1 or "..." not in text else whole)(n, devices)
            for n in shape
        )
    return Value(shape, dims, constant=True)


def iota(line: Line, devices: int) -> Value:
    """Return the value that counts along a dim."""
    (dim,) = line.integers("iota_dimension")
    shape, dtype = line.dims, dtype_of(line.shape)
    if math.prod(shape) <= LIMIT and dtype in DTYPES:
        row = np.arange(shape[dim]).reshape([-1 if i == dim else 1 for i in range(len(shape))])
        return known(np.broadcast_to(row, shape).astype(DTYPES[dtype])[None], devices, line.order)
    dims = tuple(
        (whole if i == dim else same_everywhere)(size, devices) for i, size in enumerate(shape)
    )
    return Value(shape, dims, constant=True)


def evaluate(line: Line, values: Sequence[Value], devices: int) -> np.ndarray | None:
    """Return the numbers of the result if those of all operands are known, and few."""
    if not values or line.opcode not in EVALUATED or any(value.data is None for value in values):
        return None
    arrays = [value.data.array for value in values if value.data is not None]
    rows = max(len(array) for array in arrays)
    if dtype_of(line.shape) not in DTYPES or rows * math.prod(line.dims) > LIMIT:
        return None
    arrays = [np.broadcast_to(array, (rows, *array.shape[1:])) for array in arrays]
    shapes = tuple(
        f"{_NAMES[array.dtype]}[{','.join(map(str, array.shape[1:]))}]" for array in arrays
    )
    # the numbers of a bitcast stay in the order of the dims
    opcode = "reshape" if line.opcode == "bitcast" else line.opcode
    step = _interpret_numpy.Line(opcode, line.shape.partition("{")[0], line.attributes, shapes)
    try:
        with np.errstate(all="ignore"):
            result = (_interpret_numpy.elementwise(step) or _interpret_numpy.shaped(step))(*arrays)  # type: ignore[misc]
    except (ValueError, KeyError):
        return None
    return result if result.shape[1:] == line.dims else None


EVALUATED = (
    "add",
    "subtract",
    "multiply",
    "maximum",
    "minimum",
    "and",
    "or",
    "xor",
    "compare",
    "divide",
    "remainder",
)
EVALUATED += (
    "select",
    "clamp",
    "not",
    "negate",
    "abs",
    "sign",
    "copy",
    "convert",
    "reshape",
    "bitcast",
    "broadcast",
)
EVALUATED += ("transpose", "concatenate", "slice", "dynamic-slice")
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
