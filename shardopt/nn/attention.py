"""Attention by the kernel that the devices have: splash on TPU, cudnn on GPU, plain XLA elsewhere.

Suffixes: B sequences, T queries, S keys, H heads of queries, G heads of keys and values, K width of a head.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from shardopt.collectives.per_device import TENSOR
from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.mesh import axes_of_role, device_kind, is_analysed, mesh_under_trace

Implementation = Literal["splash", "cudnn", "xla"]
NAME = "attention"
"""The `checkpoint_name` of what is mixed."""
_LANES = 128
"""Splash works on tiles of so many positions and so many components of a head; both are padded up to it."""


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    *,
    causal: bool = True,
    segment_ids: Int[Array, "B T"] | None = None,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H K"]:
    """Mix the values that each query may see: softmax(query key^T / sqrt(K)) value, head by head.

    Query head h uses key and value head h // (H / G). Softmax and sums are taken in float32 at least.

    **Equivalence**: every implementation computes the same, up to summation order and, below float32, to the dtype in
    which products are rounded.

    **Placement**: inside a strategy heads may be sharded over tensor by rule, and rows over the axes that carry them; each
    device runs the kernel on its own rows and heads. **Communication**: none.

    **Memory**: "splash" and "cudnn" never hold the T x T scores; "xla" does. What is mixed has the `checkpoint_name`
    "attention"; where it is kept, splash is not run again in the backward pass, of "xla" the scores alone are computed again,
    and cudnn runs again for statistics that jax does not name.

    Args:
      query: [B, T, H, K].
      key: [B, T, G, K], with G a divisor of H: grouped-query attention; positions already applied.
      value: [B, T, G, K].
      causal: whether a query sees only keys at its own position and before.
      segment_ids: [B, T], integers; a query sees only keys of its own segment, such as a packed document. None: all.
      window: how many positions a query sees at most, its own and those before it; needs `causal`. None: all.
      implementation: "splash", jax's Pallas kernel for TPU (elsewhere it runs interpreted, which is for tests); "cudnn",
        flash attention of `jax.nn.dot_product_attention`, for half precision on GPU; "xla". None chooses by the
        devices of the mesh: splash on TPU from 128 positions on, cudnn on GPU in half precision, else xla.

    Returns:
      [B, T, H, K] in the dtype of value.

    Raises:
      ValueError: if H is not a multiple of G, a tensor axis does not divide G, `window` is given without `causal` or is
        below 1, or `implementation` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> attention(query, key[:, :, :2], value[:, :, :2], window=3).shape
      (2, 5, 4, 8)

    References:
      Vaswani et al., "Attention Is All You Need", 2017, equation 1; Ainslie et al., "GQA", 2023; Dao et al.,
      "FlashAttention", 2022; jax.experimental.pallas.ops.tpu.splash_attention.
    """
    _check(query, key, causal=causal, window=window, implementation=implementation)
    chosen = "xla" if is_analysed() else implementation or _default(query)
    run: Callable[..., Array]
    if chosen == "xla" and query.shape[2] != key.shape[2]:
        return _of_jax_nn(query, key, value, segment_ids, causal=causal, window=window, implementation="xla")
    if chosen == "xla":
        mask = visible(query.shape[1], causal=causal, window=window)[None]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
        return masked_attention(query, key, value, mask)
    if chosen == "splash":
        run = lambda q, k, v, s: _splash(q, k, v, s, causal=causal, window=window)  # noqa: E731
    else:
        run = lambda q, k, v, s: _of_jax_nn(q, k, v, s, causal=causal, window=window, implementation="cudnn")  # noqa: E731
    return _on_each_device(run, query, key, value, segment_ids)


def masked_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    mask: Bool[Array, "..."],
) -> Float[Array, "B T H K"]:
    """Return attention by plain XLA, where `mask` [1 or B, T, S] says which keys a query sees.

    The softmax is divided by its sum after the values are mixed: K numbers a query are divided then, not S, and nothing of
    size S but the exponentials is kept for the backward pass.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    hidden = jnp.where(mask, 0, -1e30).astype(wide)[:, None]
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=wide)
    scores = scores * query.shape[-1] ** -0.5 + hidden
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = jnp.einsum("bhts,bshk->bthk", weights.astype(value.dtype), value, preferred_element_type=wide)
    mixed = checkpoint_name(mixed, NAME)  # before the division, whose gradient reads it
    return (mixed / jnp.einsum("bhts->bth", weights)[..., None]).astype(value.dtype)


def visible(length: int, *, causal: bool, window: int | None) -> Bool[Array, "T T"]:
    """Return which key position (second dim) each query position (first dim) sees."""
    at = jnp.arange(length)
    ahead = at[:, None] - at[None, :]
    seen = ahead >= 0 if causal else jnp.ones((length, length), bool)
    return seen if window is None else seen & (ahead < window)


def _check(query: Array, key: Array, *, causal: bool, window: int | None, implementation: str | None) -> None:
    H, G = query.shape[2], key.shape[2]
    if H % G:
        what = f"{H} heads of queries are not a multiple of {G} heads of keys and values."
        raise ValueError(format_error("attention", what, fix="give keys and values a number of heads that divides it."))
    if window is not None:
        check_count("attention", "window", window, least=1)
        if not causal:
            what = "a window looks back from each position, so it needs causal=True."
            raise ValueError(format_error("attention", what, fix="pass causal=True, or leave window out."))
    if implementation is not None and implementation not in get_args(Implementation):
        what = f"unknown implementation {implementation!r}."
        raise ValueError(
            format_error("attention", what, fix="use 'splash', 'cudnn', 'xla', or None to choose by device.")
        )


def _default(query: Array) -> Implementation:
    kind = device_kind() or jax.devices()[0].device_kind
    if kind.startswith("TPU"):
        return "splash" if query.shape[1] >= _LANES else "xla"
    if kind == "cpu" or query.dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    return "cudnn"


def _on_each_device(run: Callable[..., Array], query: Array, key: Array, value: Array, segments: Array | None) -> Array:
    """Call a kernel on local rows and heads: a region that is manual over every axis that is left to the partitioner."""
    mesh = mesh_under_trace()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    left = {axis for axis, kind in types.items() if kind != AxisType.Manual and mesh.shape[axis] > 1}
    if not left:
        return run(query, key, value, segments)
    rows = tuple(axis for role in ("replica", "data") for axis in axes_of_role(role) if axis in left)
    heads = tuple(axis for axis in axes_of_role(TENSOR) if axis in left)
    size = math.prod(mesh.shape[axis] for axis in heads)
    if key.shape[2] % size:
        named = " x ".join(map(repr, heads))
        what = f"{key.shape[2]} heads of keys and values cannot be sharded over mesh axis {named} (size {size})."
        raise ValueError(
            format_error("attention", what, fix="repeat the heads of keys and values, or take a smaller axis.")
        )
    spec, segment_spec = PartitionSpec(rows or None, None, heads or None, None), PartitionSpec(rows or None, None)
    if segments is None:
        inner = lambda q, k, v: run(q, k, v, None)  # noqa: E731
        args, specs = (query, key, value), (spec, spec, spec)
    else:
        inner, args, specs = run, (query, key, value, segments), (spec, spec, spec, segment_spec)
    return jax.shard_map(inner, in_specs=specs, out_specs=spec, axis_names=left, check_vma=False)(*args)


def _splash(
    query: Array, key: Array, value: Array, segments: Array | None, *, causal: bool, window: int | None
) -> Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, H, K = query.shape[1:]
    length, width = _round_up(T), _round_up(K)
    if length != T and not causal and segments is None:
        segments = jnp.zeros(query.shape[:2], jnp.int32)
    heads_first = lambda x: jnp.swapaxes(_padded(x, length, width), 1, 2)  # noqa: E731
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
    one: Any = splash.CausalMask(shape) if causal else splash.FullMask(shape)
    if window is not None:
        one = splash.LocalMask(shape, (window - 1, 0), 0)
    kernel: Any = splash.make_splash_mha(
        splash.MultiHeadMask([one] * H),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=NAME,
        interpret=not (device_kind() or jax.devices()[0].device_kind).startswith("TPU"),
    )
    scaled = (query * K**-0.5).astype(query.dtype)
    args = heads_first(scaled), heads_first(key), heads_first(value)
    if segments is None:
        mixed = jax.vmap(kernel)(*args)
    else:  # what is padded is of no segment
        ids = jnp.pad(segments, ((0, 0), (0, length - T)), constant_values=-1)
        mixed = jax.vmap(lambda q, k, v, s: kernel(q, k, v, splash.SegmentIds(s, s)))(*args, ids)
    return jnp.swapaxes(mixed, 1, 2)[:, :T, :, :K].astype(value.dtype)


def _of_jax_nn(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    *,
    causal: bool,
    window: int | None,
    implementation: Literal["cudnn", "xla"],
) -> Array:
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None],
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return checkpoint_name(mixed, NAME)


def _round_up(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _padded(x: Array, length: int, width: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, width - x.shape[3])))
