"""Which values of a whole loss are kept for its backward pass, where weights are gathered."""

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from shardopt.trace._marks import GATHERED, value_name


def save_all_but_gathers(primitive: Primitive, *operands: ShapedArray, **params: object) -> bool:
    """Return whether a value may be saved, as a `jax.checkpoint` policy: the backward pass
    recomputes weight gathers only.

    No step from the gather (of bits, in half precision) to its named result may be saved. A saved
    step would keep the gathered weight, and recomputing the remaining steps would cost nothing. The
    bits of rounded numbers are no gather.
    """
    if primitive.name == "bitcast_convert_type":
        return params["new_dtype"] == jnp.int8 and not _survives(operands[0].dtype)
    if (
        primitive.name in ("all_gather", "sharding_constraint")
        or value_name(primitive, dict(params)) == GATHERED
    ):
        return False
    operand_dtype = getattr(operands[0], "dtype", None) if operands else None
    dtype = params.get("new_dtype") or params.get("preferred_element_type") or operand_dtype
    return _survives(dtype)  # pyright: ignore[reportArgumentType]


def _survives(dtype: DTypeLike | None) -> bool:
    """Return whether `jax.checkpoint` keeps all numbers of a dtype.

    It rounds floats that it keeps to the format of IEEE 754 with their bits of exponent and
    fraction. float8_e4m3fn has larger numbers than that format, and they become NaN.
    """
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return True
    info = jnp.finfo(dtype)
    return float(info.max) <= (2 - 2.0**-info.nmant) * 2.0 ** (2 ** (info.nexp - 1) - 1)
