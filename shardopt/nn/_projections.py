"""Queries, keys and values from one, two or three products."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt.core._rounding import Precision
from shardopt.mesh import device_kind_or_default
from shardopt.nn._low_rank import Weights
from shardopt.nn._memory_layout import split_parts
from shardopt.nn._parted_products import Parts, products_with_parts
from shardopt.nn._quantized_einsum import linear


def query_key_value(
    x: Float[Array, "B T D"], weights: Weights, precision: Precision | None
) -> tuple[Array, Array, Array]:
    """Return queries [B, T, H, K], and keys and values [B, T, G, K].

    Args:
      x: the input of attention.
      weights: "qkv" [D, 3, H, K]; "q" [D, H, K] and "kv" [D, G, 2 K]; or "q", "k" and "v". Biases
        such as "q_bias" are optional.
      precision: as in `so.nn.quantized_einsum`.
    """

    def project(name: str, dims: str = "hk") -> Array:
        return linear(f"btd,d{dims}->bt{dims}", x, weights, name, precision=precision)

    if "qkv" in weights:
        # The dim of parts stays where the product puts it: moving it to the front would cost a
        # transposition each way.
        query, key, value = split_parts(project("qkv", "chk"))
        return query, key, value
    query = project("q")
    if "kv" not in weights:
        return query, project("k"), project("v")
    is_plain = precision is None and "kv_bias" not in weights and isinstance(weights["kv"], Array)
    # XLA would copy keys and values to part them
    if is_plain and device_kind_or_default().startswith("TPU"):
        parts = Parts("btd,dgk->btgk", "btd,dgk->btgk", "k", 2)
        key, value = products_with_parts(parts, x, weights["kv"])
    else:
        key, value = jnp.split(project("kv"), 2, axis=-1)
    return query, key, value
