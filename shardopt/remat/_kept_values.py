"""Which values of a whole loss are kept for its backward pass, where weights are gathered."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from shardopt.trace._jaxprs import open_jaxpr
from shardopt.trace._marks import GATHERED, value_name


def save_all_but_gathers(primitive: Primitive, *operands: ShapedArray, **params: object) -> bool:
    """Return whether a value may be saved, as a `jax.checkpoint` policy: the backward pass
    recomputes weight gathers only.

    No step from the gather (of bits, in half precision) to its named result may be saved. A saved
    step would keep the gathered weight, and recomputing the remaining steps would cost nothing. The
    bits of rounded numbers are no gather.
    """
    if primitive.name == "bitcast_convert_type":
        # Rounded numbers are kept as int8: as floats, `jax.checkpoint` would make NaN of the
        # largest.
        return params["new_dtype"] == jnp.int8 and not _survives(operands[0].dtype)
    if (
        primitive.name in ("all_gather", "sharding_constraint")
        or value_name(primitive, dict(params)) == GATHERED
    ):
        return False
    results = _results(primitive, operands, params)
    return all(_survives(getattr(result, "dtype", None)) for result in results)


def _results(
    primitive: Primitive, operands: Sequence[ShapedArray], params: Mapping[str, Any]
) -> Sequence[Any]:
    """Return the types of the results of an operation."""
    if "call_jaxpr" in params:  # a function with its own derivative has no rule for types
        return [var.aval for var in open_jaxpr(params["call_jaxpr"]).outvars]
    results, _ = primitive.abstract_eval(*operands, **params)
    return results if primitive.multiple_results else [results]


def _survives(dtype: DTypeLike | None) -> bool:
    """Return whether `jax.checkpoint` keeps all numbers of a dtype.

    It rounds floats that it keeps to the format of IEEE 754 with their bits of exponent and
    fraction. float8_e4m3fn has larger numbers than that format, and they become NaN. No rounding
    takes complex numbers.
    """
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return True
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    info = jnp.finfo(dtype)
    return float(info.max) <= (2 - 2.0**-info.nmant) * 2.0 ** (2 ** (info.nexp - 1) - 1)
