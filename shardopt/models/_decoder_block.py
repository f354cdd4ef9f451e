"""One block of the decoder: the shapes of its weights, attention, and an mlp or a mixture of
experts.

Suffixes: B sequences, T positions, D width, H heads, G heads of keys and values, K width of a head,
F hidden units.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.collectives._per_device import TENSOR
from shardopt.core._rounding import Rounding
from shardopt.core._types import PyTree
from shardopt.kernels._devices import num_shards
from shardopt.kernels._flash import factor_of_scores
from shardopt.kernels._norm import rsqrt_of_mean_square
from shardopt.kernels._rotary import takes_rotation
from shardopt.low_precision._einsum import Normed, gated_mlp, plain
from shardopt.mesh import device_kind_or_default, is_analysed, mesh_under_trace
from shardopt.models import _layers as layers
from shardopt.models._decoder_config import ACTIVATIONS, DecoderConfig
from shardopt.models._inputs import Params
from shardopt.models._latent_attention import latent_qkv
from shardopt.models._parted_products import Parts, products_with_parts
from shardopt.models._routers import Routers
from shardopt.nn._attention import masked_attention
from shardopt.nn._low_rank import LowRank, Weight
from shardopt.nn._norm import norm_of_stream, rms_norm, rms_norm_plus_one
from shardopt.nn._order import row_length
from shardopt.partition import shard_axes
from shardopt.partition._plan import largest_divisible_dim

Shapes = dict[str, tuple[int, ...]]
_ATTENTION_OUT = "attention_out"
"""The name of the stream after attention; with post norms, of the last product of attention, which
its norm needs.
"""
_TOKENS_OF_HALF = 2048
"""The fewest tokens that are computed by themselves. Fewer do not fill products; 8192 were
compiled.
"""


class Stream(NamedTuple):
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
        E, experts = config.experts.number, config.experts
        parts["router"] = {"kernel": (D, E)} | (
            {"choice_bias": (E,)} if experts.choice_bias else {}
        )
        if experts.shared_gate:
            parts["router"]["shared_gate"] = (D, 1)
        if experts.biases:
            parts["router"]["bias"] = (E,)
        products = _mlp_shapes(config, experts.hidden, bias=experts.biases)
        parts["experts"] = {name: (E, *shape) for name, shape in products.items()}
        if experts.shared_hidden:
            parts["shared"] = _mlp_shapes(config, experts.shared_hidden, bias=False)
    for part in ("attention", "mlp"):
        names = ["norm"] * (config.pre_norms and (part, config.parallel) != ("mlp", "norm"))
        names += ["post_norm"] * config.post_norms
        parts[part] |= {leaf: (D,) for name in names for leaf in norm_leaves(config, name)}
    return parts


def norm_leaves(config: DecoderConfig, name: str) -> list[str]:
    """Return the leaves of a norm."""
    has_bias = config.norm in ("layer", "layer_plus_one")
    return [] if config.norm == "layer_fixed" else [name] + [f"{name}_bias"] * has_bias


def _attention_shapes(config: DecoderConfig) -> Shapes:
    D, H, G, K = config.dim, config.num_heads, config.kv_heads, config.head_width
    if config.latent is not None:
        return config.latent.shapes(D, H)
    if config.fused == "qkv":
        shapes: Shapes = {"qkv": (D, 3, H, K)}
    elif config.fused == "kv":
        shapes = {"q": (D, H, K), "kv": (D, G, 2 * K)}
    else:
        shapes = {"q": (D, H, K), "k": (D, G, K), "v": (D, G, K)}
    biases = (
        {f"{name}_bias": shape[1:] for name, shape in shapes.items()} if config.qkv_bias else {}
    )
    shapes |= {"out": (H, K, D)} | biases
    if config.out_bias:
        shapes["out_bias"] = (D,)
    if config.qk_norm is not None:
        per_head = config.qk_norm != "all"
        shapes |= {"q_norm": (K,) if per_head else (H, K), "k_norm": (K,) if per_head else (G, K)}
    if config.sinks:
        shapes["sinks"] = (H,)
    return shapes


def _mlp_shapes(config: DecoderConfig, hidden: int, *, bias: bool, fused: bool = False) -> Shapes:
    D, width = config.dim, 2 * hidden if config.activation == "clamped_swiglu" else hidden
    if fused:
        shapes: Shapes = {"up": (D, 1 + config.gated, width)}
    else:
        shapes = dict.fromkeys(("gate", "up")[not config.gated :], (D, width))
    shapes["down"] = (hidden, D)
    return shapes | ({f"{name}_bias": shape[1:] for name, shape in shapes.items()} if bias else {})


def roundings(config: DecoderConfig) -> dict[str, Rounding]:
    """Return the weights of blocks that are multiplied in 8 bits, for `BlockModel.rounded`.

    None without a precision.
    """
    if config.precision is None:
        return {}
    rounding = Rounding(config.precision, dtype=config.dtype)
    latent = config.latent is not None  # its products of queries, keys and values are not in 8 bits
    names = () if latent else ("q", "k", "v", "kv", "qkv")
    rounded = {f"attention/{name}": rounding for name in names} | {
        "attention/out": rounding._replace(summed=2)
    }
    rounded |= {f"mlp/{name}": rounding for name in ("gate", "up", "down")}
    if config.fused:
        rounded["mlp/up"] = rounding._replace(parts=1 + config.gated)
    if config.experts is not None:
        rounded |= {
            f"experts/{name}": rounding._replace(experts=True) for name in ("gate", "up", "down")
        }
        rounded |= {f"shared/{name}": rounding for name in ("gate", "up", "down")}
    parts = block_shapes(config, dense=config.experts is None)
    return {
        path: rounded[path]
        for path in rounded
        if path.split("/")[1] in parts.get(path.split("/")[0], {})
    }


def apply_block(config: DecoderConfig, weights: Params, stream: Stream) -> Stream:
    """Add the attention branch, then the branch of the mlp or the experts.

    A block on TPU computes one half of the rows while the other half is sent, if tensor shards
    positions. Otherwise it would wait for its gathers and scatters over tensor. Llama 3 8B with
    tensor=4 (v5p:4x4x4, 4096 tokens a chip) takes 560 ms a step, and 604 with all rows at once.

    References:
      Wang, Zhang, Shen, Li and Ruwase, "Domino: Eliminating Communication in LLM Training via
      Generic Tensor Slicing and Overlapping", 2024.
    """
    if not _computes_by_halves(config, weights, stream.x):
        return apply_cached_block(config, weights, stream, None, 0)[0]
    halves = [apply_cached_block(config, weights, half, None, 0)[0] for half in _halves(stream)]
    return stream._replace(x=jnp.concatenate([half.x for half in halves]), layer=halves[0].layer)


def _computes_by_halves(config: DecoderConfig, weights: Params, x: Float[Array, "B T D"]) -> bool:
    """Return whether a block has two halves of rows that are long enough.

    Experts see all rows of a device.
    """
    B, T, _ = x.shape
    can_part = B % 2 == 0 and B * T >= 2 * _TOKENS_OF_HALF and "router" not in weights
    is_sharded = config.sequence_parallel and num_shards() > 1
    return (
        can_part and is_sharded and device_kind_or_default().startswith("TPU") and not is_analysed()
    )


def _halves(stream: Stream) -> list[Stream]:
    """Return the stream of each half of the rows."""
    rows = {name: getattr(stream, name) for name in ("x", "segment_ids", "positions", "order")}
    halves = {
        name: [None, None] if value is None else jnp.split(value, 2) for name, value in rows.items()
    }
    return [stream._replace(**{name: halves[name][i] for name in rows}) for i in range(2)]


def apply_cached_block(
    config: DecoderConfig,
    weights: Params,
    stream: Stream,
    cache: KVCache | None,
    start: Array | int,
) -> tuple[Stream, KVCache | None]:
    """Return the stream after the block, and the cache with the T positions of the stream, the
    first one at `start`.

    Without a cache, positions see each other alone.
    """
    router = weights.get("router")
    stream = stream._replace(x=layers.components_last(stream.x))
    weights = layers.cast(
        {part: leaves for part, leaves in weights.items() if part != "router"}, config.dtype
    )
    attention, mlp = weights["attention"], weights["mlp"]
    routers, by_kernels = stream.routers, _adds_by_kernels(config)
    x, inputs = _branch_inputs(config, attention, stream.x, "qkv", _num_projections(config))
    first_product = "mlp_hidden" if router is None else "router"
    x, mlp_inputs = (
        _branch_inputs(config, mlp, x, first_product) if config.parallel == "input" else (x, inputs)
    )
    mixed, cache = _attention(
        config, attention, inputs, stream, x if by_kernels else None, cache, start
    )
    x = mixed if by_kernels else _add_branch(config, attention, x, mixed)
    x = x if config.post_norms else checkpoint_name(x, _ATTENTION_OUT)
    if config.parallel is None:
        x, mlp_inputs = _branch_inputs(config, mlp, x, first_product)
    if router is None:
        out = _mlp(config, mlp, mlp_inputs[0], x if by_kernels else None)
        out = checkpoint_name(out, "mlp_out") if config.post_norms else out
        x = out if by_kernels else _add_branch(config, mlp, x, out)
    else:
        out, routers = _experts(config, weights, router, plain(mlp_inputs[0]), routers)
        x = _add_branch(config, mlp, x, out)
    return (
        stream._replace(
            x=x, layer=None if stream.layer is None else stream.layer + 1, routers=routers
        ),
        cache,
    )


def _num_projections(config: DecoderConfig) -> int:
    """Return how many products by kernels read the norm before attention.

    Each gives back a gradient of its own.
    """
    is_rounded = (
        config.precision is not None and config.latent is None and not config.sequence_parallel
    )
    return {"qkv": 1, "kv": 2, None: 3}[config.fused] if is_rounded else 1


def _branch_inputs(
    config: DecoderConfig, weights: Params, x: Array, name: str, uses: int = 1
) -> tuple[Array, list[Array | Normed]]:
    """Return x, and the input of a branch once for each of its uses.

    `name` names the products that read the input.
    """
    is_sharded, epsilon = config.sequence_parallel, config.norm_epsilon
    gather = layers.gather_positions if is_sharded else lambda x: x
    if not config.pre_norms or not config.norm.startswith("rms"):
        normed = apply_norm(config, weights, "norm", x) if config.pre_norms else x
        return x, [gather(normed)] * uses
    plus_one = config.norm == "rms_plus_one"
    x, inputs = norm_of_stream(
        x,
        weights["norm"],
        epsilon,
        uses,
        name=name,
        has_sharded_positions=is_sharded,
        plus_one=plus_one,
    )
    if config.precision is not None and not is_sharded and not plus_one:
        return x, [Normed(normed, x, weights["norm"], epsilon) for normed in inputs]
    return x, [gather(normed) for normed in inputs]


def _adds_by_kernels(config: DecoderConfig) -> bool:
    """Return whether the last product of a branch adds the stream: the kernels for 8 bits do it in
    the same pass.
    """
    has_more = config.post_norms or config.sequence_parallel or config.out_bias or config.mlp_bias
    return config.precision is not None and config.branch_scale == 1 and not has_more


def _add_branch(config: DecoderConfig, weights: Params, x: Array, out: Array) -> Array:
    shard = layers.shard_positions if config.sequence_parallel else lambda x: x
    out = shard(out)
    out = apply_norm(config, weights, "post_norm", out) if config.post_norms else out
    return shard(
        x + (out if config.branch_scale == 1 else out * jnp.asarray(config.branch_scale, out.dtype))
    )


def apply_norm(
    config: DecoderConfig, weights: PyTree, name: str, x: Float[Array, "*batch D"]
) -> Float[Array, "*batch D"]:
    """Return x normed by the leaf `name`, in the norm of the config."""
    scale, bias = weights.get(name), weights.get(f"{name}_bias")
    if config.norm.startswith("rms"):
        assert scale is not None
        norm = rms_norm if config.norm == "rms" else rms_norm_plus_one
        return norm(x, scale, config.norm_epsilon)
    if config.norm == "layer_plus_one":
        assert scale is not None
        scale = 1 + scale.astype(jnp.promote_types(x.dtype, jnp.float32))
    return _layer_norm(x, scale, bias, config.norm_epsilon)


@functools.partial(jax.checkpoint, static_argnums=3)
def _layer_norm(x: Array, scale: Array | None, bias: Array | None, epsilon: float) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = (centred * rsqrt_of_mean_square(centred, epsilon)).astype(x.dtype)
    normed = (
        normed if scale is None else (normed * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)
    )
    return _add_bias(normed, bias)


def _attention(
    config: DecoderConfig,
    weights: Params,
    inputs: list[Float[Array, "B T D"] | Normed],
    stream: Stream,
    added: Float[Array, "B T D"] | None,
    cache: KVCache | None,
    start: Array | int,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Return the last product of attention plus `added`, and the cache."""
    kind = None if stream.layer is None else jnp.asarray(_kind_numbers(config))[stream.layer]
    length = inputs[0].shape[1]
    places = layers.places(length, stream.positions, stream.order)
    rotate, scale = _rotation(config, kind, places, row_length(length)), config.attention_scale
    keep = functools.partial(checkpoint_name, name="qkv")
    if config.latent is not None:
        query, key, value = keep(latent_qkv(weights, plain(inputs[0]), config.latent, rotate))
    else:
        query, key, value = _qkv(config, weights, inputs)
        in_one_pass = cache is None and _rotates_in_one_pass(config, query, key)
        is_normed_first = config.qk_norm in ("head", "all")
        # heads are kept before a norm, whose gradient would need the products again, and before the
        # pass of a kernel
        if is_normed_first or in_one_pass:
            query, key, value = keep((query, key, value))
        if is_normed_first:
            query, key = _norm_heads(config, weights, query, key)
        if in_one_pass:  # it multiplies queries by the factor of scores as well
            query = rotate(query, factor_of_scores(scale, config.head_width))
            key, scale = rotate(key), 1.0
        else:
            query, key = rotate(query), rotate(key)
            if not is_normed_first:
                query, key, value = keep((query, key, value))
            if config.qk_norm == "rotated_head":
                query, key = _norm_heads(config, weights, query, key)
    if cache is None:
        mixed = _mix(config, kind, query, key, value, stream, scale, weights.get("sinks"))
    else:

        def write(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)

        cache = KVCache(write(cache.key, key), write(cache.value, value))
        mixed = _mix_cached(config, kind, query, cache, places, weights.get("sinks"))
    out = nn.quantized_einsum(
        "bthk,hkd->btd", mixed, weights["out"], precision=config.precision, added=added
    )
    out = _add_bias(out, weights.get("out_bias"))
    return checkpoint_name(out, _ATTENTION_OUT) if config.post_norms else out, cache


def _qkv(
    config: DecoderConfig, weights: Params, inputs: list[Array | Normed]
) -> tuple[Array, Array, Array]:
    input_of_each_product = itertools.chain(inputs, itertools.repeat(inputs[-1]))

    def project(name: str, dims: str = "hk") -> Array:
        heads = nn.quantized_einsum(
            f"btd,d{dims}->bt{dims}",
            next(input_of_each_product),
            weights[name],
            precision=config.precision,
        )
        return _add_bias(heads, weights.get(f"{name}_bias"))

    if config.fused == "qkv":
        # The dim of parts stays where the product puts it: moving it to the front would cost a
        # transposition each way.
        query, key, value = layers.split_parts(project("qkv", "chk"))
    elif config.fused == "kv":
        query, weight = project("q"), weights["kv"]
        is_plain = config.precision is None and not config.qkv_bias and isinstance(weight, Array)
        # XLA would copy keys and values to part them
        if is_plain and device_kind_or_default().startswith("TPU"):
            parts = Parts("btd,dgk->btgk", "btd,dgk->btgk", "k", 2)
            key, value = products_with_parts(parts, plain(inputs[-1]), weight)
        else:
            key, value = jnp.split(project("kv"), 2, axis=-1)
    else:
        query, key, value = project("q"), project("k"), project("v")
    return query, key, value


def _norm_heads(
    config: DecoderConfig, weights: Params, query: Array, key: Array
) -> tuple[Array, Array]:
    """Return the heads of queries and keys normed, each or all of a token together."""

    def norm(heads: Array, name: str) -> Array:
        if config.qk_norm != "all":
            return apply_norm(config, weights, name, heads)
        flat = heads.reshape(*heads.shape[:2], -1)
        return apply_norm(config, {name: weights[name].reshape(-1)}, name, flat).reshape(
            heads.shape
        )

    return norm(query, "q_norm"), norm(key, "k_norm")


def _kind_numbers(config: DecoderConfig) -> np.ndarray:
    """Return the number of each block's kind among the used kinds."""
    used = sorted(set(config.pattern or (0,)))
    return np.asarray(
        [used.index(kind) for kind in config.pattern or (0,) * config.num_layers], np.int32
    )


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
        wide = jnp.promote_types(x.dtype, jnp.float32)
        if kind is None or len(set(ropes)) == 1:
            frequencies, factor = jnp.asarray(table[0], wide), float(factors[0])
        else:
            frequencies, factor = jnp.asarray(table, wide)[kind], jnp.asarray(factors, wide)[kind]
        rotating, fixed = x[..., :dims], x[..., dims:]
        # scores do not depend on the order of components, which is the same in keys
        if first.interleaved:
            rotating = jnp.swapaxes(rotating.reshape(*x.shape[:-1], dims // 2, 2), -1, -2).reshape(
                rotating.shape
            )
        rotated = layers.rotate_by(rotating, places, frequencies, factor * scale)
        return rotated if fixed.shape[-1] == 0 else jnp.concatenate([rotated, fixed], axis=-1)

    return rotate


def _rotates_in_one_pass(config: DecoderConfig, query: Array, key: Array) -> bool:
    """Return whether kernels rotate whole heads, and nothing comes after them."""
    ropes = [used.rope for used in config.used_kinds if used.rope]
    if (
        not ropes
        or ropes[0].interleaved
        or (ropes[0].dims or config.rotary_dim) != config.head_width
    ):
        return False
    return config.qk_norm != "rotated_head" and takes_rotation(query) and takes_rotation(key)


def _mix(
    config: DecoderConfig,
    kind: Array | None,
    query: Array,
    key: Array,
    value: Array,
    stream: Stream,
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
    softcap, scale = config.attention_softcap, config.attention_scale
    return masked_attention(query, *cache, mask, softcap=softcap, scale=scale, sinks=sinks)


def _mlp(
    config: DecoderConfig,
    weights: Params,
    x: Float[Array, "B T D"] | Normed,
    added: Float[Array, "B T D"] | None = None,
) -> Float[Array, "B T D"]:
    # without constraints the partitioner shards the gradients of gate and up differently, and moves
    # them
    shard = layers.shard_last if config.sequence_parallel else lambda x: x

    def product(name: str, dims: str) -> Array:
        hidden = nn.quantized_einsum(
            f"btd,d{dims}->bt{dims}", x, weights[name], precision=config.precision
        )
        return shard(_add_bias(hidden, weights.get(f"{name}_bias")))

    up, down_weight = weights["up"], weights["down"]
    is_fused = (
        config.gated and config.fused and not config.mlp_bias and config.precision is not None
    )
    if is_fused and not isinstance(up, LowRank) and not isinstance(down_weight, LowRank):
        by_kernels = gated_mlp(
            x,
            up,
            down_weight,
            activation=ACTIVATIONS[config.activation],
            precision=config.precision,  # pyright: ignore[reportArgumentType]
            added=added,
        )
        if by_kernels is not None:
            return by_kernels
    if config.fused and device_kind_or_default().startswith("TPU"):
        hidden = _fused_hidden_on_tpu(config, weights, x, shard)
    elif config.fused:
        hidden = layers.split_parts(checkpoint_name(product("up", "cf"), "mlp_hidden"))
    else:
        hidden = checkpoint_name(
            [product(name, "f") for name in ("gate", "up") if name in weights], "mlp_hidden"
        )

    def down(hidden: list[Array], weight: Weight) -> Array:
        activated = ACTIVATIONS[config.activation](hidden[0])
        activated = shard(activated * hidden[1] if config.gated else activated)
        return nn.quantized_einsum(
            "btf,fd->btd", activated, weight, precision=config.precision, added=added
        )

    # without a barrier XLA reads the kept hidden units in the product: blocks run in a scan, where
    # it merges nothing
    down = jax.checkpoint(down, prevent_cse=False) if config.recompute_activation else down
    return _add_bias(down(hidden, weights["down"]), weights.get("down_bias"))


def _fused_hidden_on_tpu(
    config: DecoderConfig,
    weights: Params,
    x: Float[Array, "B T D"] | Normed,
    shard: Callable[[Array], Array],
) -> list[Float[Array, "B T F"]]:
    """Return the parts of the product with `up` [D, C, F].

    XLA:TPU copies no gathered weight and no kept product for it.
    """
    up, bias = weights["up"], weights.get("up_bias")
    mesh_sizes = {"data": 1, **mesh_under_trace().shape}
    if config.precision is None and mesh_sizes.get(TENSOR, 1) == 1 and isinstance(up, Array):
        # rows [C, F] of D are gathered as rows of a matrix
        is_matrix = largest_divisible_dim(up.shape, shard_axes(mesh_sizes).size, (False,) * 3) == 0
        D, C, _ = up.shape
        weight_product, letter = ("btd,df->btf", "f") if is_matrix else ("btd,dcf->cbtf", "c")
        parts = Parts("btd,df->btf", weight_product, letter, C)
        products = products_with_parts(parts, plain(x), up.reshape(D, -1) if is_matrix else up)
        biases = [None] * C if bias is None else list(bias)
        hidden = [_add_bias(product, b) for product, b in zip(products, biases, strict=True)]
        return checkpoint_name(hidden, "mlp_hidden")
    hidden = nn.quantized_einsum("btd,dcf->cbtf", x, up, precision=config.precision)
    hidden = hidden if config.precision else layers.components_last(hidden)
    hidden = shard(hidden if bias is None else hidden + bias[:, None, None])
    return layers.split_parts(checkpoint_name(hidden, "mlp_hidden"), dim=0)


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
        capacity_factor=experts.capacity_factor,
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
        precision=config.precision,
        activation=ACTIVATIONS[config.activation],
    )
    if experts.shared_gate:
        gate = jax.nn.sigmoid(x @ router["shared_gate"].astype(x.dtype))
        mixed = mixed + gate * _mlp(config, weights["shared"], x)
    return mixed, None if routers is None else routers.after_block(statistics)


def _add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + jnp.broadcast_to(bias, x.shape)
