"""One block of the decoder: the shapes of its weights, attention, and an mlp or a mixture of
experts.

Suffixes: B sequences, T positions, D width, H heads, G heads of keys and values, K width of a head,
F hidden units.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.core import wide_dtype
from shardopt.core._rounding import Precision, Rounding
from shardopt.mesh import is_analysed
from shardopt.models import _layers as layers
from shardopt.models._decoder_config import ACTIVATIONS, DecoderConfig
from shardopt.models._inputs import Params
from shardopt.models._latent_attention import latent_qkv
from shardopt.models._routers import Routers
from shardopt.nn._attention import masked_attention
from shardopt.nn._memory_layout import components_last
from shardopt.nn._mlp import mlp
from shardopt.nn._norm import apply_norm
from shardopt.nn._order import row_length
from shardopt.nn._projections import query_key_value
from shardopt.nn._quantized_einsum import linear
from shardopt.nn._rotary import rotate_by, rotated_heads
from shardopt.nn._sequence_parallel import computes_by_halves, halves_of
from shardopt.partition._plan import Shape

Shapes = dict[str, Shape]
_ATTENTION_OUT = "attention_out"
"""The name of the stream after attention; with post norms, of the last product of attention, which
its norm needs.
"""


class BlockStream(NamedTuple):
    """The values that go from block to block: activations, the number of the next block, and the
    marks of tokens.

    Attributes:
      x: [B, T, D].
      layer: int32, the number of the next block; None if all blocks are of one kind.
      segment_ids: [B, T] or None.
      positions: [B, T] or None.
      order: [B, T] or None.
      routers: the statistics of routers; None if the loss reads none.
    """

    x: Array
    layer: Array | None
    segment_ids: Array | None
    positions: Array | None
    order: Array | None
    routers: Routers | None = None


class KVCache(NamedTuple):
    """Keys and values of the positions so far, of one block (or stacked, with one more dim in
    front).

    Attributes:
      key: [B, S, G, K], already rotated.
      value: [B, S, G, V].
    """

    key: Array
    value: Array


def block_shapes(config: DecoderConfig, *, dense: bool) -> dict[str, Shapes]:
    """Return part -> leaf -> shape of one block; `dense` is a block without experts."""
    D = config.dim
    parts: dict[str, Shapes] = {"attention": _attention_shapes(config), "mlp": {}}
    if dense:
        parts["mlp"] = _mlp_shapes(
            config, config.hidden, bias=config.mlp_bias, fused=bool(config.fused)
        )
    else:
        assert config.experts is not None
        experts = config.experts
        E = experts.number
        parts["router"] = {"kernel": (D, E)}
        if experts.choice_bias:
            parts["router"]["choice_bias"] = (E,)
        if experts.shared_gate:
            parts["router"]["shared_gate"] = (D, 1)
        if experts.biases:
            parts["router"]["bias"] = (E,)
        products = _mlp_shapes(config, experts.hidden, bias=experts.biases)
        parts["experts"] = {name: (E, *shape) for name, shape in products.items()}
        if experts.shared_hidden:
            parts["shared"] = _mlp_shapes(config, experts.shared_hidden, bias=False)
    for part in ("attention", "mlp"):
        names = ["norm"] if config.pre_norms else []
        names += ["post_norm"] if config.post_norms else []
        parts[part] |= {leaf: (D,) for name in names for leaf in norm_leaves(config, name)}
    return parts


def norm_leaves(config: DecoderConfig, name: str) -> list[str]:
    """Return the leaves of a norm."""
    return [name, f"{name}_bias"] if config.norm == "layer" else [name]


def _attention_shapes(config: DecoderConfig) -> Shapes:
    D = config.dim
    H = config.num_heads
    G = config.kv_heads
    K = config.head_width
    if config.latent is not None:
        return config.latent.shapes(D, H)
    if config.fused == "qkv":
        shapes: Shapes = {"qkv": (D, 3, H, K)}
    elif config.fused == "kv":
        shapes = {"q": (D, H, K), "kv": (D, G, 2 * K)}
    else:
        shapes = {"q": (D, H, K), "k": (D, G, K), "v": (D, G, K)}
    if config.qkv_bias:
        shapes |= {f"{name}_bias": shape[1:] for name, shape in shapes.items()}
    shapes["out"] = (H, K, D)
    if config.out_bias:
        shapes["out_bias"] = (D,)
    if config.qk_norm is not None:
        of_all = config.qk_norm == "all"
        shapes |= {"q_norm": (H, K) if of_all else (K,), "k_norm": (G, K) if of_all else (K,)}
    if config.sinks:
        shapes["sinks"] = (H,)
    return shapes


def _mlp_shapes(config: DecoderConfig, hidden: int, *, bias: bool, fused: bool = False) -> Shapes:
    D = config.dim
    width = 2 * hidden if config.activation == "clamped_swiglu" else hidden
    if fused:
        shapes: Shapes = {"up": (D, 1 + config.gated, width)}
    else:
        shapes = dict.fromkeys(("gate", "up")[not config.gated :], (D, width))
    shapes["down"] = (hidden, D)
    if bias:
        shapes |= {f"{name}_bias": shape[1:] for name, shape in shapes.items()}
    return shapes


def roundings(config: DecoderConfig) -> dict[str, Rounding]:
    """Return the weights of blocks that are multiplied in 8 bits, for `BlockModel.rounded`.

    None without a precision.
    """
    if config.precision is None:
        return {}
    rounding = Rounding(config.precision, dtype=config.dtype)
    parts = block_shapes(config, dense=config.experts is None)
    latent = config.latent is not None  # its products of queries, keys and values are not in 8 bits
    names = {
        "attention": () if latent else ("q", "k", "v", "kv", "qkv"),
        "mlp": ("gate", "up", "down"),
    }
    rounded = {
        f"{part}/{name}": rounding for part in names for name in names[part] if name in parts[part]
    }
    return rounded | {"attention/out": rounding._replace(summed=2)}


def apply_block(config: DecoderConfig, weights: Params, stream: BlockStream) -> BlockStream:
    """Add the attention branch, then the branch of the mlp or the experts.

    Experts see all rows of a device. Other blocks may compute halves of the rows in turns.
    """
    is_dense = "router" not in weights
    if not (config.sequence_parallel and is_dense and computes_by_halves(stream.x)):
        return apply_cached_block(config, weights, stream, None, 0)[0]
    rows = {name: getattr(stream, name) for name in ("x", "segment_ids", "positions", "order")}
    halves = [
        apply_cached_block(config, weights, stream._replace(**half), None, 0)[0]
        for half in halves_of(rows)
    ]
    return stream._replace(x=jnp.concatenate([half.x for half in halves]), layer=halves[0].layer)


def apply_cached_block(
    config: DecoderConfig,
    weights: Params,
    stream: BlockStream,
    cache: KVCache | None,
    start: Array | int,
) -> tuple[BlockStream, KVCache | None]:
    """Return the stream after the block, and the cache with the T positions of the stream, the
    first one at `start`.

    Without a cache, positions see each other alone.
    """
    router = weights.get("router")
    routers = stream.routers
    x = components_last(stream.x)
    weights = layers.cast(
        {part: leaves for part, leaves in weights.items() if part != "router"}, config.dtype
    )
    attention = weights["attention"]
    mlp_weights = weights["mlp"]
    residual = config.residual
    first_product = "mlp_hidden" if router is None else "router"
    x, attention_input = residual.input(attention, x, "qkv")
    mixed, cache = _attention(config, attention, attention_input, stream, cache, start)
    x = residual.add(attention, x, mixed)
    x = x if config.post_norms else checkpoint_name(x, _ATTENTION_OUT)
    x, mlp_input = residual.input(mlp_weights, x, first_product)
    if router is None:
        out = _mlp(config, mlp_weights, mlp_input, config.precision)
        out = checkpoint_name(out, "mlp_out") if config.post_norms else out
    else:
        out, routers = _experts(config, weights, router, mlp_input, routers)
    x = residual.add(mlp_weights, x, out)
    layer = None if stream.layer is None else stream.layer + 1
    return stream._replace(x=x, layer=layer, routers=routers), cache


def _attention(
    config: DecoderConfig,
    weights: Params,
    x: Float[Array, "B T D"],
    stream: BlockStream,
    cache: KVCache | None,
    start: Array | int,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Return the last product of attention, and the cache."""
    kind = None
    if stream.layer is not None:
        # the number of the block's kind among the used kinds
        _, numbers = np.unique(config.pattern, return_inverse=True)
        kind = jnp.asarray(numbers, jnp.int32)[stream.layer]
    length = x.shape[1]
    places = layers.places(length, stream.positions, stream.order)
    rotate = _rotation(config, kind, places, row_length(length))
    scale = config.attention_scale
    if config.latent is not None:
        heads = latent_qkv(weights, x, config.latent, rotate)
        query, key, value = checkpoint_name(heads, "qkv")
    else:
        query, key, value = query_key_value(x, weights, config.precision)
        query, key, value, scale = rotated_heads(
            query,
            key,
            value,
            rotate,
            norm=functools.partial(_norm_heads, config, weights) if config.qk_norm else None,
            whole=cache is None and _rotates_whole_heads(config),
            scale=scale,
        )
    if cache is None:
        mixed = _mix(config, kind, query, key, value, stream, scale, weights.get("sinks"))
    else:

        def write(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)

        cache = KVCache(write(cache.key, key), write(cache.value, value))
        mixed = _mix_cached(config, kind, query, cache, places, weights.get("sinks"))
    out = linear("bthk,hkd->btd", mixed, weights, "out", precision=config.precision)
    return checkpoint_name(out, _ATTENTION_OUT) if config.post_norms else out, cache


def _norm_heads(
    config: DecoderConfig, weights: Params, query: Array, key: Array
) -> tuple[Array, Array]:
    """Return the heads of queries and keys normed, each or all of a token together."""

    def norm(heads: Array, name: str) -> Array:
        if config.qk_norm != "all":
            return apply_norm(config.norm, weights, name, heads, config.norm_epsilon)
        flat = heads.reshape(*heads.shape[:2], -1)
        scale = {name: weights[name].reshape(-1)}
        return apply_norm(config.norm, scale, name, flat, config.norm_epsilon).reshape(heads.shape)

    return norm(query, "q_norm"), norm(key, "k_norm")


def _rotation(
    config: DecoderConfig, kind: Array | None, places: Array, length: int
) -> Callable[..., Array]:
    """Return the function that rotates [B, T, H, K] by the positions, and may scale it.

    `kind` selects the row of a table of frequencies.
    """
    ropes = [used.rope for used in config.used_kinds]
    first = next((rope for rope in ropes if rope), None)
    if first is None:
        return lambda x: x
    dims = first.dims or config.rotary_dim
    table = np.stack(
        [rope.frequencies(dims, length) if rope else np.zeros(dims // 2) for rope in ropes]
    )
    factors = np.array([rope.attention_factor if rope else 1.0 for rope in ropes])

    def rotate(x: Array, scale: float = 1.0) -> Array:
        wide = wide_dtype(x.dtype)
        if kind is None or len(set(ropes)) == 1:
            frequencies = jnp.asarray(table[0], wide)
            factor = float(factors[0])
        else:
            frequencies = jnp.asarray(table, wide)[kind]
            factor = jnp.asarray(factors, wide)[kind]
        rotating = x[..., :dims]
        fixed = x[..., dims:]
        # scores do not depend on the order of components, which is the same in keys
        if first.interleaved:
            rotating = jnp.swapaxes(rotating.reshape(*x.shape[:-1], dims // 2, 2), -1, -2).reshape(
                rotating.shape
            )
        rotated = rotate_by(rotating, places, frequencies, factor * scale)
        return rotated if fixed.shape[-1] == 0 else jnp.concatenate([rotated, fixed], axis=-1)

    return rotate


def _rotates_whole_heads(config: DecoderConfig) -> bool:
    """Return whether pairs are halves of whole heads."""
    ropes = [used.rope for used in config.used_kinds if used.rope]
    if not ropes or ropes[0].interleaved:
        return False
    return (ropes[0].dims or config.rotary_dim) == config.head_width


def _mix(
    config: DecoderConfig,
    kind: Array | None,
    query: Array,
    key: Array,
    value: Array,
    stream: BlockStream,
    scale: float | None,
    sinks: Array | None,
) -> Array:
    """Return attention with the window of the block's kind.

    Blocks of several windows choose among them as they run.
    """

    def attend(window: int | None, query: Array, key: Array, value: Array) -> Array:
        return nn.attention(
            query,
            key,
            value,
            segment_ids=stream.segment_ids,
            window=window,
            softcap=config.attention_softcap,
            scale=scale,
            sinks=sinks,
            positions=stream.order,
        )

    window_of_kind = [used.window for used in config.used_kinds]
    if not is_analysed():  # the analysis compares rows of several lengths
        length = row_length(query.shape[1])
        # a window as long as the row hides nothing
        window_of_kind = [
            None if window is None or window >= length else window for window in window_of_kind
        ]
    windows = list(dict.fromkeys(window_of_kind))
    if kind is None or len(windows) == 1:
        return attend(windows[0], query, key, value)
    choice = jnp.asarray([windows.index(window) for window in window_of_kind], jnp.int32)[kind]
    return jax.lax.switch(
        choice, [functools.partial(attend, window) for window in windows], query, key, value
    )


def _mix_cached(
    config: DecoderConfig,
    kind: Array | None,
    query: Array,
    cache: KVCache,
    places: Array,
    sinks: Array | None,
) -> Array:
    """Return attention to the cached keys, by plain XLA; a window is data here."""
    length = cache.key.shape[1]
    windows = [length if used.window is None else used.window for used in config.used_kinds]
    window = windows[0] if kind is None else jnp.asarray(windows, jnp.int32)[kind]
    mask = layers.visible(jnp.atleast_2d(places), length, window)
    softcap = config.attention_softcap
    scale = config.attention_scale
    return masked_attention(query, *cache, mask, softcap=softcap, scale=scale, sinks=sinks)


def _mlp(
    config: DecoderConfig, weights: Params, x: Float[Array, "B T D"], precision: Precision | None
) -> Float[Array, "B T D"]:
    return mlp(
        x,
        weights,
        ACTIVATIONS[config.activation],
        precision=precision,
        sharded=config.sequence_parallel,
        recompute=config.recompute_activation,
    )


def _experts(
    config: DecoderConfig,
    weights: Params,
    router: Params,
    x: Float[Array, "B T D"],
    routers: Routers | None,
) -> tuple[Float[Array, "B T D"], Routers | None]:
    experts = config.experts
    assert experts is not None
    mixed, statistics = nn.mixture_of_experts(
        weights["experts"],
        x,
        router["kernel"],
        top_k=experts.top_k,
        score=experts.score,
        normalize=experts.normalize,
        bias=(
            router.get("choice_bias")
            if routers is None or routers.bias is None
            else routers.bias[0]
        ),
        router_bias=router.get("bias"),
        groups=experts.groups,
        scale=experts.scale,
        shared=None if experts.shared_gate else weights.get("shared"),
        chunk=experts.chunk,
        activation=ACTIVATIONS[config.activation],
    )
    if experts.shared_gate:
        gate = jax.nn.sigmoid(x @ router["shared_gate"].astype(x.dtype))
        mixed = mixed + gate * _mlp(config, weights["shared"], x, None)
    return mixed, None if routers is None else routers.after_block(statistics)
