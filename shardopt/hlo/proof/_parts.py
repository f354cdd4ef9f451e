"""Concatenations whose pieces have different layouts: buckets of several leaves.

Each piece is followed alone.
"""

from collections.abc import Callable, Sequence

from shardopt.hlo.proof._lines import Line
from shardopt.hlo.proof._value import (
    DerivedValue,
    Factor,
    Unproved,
    is_constant_along,
    replaced,
    resized,
)
from shardopt.trace._primitives import words

Apply = Callable[[Line, Sequence[DerivedValue]], DerivedValue]

BY_ELEMENT = words(
    "add subtract multiply divide maximum minimum negate convert copy select compare and or not abs"
    " sign sqrt rsqrt exponential log tanh power floor ceil round-nearest-even clamp"
    " reduce-precision is-finite bitcast-convert"
)


def as_parts(values: Sequence[DerivedValue], dim: int, line: Line) -> DerivedValue:
    """Return the concatenation of values along the last dim as parts."""
    if any(size != 1 for size in line.dims[dim + 1 :]):
        raise Unproved(
            "it concatenates pieces of different layouts along a dim that is not the last."
        )
    parts = [part for value in values for part in value.parts or (value,)]
    return DerivedValue(line.dims, parts=tuple(parts))


def along(value: DerivedValue) -> int:
    """Return the dim along which the parts of a value are concatenated: the last with more than one
    element.
    """
    sizes = [i for i in range(len(value.shape)) if value.shape[i] != 1]
    return sizes[-1] if sizes else len(value.shape) - 1


def by_parts(line: Line, values: Sequence[DerivedValue], apply: Apply) -> DerivedValue:
    """Apply an instruction to every part."""
    value = next(value for value in values if value.parts)
    dim = along(value)
    parts = value.parts or ()
    if line.opcode in BY_ELEMENT and line.dims == value.shape:
        columns = [_split(other, value, dim) for other in values]
        results = []
        for i, part in enumerate(parts):
            part_line = _resized(line, part.shape)
            results.append(apply(part_line, [column[i] for column in columns]))
        return DerivedValue(line.dims, parts=tuple(results))
    if line.opcode == "slice":
        if any(line.bounds[i] != (0, size, 1) for i, size in enumerate(value.shape) if i != dim):
            raise Unproved("it slices a bucket along another dim.")
        start, stop, stride = line.bounds[dim]
        return sliced(value, start, stop, line, apply) if stride == 1 else _refuse(line)
    if line.opcode in ("reshape", "bitcast"):
        return with_ones(value, line.dims)
    return _refuse(line)


def _refuse(line: Line) -> DerivedValue:
    raise Unproved(f"no rule covers {line.opcode} of a bucket of pieces with different layouts.")


def _resized(line: Line, shape: tuple[int, ...]) -> Line:
    return line._replace(shape=f"{line.shape.split('[')[0]}[{','.join(map(str, shape))}]")


def _split(other: DerivedValue, value: DerivedValue, dim: int) -> list[DerivedValue]:
    parts = value.parts or ()
    if other.parts:
        if [part.shape for part in other.parts] != [part.shape for part in parts]:
            raise Unproved("two buckets have different pieces.")
        return list(other.parts)
    if not other.shape:
        return [other for _ in parts]
    if not is_constant_along(other.dims[dim]):
        raise Unproved("a bucket meets an array that is no bucket.")
    return [
        other._replace(
            shape=part.shape,
            dims=replaced(other.dims, dim, resized(other.dims[dim], part.shape[dim])),
            data=None,
        )
        for part in parts
    ]


def sliced(value: DerivedValue, start: int, stop: int, line: Line, apply: Apply) -> DerivedValue:
    """Return the elements from `start` to `stop` along the dim of the parts."""
    dim = along(value)
    position = 0
    taken = []
    for part in value.parts or ():
        size = part.shape[dim]
        low = max(start - position, 0)
        high = min(stop - position, size)
        position += size
        if low >= high:
            continue
        # A slice across a border takes the end of one part and the beginning of the next.
        if (low, high) != (0, size):
            shape = replaced(part.shape, dim, high - low)
            bounds = ",".join(
                f"[{low}:{high}]" if i == dim else f"[0:{n}]" for i, n in enumerate(part.shape)
            )
            part_line = _resized(line, shape)._replace(
                opcode="slice", attributes={"slice": "{" + bounds + "}"}
            )
            part = apply(part_line, [part])
        taken.append(part)
    if len(taken) == 1:
        return taken[0]
    return DerivedValue(line.dims, parts=tuple(taken))


def with_ones(value: DerivedValue, shape: tuple[int, ...]) -> DerivedValue:
    """Return a bucket reshaped by dims of size 1."""
    if [n for n in shape if n != 1] != [n for n in value.shape if n != 1]:
        raise Unproved("it reshapes a bucket of pieces with different layouts.")
    old = along(value)
    result = DerivedValue(shape)
    new = along(result)
    parts = []
    for part in value.parts or ():
        dims: list[tuple[Factor, ...]] = [()] * len(shape)
        sources = [i for i in range(len(value.shape)) if value.shape[i] != 1]
        targets = [i for i in range(len(shape)) if shape[i] != 1]
        for i, j in zip(sources, targets, strict=True):
            dims[j] = part.dims[i]
        part_shape = replaced(shape, new, part.shape[old])
        parts.append(part._replace(shape=part_shape, dims=tuple(dims), data=None))
    return result._replace(parts=tuple(parts))
