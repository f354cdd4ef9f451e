"""Splash attention, jax's Pallas kernel for TPU, with a backward pass of shardopt: for whole rows,
and for a block of a ring.

On other devices it runs interpreted, for tests.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shardopt.kernels._devices import vmem
from shardopt.kernels._flash import (
    NAME,
    TILE,
    Keys,
    Marks,
    MaskRule,
    Queries,
    State,
    delta_of,
    finish,
    sink_gradient,
)
from shardopt.kernels._pallas import LANES
from shardopt.kernels._splash_backward import gradients as backward
from shardopt.kernels._splash_forward import attend, heads_of_step
from shardopt.mesh import device_kind_or_default


def splash_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G V"],
    segments: Array | None,
    sinks: Float[Array, " H"] | None,
    rule: MaskRule,
) -> Float[Array, "B T H V"]:
    """Return attention of whole rows in natural order."""
    T = query.shape[1]
    # Padded keys are behind all queries, so `causal` hides them. Without it, segments have to.
    length = -(-T // LANES) * LANES
    if length != T and not rule.causal and segments is None:
        segments = jnp.zeros(query.shape[:2], jnp.int32)
    if segments is not None:  # padding is of no segment
        segments = jnp.pad(segments, ((0, 0), (0, length - T)), constant_values=-1)

    def heads_first(x):
        return jnp.swapaxes(jnp.pad(x, ((0, 0), (0, length - T), (0, 0), (0, 0))), 1, 2)

    # The scale goes into the queries once, not into each tile of scores.
    qkv = heads_first(rule.scaled(query, query.shape[-1])), heads_first(key), heads_first(value)
    mixed: Any = _whole_rows(*qkv, segments, sinks, rule)
    return jnp.swapaxes(mixed, 1, 2)[:, :T].astype(value.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _whole_rows(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    sinks: Array | None,
    rule: MaskRule,
) -> Array:
    return _whole_rows_forward(query, key, value, segments, sinks, rule)[0]


def _whole_rows_forward(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    sinks: Array | None,
    rule: MaskRule,
) -> tuple[Array, tuple]:
    mixed, logsumexp = _run_kernel(query, key, value, segments, segments, rule)
    if sinks is None:
        mixed = checkpoint_name(mixed, NAME)
        logsumexp = checkpoint_name(logsumexp, NAME)
    else:  # the kernel's result counts as one key with this score
        mixed, logsumexp = finish(
            State(logsumexp, jnp.ones_like(logsumexp), mixed), mixed.dtype, sinks
        )
    return mixed, (query, key, value, segments, sinks, mixed, logsumexp)


def _whole_rows_backward(
    rule: MaskRule, residuals: tuple, d_mixed: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    query, key, value, segments, sinks, mixed, logsumexp = residuals
    marks = Marks(None, segments)
    queries = Queries(query, d_mixed, logsumexp, delta_of(mixed, d_mixed, logsumexp), marks)
    dq, dk, dv = backward(queries, Keys(key, value, marks), rule, dtype=query.dtype)
    return dq, dk, dv, None, sink_gradient(sinks, logsumexp, queries.delta)


_whole_rows.defvjp(_whole_rows_forward, _whole_rows_backward)


def absorb(
    state: State, query: Float[Array, "B G R T K"], query_marks: Marks, keys: Keys, rule: MaskRule
) -> State:
    """Absorb a block of keys as `flash.absorb` does, for a block with as many keys as queries.

    If the rule is causal, each query sees the keys up to its own index. T is a multiple of 128. The
    kernel's output is rounded to the dtype of query before blocks are summed.
    """
    B, G, R, T, K = query.shape
    scaled_query = rule.scaled(query, K).reshape(B, G * R, T, K)
    mixed, logsumexp = _run_kernel(
        scaled_query, keys.key, keys.value, query_marks.segments, keys.marks.segments, rule
    )
    mixed = mixed.reshape(query.shape)
    logsumexp = logsumexp.reshape(query.shape[:-1])
    # The kernel's softmax over this block is one number per query: its log-sum-exp is a score whose
    # value is `mixed`.
    top = jnp.maximum(state.top, logsumexp)
    state_weight = jnp.exp(state.top - top)
    block_weight = jnp.exp(logsumexp - top)
    return State(
        top,
        state.total * state_weight + block_weight,
        state.mixed * state_weight[..., None] + mixed * block_weight[..., None],
    )


def gradients(queries: Queries, keys: Keys, rule: MaskRule) -> list[Array]:
    """Return the gradients of `flash.gradients`, for a block as in `absorb`."""
    query, d_out, logsumexp, delta, marks = queries
    B, G, R, _, K = query.shape

    def merge_heads(x):
        return x.reshape(B, G * R, *x.shape[3:])

    rows = merge_heads(logsumexp), merge_heads(delta), marks
    queries = Queries(merge_heads(rule.scaled(query, K)), merge_heads(d_out), *rows)
    dq, dk, dv = backward(queries, keys, rule, dtype=logsumexp.dtype)
    # dQ is of the scaled queries. dK needs no scale: it is a product with them.
    return [rule.scaled(dq.reshape(query.shape), K), dk, dv]


def _run_kernel(
    query: Array,
    key: Array,
    value: Array,
    query_segments: Array | None,
    key_segments: Array | None,
    rule: MaskRule,
) -> tuple[Array, Array]:
    """Return the result of `attend`, by jax's kernel where a step of ours has no memory."""
    H, T = query.shape[1:3]
    if heads_of_step(query.shape, key.shape, value.shape[3], value.dtype, vmem()):
        return attend(query, key, value, query_segments, key_segments, rule)
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = math.gcd(T, TILE)
    mask: Any = splash.CausalMask((T, T)) if rule.causal else splash.FullMask((T, T))
    if rule.window is not None:
        mask = splash.LocalMask((T, T), (rule.window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * H),
        block_sizes=splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        attn_logits_soft_cap=rule.softcap,
        interpret=not device_kind_or_default().startswith("TPU"),
    )
    ids = (
        None
        if query_segments is None or key_segments is None
        else splash.SegmentIds(query_segments, key_segments)
    )
    mixed, (logsumexp,) = jax.vmap(kernel)(query, key, value, ids)
    return mixed, logsumexp
