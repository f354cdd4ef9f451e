"""Multi-head latent attention of DeepSeek-V2 and V3: queries, keys and values come from narrow
products.

Suffixes: B sequences, T positions, D width, H heads.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.nn._low_rank import Weight
from shardopt.nn._norm import rms_norm
from shardopt.partition._plan import Shape

_product = functools.partial(nn.quantized_einsum, precision=None)
"""The product with a weight, which may have an adapter."""


class LatentConfig(NamedTuple):
    """Sizes of latent attention; DeepSeek-V3 has (1536, 512, 128, 64, 128).

    Attributes:
      query: width of the vectors from which queries are computed, `q_lora_rank` of its
        configuration.
      key: width of the vectors from which keys and values are computed, `kv_lora_rank`.
      nope: dims of a head that do not rotate, `qk_nope_head_dim`.
      rope: dims of a head that rotate, `qk_rope_head_dim`; even. All heads share the keys of these
        dims.
      value: dims of a head's values, `v_head_dim`; at most nope + rope.
    """

    query: int
    key: int
    nope: int
    rope: int
    value: int

    def shapes(self, dim: int, num_heads: int) -> dict[str, Shape]:
        """Return the shapes of the weights of a block of width `dim`.

        Weights with one dim are norms.
        """
        return {
            "q_down": (dim, self.query),
            "q_norm": (self.query,),
            "q": (self.query, num_heads, self.nope + self.rope),
            "kv_down": (dim, self.key + self.rope),
            "kv_norm": (self.key,),
            "kv": (self.key, num_heads, self.nope + self.value),
            "out": (num_heads, self.value, dim),
        }


def latent_qkv(
    weights: dict[str, Weight],
    x: Float[Array, "B T D"],
    latent: LatentConfig,
    rotate_dims: Callable[[Array], Array],
) -> tuple[Array, Array, Array]:
    """Return queries and keys [B, T, H, nope + rope] and values [B, T, H, value], computed from
    narrow, normed vectors.

        [query; rotated query] = norm(x q_down) q          [c; r] = x kv_down          [key; value] = norm(c) kv
        queries (query; rotate(rotated query)) and keys (key; rotate(r)), r the same for all heads

    "q", "kv" and "out" have a dim of heads, which is sharded over tensor. All devices of tensor
    compute the same narrow products.

    Args:
      weights: arrays of one block with the shapes of `LatentConfig.shapes`.
      x: T positions.
      latent: the sizes.
      rotate_dims: rotates [B, T, ?, rope].

    References:
      DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1, equations 9 to 19; "DeepSeek-V3", 2024, section
      2.1.1.
    """
    narrow = rms_norm(_product("btd,dq->btq", x, weights["q_down"]), weights["q_norm"])
    query, rotary_query = jnp.split(
        _product("btq,qhk->bthk", narrow, weights["q"]), [latent.nope], axis=-1
    )
    query = jnp.concatenate([query, rotate_dims(rotary_query)], axis=-1)
    narrow, rotary_key = jnp.split(
        _product("btd,dk->btk", x, weights["kv_down"]), [latent.key], axis=-1
    )
    narrow = rms_norm(narrow, weights["kv_norm"])
    key, value = jnp.split(_product("btr,rhk->bthk", narrow, weights["kv"]), [latent.nope], axis=-1)
    rotary_key = rotate_dims(rotary_key[:, :, None])
    return (
        query,
        jnp.concatenate(
            [key, jnp.broadcast_to(rotary_key, (*key.shape[:3], latent.rope))], axis=-1
        ),
        value,
    )
