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


def tiled_nbytes(shape: str) -> int:
    """Return the bytes of an array or tuple shape as its layout stores it: XLA:TPU fills dims up to whole tiles.

    Example:
      >>> tiled_nbytes("f32[100,12]{0,1:T(8,128)}") == 16 * 128 * 4
      True
    """
    if shape.strip().startswith("("):
        return sum(tiled_nbytes(part) for part in elements(shape))
    found = _TILED.match(shape.strip())
    if not found:
        return nbytes(shape)
    dims = _dims(found["dims"])
    order, tile = _dims(found["order"]), _dims(found["tile"])
    major_to_minor = [dims[at] for at in reversed(order)]
    padded = [1] * (len(tile) - len(dims)) + major_to_minor
    padded = [*padded[: -len(tile)], *(-(-dim // t) * t for dim, t in zip(padded[-len(tile) :], tile, strict=True))]
    return -(-math.prod(padded) * _bits(found["dtype"]) // 8)


def _dims(text: str) -> list[int]:
    return [int(dim.replace("<=", "")) for dim in text.split(",") if dim.strip()]


_TILED = re.compile(r"^(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]\{(?P<order>[\d,]*):T\((?P<tile>[\d,]+)\)")
_ARRAY = re.compile(r"^(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]$")
_BITS = re.compile(r"^(?:bf|f|s|u|c)(\d+)")


def _array_bytes(array: str) -> int:
    found = _ARRAY.match(array)
    if not found:
        raise ValueError(f"audit: cannot read the HLO shape {array!r}.")
    return -(-math.prod(_dims(found["dims"])) * _bits(found["dtype"]) // 8)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    if dtype in ("token", "opaque"):
        return 0
    found = _BITS.match(dtype)  # f8e4m3fn, bf16, s4, c64: the number that follows the letters
    if not found:
        raise ValueError(f"audit: unknown HLO element type {dtype!r}.")
    return int(found[1])
