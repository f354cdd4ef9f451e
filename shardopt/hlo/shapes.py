"""Shapes as HLO writes them, and their bytes."""

import math
import re

from shardopt.hlo.text import split


def elements(shape: str) -> list[str]:
    """Return the members of a tuple shape, one level deep; an array is its own only member."""
    shape = shape.strip()
    return [part.strip() for part in split(shape[1:-1]) if part.strip()] if shape.startswith("(") else [shape]


def arrays(shape: str) -> list[str]:
    """Return all arrays of a shape, tuples within tuples too, without their layouts: `["f32[8,4]", ...]`."""
    if shape.strip().startswith("("):
        return [array for part in elements(shape) for array in arrays(part)]
    return [shape.split("{")[0].strip()]


def nbytes(shape: str) -> int:
    """Return the bytes of an array or tuple shape, each array rounded up to whole bytes, its layout's padding left out.

    Tokens have none. A bounded dynamic dim (`<=8`) counts as its bound.

    Example:
      >>> nbytes("(bf16[8,4]{1,0:T(8,128)(2,1)}, s4[3]{0:E(4)}, pred[])")
      67
    """
    return sum(_array_bytes(array) for array in arrays(shape))


_ARRAY = re.compile(r"^(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]$")
_BITS = re.compile(r"^(?:bf|f|s|u|c)(\d+)")


def _array_bytes(array: str) -> int:
    found = _ARRAY.match(array)
    if not found:
        raise ValueError(f"audit: cannot read the HLO shape {array!r}.")
    dims = [int(dim.replace("<=", "")) for dim in found["dims"].split(",") if dim.strip()]
    return -(-math.prod(dims) * _bits(found["dtype"]) // 8)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    if dtype in ("token", "opaque"):
        return 0
    found = _BITS.match(dtype)  # f8e4m3fn, bf16, s4, c64: the number that follows the letters
    if not found:
        raise ValueError(f"audit: unknown HLO element type {dtype!r}.")
    return int(found[1])
