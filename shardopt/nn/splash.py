"""Splash attention, jax's Pallas kernel for TPU: of whole rows, and of one block of keys of a ring.

Elsewhere than on TPU it runs interpreted, which is for tests.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt.mesh import device_kind_or_default
from shardopt.nn.flash import NAME, Marks, Rule, State

LANES = 128
"""It works on tiles of so many positions and so many components of a head; whole rows are padded up to it."""


def splash_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G V"],
    segments: Array | None,
    rule: Rule,
) -> Float[Array, "B T H V"]:
    """Return attention of whole rows in natural order."""
    T, H = query.shape[1:3]
    length = -(-T // LANES) * LANES
    if length != T and not rule.causal and segments is None:
        segments = jnp.zeros(query.shape[:2], jnp.int32)
    heads_first = lambda x: jnp.swapaxes(_padded(x, length, dim=1), 1, 2)  # noqa: E731
    kernel = _kernel(length, H, rule)
    args = heads_first(_scaled(query)), heads_first(key), heads_first(value)
    if segments is not None:  # what is padded is of no segment
        segments = jnp.pad(segments, ((0, 0), (0, length - T)), constant_values=-1)
    mixed = _mapped(kernel, segments, segments)(*args)
    return jnp.swapaxes(mixed, 1, 2)[:, :T, :, : value.shape[3]].astype(value.dtype)


def absorb(
    state: State,
    query: Float[Array, "B G R T K"],
    key: Float[Array, "B G T K"],
    value: Float[Array, "B G T K"],
    seeing: Marks,
    seen: Marks,
    *,
    causal: bool,
) -> State:
    """As `flash.absorb`, of a block of as many keys, of which `causal` hides those after each query. T is a multiple of 128.

    What the kernel mixes is rounded to the dtype of query before blocks are summed.
    """
    B, G, R, T, K = query.shape
    kernel = _kernel(T, G * R, Rule(causal, None), save_residuals=True)
    args = _padded(_scaled(query).reshape(B, G * R, T, K), T), _padded(key, T), _padded(value, T)
    mixed, (logsumexp,) = _mapped(kernel, seeing.segments, seen.segments)(*args)
    mixed, logsumexp = mixed[..., :K].reshape(query.shape), logsumexp.reshape(query.shape[:-1])
    top = jnp.maximum(state.top, logsumexp)
    before, now = jnp.exp(state.top - top), jnp.exp(logsumexp - top)
    return State(top, state.total * before + now, state.mixed * before[..., None] + mixed * now[..., None])


def gradients(
    query: Float[Array, "B G R T K"],
    key: Float[Array, "B G T K"],
    value: Float[Array, "B G T K"],
    out: Float[Array, "B G R T K"],
    logsumexp: Float[Array, "B G R T"],
    d_out: Float[Array, "B G R T K"],
    seeing: Marks,
    seen: Marks,
    *,
    causal: bool,
) -> list[Array]:
    """As `flash.gradients`, of such a block; out and logsumexp are over all blocks.

    The kernel's own backward pass takes both as they come, so those of all blocks may be given it; jax has no public name
    for it.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as private

    B, G, R, T, K = query.shape
    kernel = _kernel(T, G * R, Rule(causal, None))
    names = "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name"
    static = [kernel.kwargs[name] for name in (*names, "mask_function", "attn_logits_soft_cap", "interpret")]
    backward_of: Any = private._splash_attention_bwd

    def backward(q: Array, k: Array, v: Array, *rest: Any) -> tuple[Array, ...]:
        o, lse, do, segments = rest
        kept = q, k, v, segments, None, o, lse, kernel.dq_mask_info, kernel.dkv_mask_info
        return backward_of(*static, kept, do)[3:6]

    heads = lambda x: _padded(x.reshape(B, G * R, T, K), T)  # noqa: E731
    args = heads(_scaled(query)), _padded(key, T), _padded(value, T), heads(out)
    args = *args, logsumexp.reshape(B, G * R, T), heads(d_out), _segment_ids(seeing.segments, seen.segments)
    dq, dk, dv = jax.vmap(backward)(*args)
    wide = logsumexp.dtype
    dq = dq[..., :K].reshape(query.shape).astype(wide) * K**-0.5
    return [dq, dk[..., :K].astype(wide), dv[..., :K].astype(wide)]


def _kernel(length: int, heads: int, rule: Rule, *, save_residuals: bool = False) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = math.gcd(length, 512)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    shape: tuple[int, int] = (length, length)
    one: Any = splash.CausalMask(shape) if rule.causal else splash.FullMask(shape)
    if rule.window is not None:
        one = splash.LocalMask(shape, (rule.window - 1, 0), 0)
    return splash.make_splash_mha(
        splash.MultiHeadMask([one] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=save_residuals,
        residual_checkpoint_name=NAME,
        interpret=not device_kind_or_default().startswith("TPU"),
    )


def _mapped(kernel: Any, seeing: Array | None, seen: Array | None) -> Any:
    """Return the kernel of several rows."""
    ids = _segment_ids(seeing, seen)
    return lambda q, k, v: jax.vmap(kernel)(q, k, v, ids)


def _segment_ids(seeing: Array | None, seen: Array | None) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return None if seeing is None or seen is None else splash.SegmentIds(seeing, seen)


def _scaled(query: Array) -> Array:
    return (query * query.shape[-1] ** -0.5).astype(query.dtype)


def _padded(x: Array, length: int, dim: int = 2) -> Array:
    widths = [(0, 0)] * 4
    widths[dim], widths[3] = (0, length - x.shape[dim]), (0, -x.shape[3] % LANES)
    return jnp.pad(x, widths)
