"""Small whole numbers that follow from constants and the number of the device, computed for every
device.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from shardopt.hlo.proof import _interpret_numpy
from shardopt.hlo.proof._interpret_shards import whole_numbers, words_of_literal
from shardopt.hlo.proof._lines import INTEGERS, Line, dtype_of
from shardopt.hlo.proof._value import (
    Data,
    DerivedValue,
    Dim,
    Factor,
    Hidden,
    Positions,
    partition,
    same_everywhere,
    whole,
)
from shardopt.trace._primitives import words

LIMIT = 1 << 16
"""The largest number of elements, over all devices, whose numbers are followed."""


def known(array: np.ndarray, line: Line) -> DerivedValue:
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
        whole(size, line.devices) if dim in varying else same_everywhere(size, line.devices)
        for dim, size in enumerate(shape)
    ]
    hidden: tuple[Hidden, ...] = ()
    if len(array) > 1:
        rows = array.reshape(line.devices, -1)
        if len(varying) == 1 and (np.diff(array, axis=varying[0] + 1) == 1).all():
            dims[varying[0]] = (Factor(shape[varying[0]], -1, Positions.of(rows[:, 0])),)
        else:
            classes = Positions.of(np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1))
            hidden = (
                Hidden("device", partition(classes), len(np.unique(classes.array)), line.order),
            )
    fill = float(array.flat[0]) if array.size and (array == array.flat[0]).all() else None
    return DerivedValue(shape, tuple(dims), hidden, constant=True, fill=fill, data=data)


def literal(line: Line) -> DerivedValue:
    """Return the value of a constant."""
    shape = line.dims
    size = math.prod(line.dims)
    written = words_of_literal(line.literal)
    has_all = "..." not in written and size <= LIMIT and len(written) in (1, size)
    if has_all and dtype_of(line.shape) in INTEGERS:
        array = whole_numbers(written).astype(INTEGERS[dtype_of(line.shape)])
        array = array.reshape(shape if len(written) == size else ())
        return known(np.broadcast_to(array, shape)[None], line)
    is_one = len(set(written)) <= 1
    fill = None
    if has_all and is_one and re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", written[0]):
        fill = float(written[0])
    is_same = is_one and "..." not in written
    dims = tuple((same_everywhere if is_same or n == 1 else whole)(n, line.devices) for n in shape)
    return DerivedValue(shape, dims, constant=True, fill=fill)


def iota(line: Line) -> DerivedValue:
    """Return the value that counts along a dim."""
    if math.prod(line.dims) <= LIMIT and dtype_of(line.shape) in INTEGERS:
        return known(_interpret_numpy.iota(line)(1), line)
    (counted,) = line.integers("iota_dimension")
    dims = tuple(
        (whole if dim == counted else same_everywhere)(size, line.devices)
        for dim, size in enumerate(line.dims)
    )
    return DerivedValue(line.dims, dims, constant=True)


def evaluate(line: Line, values: Sequence[DerivedValue]) -> np.ndarray | None:
    """Return the numbers of the result if the numbers of all operands are known, and few."""
    if not values or line.opcode not in EVALUATED or any(value.data is None for value in values):
        return None
    arrays = [value.data.array for value in values if value.data is not None]
    rows = max(map(len, arrays))
    if dtype_of(line.shape) not in INTEGERS or rows * math.prod(line.dims) > LIMIT:
        return None
    arrays = [np.broadcast_to(array, (rows, *array.shape[1:])) for array in arrays]
    # the numbers of a bitcast stay in the order of the dims
    step = line._replace(opcode="reshape") if line.opcode == "bitcast" else line
    try:
        with np.errstate(all="ignore"):
            result = (_interpret_numpy.elementwise(step) or _interpret_numpy.shaped(step))(*arrays)  # type: ignore[misc]
    except (ValueError, KeyError):
        return None
    return result if result.shape[1:] == line.dims else None


EVALUATED = words(
    "add subtract multiply maximum minimum and or xor compare divide remainder select clamp not"
    " negate abs sign copy convert reshape bitcast broadcast transpose concatenate slice"
    " dynamic-slice"
)
