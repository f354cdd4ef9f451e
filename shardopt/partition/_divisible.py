"""What to say of a dim that a mesh axis does not divide: lengths and sizes that would do."""

import math
from collections.abc import Collection


def not_divided(dim: int, length: int, axis: str, size: int) -> str:
    """Return the length of a dim, and the lengths next to it that the axis divides."""
    below = length // size * size
    lengths = f"{below} or {below + size}" if below else f"{size}"
    return f"dim {dim} is {length}, which {axis}={size} does not divide; it divides {lengths}"


def sizes_that_divide(axis: str, lengths: Collection[int]) -> str:
    """Return the sizes of an axis that divide all these lengths, at most the eight smallest.

    1 if there are no lengths.
    """
    common = math.gcd(*lengths) or 1
    *smaller, largest = [size for size in range(1, common + 1) if common % size == 0][:8]
    return f"{axis}={', '.join(map(str, smaller))}{' or ' if smaller else ''}{largest}"
