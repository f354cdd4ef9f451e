"""One decoder described by data: it can be a Llama, Mistral, Qwen, Gemma, Phi, OLMo, GPT-2, GPT-OSS or DeepSeek."""

import functools
import math
import re
from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.core._types import Weighted, leaves_with_paths
from shardopt.models import _layers as layers
from shardopt.models._decoder_block import Stream, apply_block, apply_norm, block_shapes
from shardopt.models._decoder_config import BlockKind, DecoderConfig, Experts
from shardopt.models._inputs import Inputs, mean_loss, read_inputs
from shardopt.models._rope import Rope
from shardopt.models.gpt import Batch, Params, Tokens
from shardopt.nn._flash import capped
from shardopt.optimizers import Matrix

__all__ = [
    "BlockKind",
    "DecoderConfig",
    "Experts",
    "Rope",
    "expert_leaves",
    "frozen",
    "init",
    "logits_of",
    "matrices",
    "model",
    "num_parameters",
    "rules",
]

_Entry = TypeVar("_Entry")

_BLOCK_RULES = (
    ("attention/(q|k|v|kv)$", (None, "tensor")),
    ("attention/((q|k|v)_bias|sinks)$", ("tensor",)),
    ("attention/out$", ("tensor",)),
    ("(mlp|shared)/(gate|up)$", (None, "tensor")),
    ("(mlp|shared)/((gate|up)_bias|down)$", ("tensor",)),
    ("experts/(gate|up)$", (None, None, "tensor")),
    ("experts/((gate|up)_bias|down)$", (None, "tensor")),
)
_BLOCK_MATRICES = (
    ("attention/(q|k|v|kv)$", Matrix(rows=1, columns=(2, 3))),
    ("attention/out$", Matrix(rows=(1, 2), columns=3)),
    ("(attention/(q|kv)_down|(mlp|shared)/(gate|up|down))$", Matrix(rows=1, columns=2)),
    ("experts/(gate|up|down)$", Matrix(rows=2, columns=3)),
)
expert_leaves = ("(^|/)blocks/experts/",)
"""Leaves of experts, for the `expert_leaves` of a strategy."""

frozen = ("(^|/)blocks/router/choice_bias$",)
"""Leaves without a gradient, for the `frozen` of a strategy: the biases that balance DeepSeek-V3's experts."""


def rules(config: DecoderConfig) -> tuple[tuple[str, P], ...]:
    """Return tensor rules that shard heads, hidden units and the vocabulary; they match below a prefix such as "base/" too.

    Example:
      >>> for pattern, spec in rules(DecoderConfig(tied=True)):
      ...     print(pattern, tuple(spec))
      (^|/)blocks/attention/(q|k|v|kv)$ (None, 'tensor')
      (^|/)blocks/attention/out$ ('tensor',)
      (^|/)blocks/(mlp|shared)/(gate|up)$ (None, 'tensor')
      (^|/)blocks/(mlp|shared)/((gate|up)_bias|down)$ ('tensor',)
      (^|/)(embedding|head)$ ('tensor',)
    """
    all_rules = [(f"(^|/)blocks/{pattern}", P(*spec)) for pattern, spec in _BLOCK_RULES]
    all_rules += [(f"(^|/)first_blocks/{pattern}", P(None, *spec)) for pattern, spec in _BLOCK_RULES]
    all_rules.append(("(^|/)(embedding|head)$", P("tensor")))
    return _that_match(config, all_rules)


def matrices(config: DecoderConfig) -> tuple[tuple[str, Matrix], ...]:
    """Return the leaves of blocks that are matrices, for the `matrices` of `so.optimizers` and of `shardopt.adapters`.

    Args:
      config: the description of the model.

    Returns:
      [(regex, Matrix), ...]; each regex matches a leaf of the model.
    """
    return _that_match(config, [(f"blocks/{pattern}", matrix) for pattern, matrix in _BLOCK_MATRICES])


def _that_match(config: DecoderConfig, entries: Iterable[tuple[str, _Entry]]) -> tuple[tuple[str, _Entry], ...]:
    """Return the entries (regex, ...) that match a leaf of the model."""
    paths = leaf_shapes(config)
    return tuple(entry for entry in entries if any(re.search(entry[0], path) for path in paths))


def leaf_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return key path -> shape of each leaf."""
    return dict(leaves_with_paths(shapes_of(config), is_leaf=is_shape))


def shapes_of(config: DecoderConfig) -> Params:
    """Return the shape of each leaf, in the tree that `init` returns."""
    V, D, L, first = config.vocab_size, config.dim, config.num_layers, config.num_first

    def stacked(count: int, *, dense: bool) -> Params:
        parts = block_shapes(config, dense=dense)
        return {part: {name: (count, *shape) for name, shape in leaves.items()} for part, leaves in parts.items()}

    shapes: Params = {"embedding": (V, D), "blocks": stacked(L - first, dense=config.experts is None), "norm": (D,)}
    if first:
        shapes["first_blocks"] = stacked(first, dense=True)
    if config.positions:
        shapes["positions"] = (config.positions, D)
    if config.norm == "layer":
        shapes["norm_bias"] = (D,)
    if not config.tied:
        shapes["head"] = (V, D)
    return shapes


def init(config: DecoderConfig, rng: jax.Array) -> Params:
    """Return random parameters; the GPT draws its parameters alike.

    Args:
      config: the description of the model, with L blocks of width D.
      rng: a jax random key.

    Returns:
      A dict with "embedding" [V, D], "norm" [D], "blocks" and, where the config asks for them, "head", "positions", "norm_bias"
      and "first_blocks". "blocks" has "attention" with "q" [L, D, H, K], "k" and "v" [L, D, G, K] and "out" [L, H, K, D], or the
      shapes of `Latent.shapes`. It has "mlp" with "gate" and "up" [L, D, F] and "down" [L, F, D], or "router", "experts" and
      "shared". Norms and biases are in the part that they belong to.

    Example:
      >>> import jax
      >>> config = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden=64)
      >>> params = init(config, jax.random.key(0))
      >>> params["blocks"]["attention"]["k"].shape
      (2, 32, 2, 8)
      >>> sum(leaf.size for leaf in jax.tree.leaves(params)) == num_parameters(config)
      True
    """
    paths_and_shapes, tree = jax.tree_util.tree_flatten_with_path(shapes_of(config), is_leaf=is_shape)
    branch_scale = 0.02 / (2 * config.num_layers) ** 0.5
    special_scales = {"out": branch_scale, "down": branch_scale} | (
        {"embedding": 1 / config.dim} if config.tied else {}
    )
    leaves = []
    for (path, shape), key in zip(paths_and_shapes, jax.random.split(rng, len(paths_and_shapes)), strict=True):
        name = path[-1].key
        if name.endswith("norm"):
            leaf = jnp.full(shape, 0 if config.norm == "rms_plus_one" else 1, config.param_dtype)
        elif name.endswith("bias") or name == "sinks":
            leaf = jnp.zeros(shape, config.param_dtype)
        else:
            leaf = special_scales.get(name, 0.02) * jax.random.normal(key, shape, config.param_dtype)
        leaves.append(leaf)
    return tree.unflatten(leaves)


def is_shape(x: object) -> bool:
    """Return whether a node of the tree of shapes is a shape."""
    return isinstance(x, tuple)


def num_parameters(config: DecoderConfig) -> int:
    """Return the number of parameters."""
    return sum(map(math.prod, leaf_shapes(config).values()))


def model(config: DecoderConfig, *, remat: Remat = None) -> BlockModel:
    """Return the decoder as a `BlockModel`; its loss is the mean cross-entropy of the next token, in nats.

    Args:
      config: the description of the model.
      remat: what the backward pass recomputes, as in `BlockModel`; blocks name the same values as `gpt.model` and `moe.model`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> kinds = (BlockKind(window=8), BlockKind(rope=Rope(base=1e6)))
      >>> config = DecoderConfig(dim=32, num_layers=4, hidden=64, kinds=kinds, pattern=(0, 0, 0, 1))
      >>> params = init(config, jax.random.key(0))
      >>> loss = jax.jit(model(config).loss_fn)(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05)
      True

    A batch is the same as for `gpt.model`. With experts give strategies `expert_leaves=decoder.expert_leaves`, and
    `frozen=decoder.frozen` if the choice of experts has a bias.

    **Kinds of blocks**: all blocks run one program. The number of a block goes with the activations, and selects its window and
    its row in a table of frequencies.
    """
    return BlockModel(
        functools.partial(_embed, config),
        functools.partial(apply_block, config),
        functools.partial(_loss, config),
        remat,
        tables=() if config.tied else ("embedding",),
    )


def _embed(config: DecoderConfig, outer: Params, batch: Batch) -> Stream:
    return _first_stream(config, outer, read_inputs("decoder", batch))


def _first_stream(config: DecoderConfig, outer: Params, inputs: Inputs) -> Stream:
    """Return the input of the first stacked block: embeddings, after the blocks without experts that come before."""
    x = nn.embedding(layers.cast(outer["embedding"], config.dtype), inputs.tokens)
    if config.embedding_scale != 1:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.positions:
        table, places = (
            layers.cast(outer["positions"], config.dtype),
            layers.places(x.shape[1], inputs.positions, inputs.order),
        )
        x = x + jnp.broadcast_to(nn.embedding(table, places), x.shape)
    layer = jnp.zeros((), jnp.int32) if len(config.used_kinds) > 1 else None
    stream = Stream(x, layer, inputs.segment_ids, inputs.positions, inputs.order)
    return _run_blocks(config, outer["first_blocks"], stream) if config.num_first else stream


def _run_blocks(config: DecoderConfig, blocks: Params, stream: Stream) -> Stream:
    return jax.lax.scan(lambda stream, weights: (apply_block(config, weights, stream), None), stream, blocks)[0]


def _final_norm_and_head(config: DecoderConfig, outer: Params, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
    outer = layers.cast(
        {
            name: outer[name]
            for name in ("norm", "norm_bias", "embedding", "head")
            if name in outer and (config.tied or name != "embedding")
        },
        config.dtype,
    )
    return apply_norm(config, outer, "norm", x), outer["embedding" if config.tied else "head"]


def _loss(config: DecoderConfig, outer: Params, stream: Stream, batch: Batch) -> Float[Array, ""] | Weighted:
    inputs = read_inputs("decoder", batch)
    options = {"chunk": config.loss_chunk, "softcap": config.logits_softcap}
    return mean_loss(
        nn.cross_entropy(*_final_norm_and_head(config, outer, stream.x), inputs.targets, **options), inputs
    )


def logits_of(config: DecoderConfig, params: Params, tokens: Tokens) -> Float[Array, "B T V"]:
    """Return the logits after each token.

    Args:
      config: the description of the model.
      params: the parameters, on one device or sharded.
      tokens: [B, T], token ids.

    Returns:
      [B, T, V], in float32 at least.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    inputs = Inputs(tokens, tokens, None, None, None, None)
    stream = _run_blocks(config, params["blocks"], _first_stream(config, params, inputs))
    normed, head = _final_norm_and_head(config, params, stream.x)
    wide = jnp.promote_types(normed.dtype, jnp.float32)
    return capped(jnp.einsum("btd,vd->btv", normed, head, preferred_element_type=wide), config.logits_softcap)
