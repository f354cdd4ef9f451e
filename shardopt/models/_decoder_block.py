"""One block of the decoder: the shapes of its weights, attention, and an mlp or a mixture of experts.

Suffixes: B sequences, T positions, D width, H heads, G heads of keys and values, K width of a head, F hidden units.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.core._types import PyTree
from shardopt.models import _layers as layers
from shardopt.models._decoder_config import ACTIVATIONS, DecoderConfig
from shardopt.models._latent_attention import latent_qkv
from shardopt.models.gpt import Params
from shardopt.nn._low_rank import Weight
from shardopt.nn._order import row_length

Shapes = dict[str, tuple[int, ...]]


class Stream(NamedTuple):
    """The values that go from block to block: activations, the number of the next block, and the marks of tokens.

    Attributes:
      x: [B, T, D].
      layer: int32, the number of the next block; None if all blocks are of one kind.
      segment_ids: [B, T] or None.
      positions: [B, T] or None.
      order: [B, T] or None.
    """

    x: Array
    layer: Array | None
    segment_ids: Array | None
    positions: Array | None
    order: Array | None


def block_shapes(config: DecoderConfig, *, dense: bool) -> dict[str, Shapes]:
    """Return part -> leaf -> shape of one block; `dense` is a block without experts."""
    D = config.dim
    shapes = {"attention": _attention_shapes(config)}
    if dense:
        shapes["mlp"] = _mlp_shapes(config, config.hidden, bias=config.mlp_bias)
    else:
        assert config.experts is not None
        E, experts = config.experts.number, config.experts
        shapes["mlp"] = {}
        shapes["router"] = {"kernel": (D, E)} | ({"choice_bias": (E,)} if experts.choice_bias else {})
        if experts.biases:
            shapes["router"]["bias"] = (E,)
        products = _mlp_shapes(config, experts.hidden, bias=experts.biases)
        shapes["experts"] = {name: (E, *shape) for name, shape in products.items()}
        if experts.shared_hidden:
            shapes["shared"] = _mlp_shapes(config, experts.shared_hidden, bias=False)
    for part in ("attention", "mlp"):
        names = ["norm"] * config.pre_norms + ["post_norm"] * config.post_norms
        names += [f"{name}_bias" for name in names if config.norm == "layer"]
        shapes[part] |= dict.fromkeys(names, (D,))
    return shapes


def _attention_shapes(config: DecoderConfig) -> Shapes:
    D, H, G, K = config.dim, config.num_heads, config.kv_heads, config.head_width
    if config.latent is not None:
        return config.latent.shapes(D, H)
    shapes: Shapes = {"q": (D, H, K), "k": (D, G, K), "v": (D, G, K), "out": (H, K, D)}
    if config.qkv_bias:
        shapes |= {"q_bias": (H, K), "k_bias": (G, K), "v_bias": (G, K)}
    if config.out_bias:
        shapes["out_bias"] = (D,)
    if config.qk_norm is not None:
        per_head = config.qk_norm == "head"
        shapes |= {"q_norm": (K,) if per_head else (H, K), "k_norm": (K,) if per_head else (G, K)}
    if config.sinks:
        shapes["sinks"] = (H,)
    return shapes


def _mlp_shapes(config: DecoderConfig, hidden: int, *, bias: bool) -> Shapes:
    D, width = config.dim, 2 * hidden if config.activation == "clamped_swiglu" else hidden
    shapes: Shapes = {"gate": (D, width)} if config.gated else {}
    shapes |= {"up": (D, width), "down": (hidden, D)}
    return shapes | ({f"{name}_bias": shape[1:] for name, shape in shapes.items()} if bias else {})


def apply_block(config: DecoderConfig, weights: Params, stream: Stream) -> Stream:
    """Add the attention branch, then the branch of the mlp or the experts."""
    router = weights.get("router")
    weights = layers.cast({part: leaves for part, leaves in weights.items() if part != "router"}, config.dtype)
    x = _add_branch(
        config, weights["attention"], stream.x, lambda normed: _attention(config, weights["attention"], normed, stream)
    )
    run_mlp = (
        functools.partial(_mlp, config, weights["mlp"])
        if router is None
        else functools.partial(_experts, config, weights, router)
    )
    x = _add_branch(config, weights["mlp"], x, run_mlp)
    return stream._replace(x=x, layer=None if stream.layer is None else stream.layer + 1)


def _add_branch(config: DecoderConfig, norms: Params, x: Array, branch) -> Array:
    out = branch(apply_norm(config, norms, "norm", x) if config.pre_norms else x)
    return x + (apply_norm(config, norms, "post_norm", out) if config.post_norms else out)


def apply_norm(
    config: DecoderConfig, weights: PyTree, name: str, x: Float[Array, "*batch D"]
) -> Float[Array, "*batch D"]:
    """Return x normed by the leaf `name`, in the norm of the config."""
    scale = weights[name]
    if config.norm == "rms":
        return layers.rms_norm(x, scale, config.norm_epsilon)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if config.norm == "rms_plus_one":
        return layers.rms_norm(x.astype(wide), 1 + scale.astype(wide), config.norm_epsilon).astype(x.dtype)
    return _layer_norm(x, scale, weights[f"{name}_bias"], config.norm_epsilon)


@functools.partial(jax.checkpoint, static_argnums=3)
def _layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    return normed.astype(x.dtype) * jnp.broadcast_to(scale, x.shape) + jnp.broadcast_to(bias, x.shape)


def _attention(
    config: DecoderConfig, weights: Params, x: Float[Array, "B T D"], stream: Stream
) -> Float[Array, "B T D"]:
    kind = None if stream.layer is None else jnp.asarray(_kind_numbers(config))[stream.layer]
    rotate = _rotation(config, kind, layers.places(x.shape[1], stream.positions, stream.order), row_length(x.shape[1]))
    if config.latent is None:
        query, key, value = _qkv(config, weights, x)
        query, key = rotate(query), rotate(key)
    else:
        query, key, value = latent_qkv(weights, x, config.latent, rotate)
    if config.attention_scale is not None:
        query = query * (config.attention_scale * math.sqrt(config.head_width))
    query, key, value = checkpoint_name((query, key, value), "qkv")
    mixed = _mix(config, kind, query, key, value, stream, weights.get("sinks"))
    out = nn.quantized_einsum("bthk,hkd->btd", mixed, weights["out"], precision=config.precision)
    return checkpoint_name(_add_bias(out, weights.get("out_bias")), "attention_out")


def _qkv(config: DecoderConfig, weights: Params, x: Array) -> tuple[Array, Array, Array]:
    def project(name: str) -> Array:
        heads = nn.quantized_einsum("btd,dhk->bthk", x, weights[name], precision=config.precision)
        return _add_bias(heads, weights.get(f"{name}_bias"))

    def norm(heads: Array, name: str) -> Array:
        if config.qk_norm == "head":
            return apply_norm(config, weights, name, heads)
        flat = heads.reshape(*heads.shape[:2], -1)
        return apply_norm(config, {name: weights[name].reshape(-1)}, name, flat).reshape(heads.shape)

    query, key, value = project("q"), project("k"), project("v")
    if config.qk_norm is None:
        return query, key, value
    return norm(query, "q_norm"), norm(key, "k_norm"), value


def _kind_numbers(config: DecoderConfig) -> np.ndarray:
    """Return the number of each block's kind among the used kinds."""
    used = sorted(set(config.pattern or (0,)))
    return np.asarray([used.index(kind) for kind in config.pattern or (0,) * config.num_layers], np.int32)


def _rotation(config: DecoderConfig, kind: Array | None, places: Array, length: int):
    """Return the function that rotates [B, T, H, K] by the positions; `kind` selects the row of a table of frequencies."""
    ropes = [used.rope for used in config.used_kinds]
    first = next((rope for rope in ropes if rope), None)
    if first is None:
        return lambda x: x
    dims = first.dims or config.rotary_dim
    table = np.stack([rope.frequencies(dims, length) if rope else np.zeros(dims // 2) for rope in ropes])
    factors = np.array([rope.attention_factor if rope else 1.0 for rope in ropes])

    def rotate(x: Array) -> Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        if kind is None or len(set(ropes)) == 1:
            frequencies, factor = jnp.asarray(table[0], wide), float(factors[0])
        else:
            frequencies, factor = jnp.asarray(table, wide)[kind], jnp.asarray(factors, wide)[kind]
        rotating, fixed = x[..., :dims], x[..., dims:]
        if first.interleaved:  # scores do not depend on the order of components, which is the same in keys
            rotating = jnp.swapaxes(rotating.reshape(*x.shape[:-1], dims // 2, 2), -1, -2).reshape(rotating.shape)
        rotated = layers.rotate_by(rotating, places, frequencies, factor)
        return rotated if fixed.shape[-1] == 0 else jnp.concatenate([rotated, fixed], axis=-1)

    return rotate


def _mix(
    config: DecoderConfig,
    kind: Array | None,
    query: Array,
    key: Array,
    value: Array,
    stream: Stream,
    sinks: Array | None,
) -> Array:
    """Return attention with the window of the block's kind; blocks of several windows choose among them as they run."""

    def attend(window: int | None, query: Array, key: Array, value: Array) -> Array:
        return nn.attention(
            query,
            key,
            value,
            segment_ids=stream.segment_ids,
            window=window,
            softcap=config.attention_softcap,
            sinks=sinks,
            positions=stream.order,
        )

    windows = list(dict.fromkeys(used.window for used in config.used_kinds))
    if kind is None or len(windows) == 1:
        return attend(windows[0], query, key, value)
    choice = jnp.asarray([windows.index(used.window) for used in config.used_kinds], jnp.int32)[kind]
    return jax.lax.switch(choice, [functools.partial(attend, window) for window in windows], query, key, value)


def _mlp(config: DecoderConfig, weights: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    product = lambda name: nn.quantized_einsum("btd,df->btf", x, weights[name], precision=config.precision)  # noqa: E731
    names = [name for name in ("gate", "up") if name in weights]
    hidden = checkpoint_name([_add_bias(product(name), weights.get(f"{name}_bias")) for name in names], "mlp_hidden")

    @jax.checkpoint
    def down(hidden: list[Array], weight: Weight) -> Array:
        activated = ACTIVATIONS[config.activation](hidden[0])
        activated = activated * hidden[1] if config.gated else activated
        return nn.quantized_einsum("btf,fd->btd", activated, weight, precision=config.precision)

    return _add_bias(down(hidden, weights["down"]), weights.get("down_bias"))


def _experts(config: DecoderConfig, weights: Params, router: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    experts = config.experts
    assert experts is not None
    mixed, _ = nn.mixture_of_experts(
        weights["experts"],
        x,
        router["kernel"],
        top_k=experts.top_k,
        score=experts.score,
        normalize=experts.normalize,
        bias=router.get("choice_bias"),
        router_bias=router.get("bias"),
        groups=experts.groups,
        scale=experts.scale,
        shared=weights.get("shared"),
        activation=ACTIVATIONS[config.activation],
    )
    return mixed


def _add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + jnp.broadcast_to(bias, x.shape)
