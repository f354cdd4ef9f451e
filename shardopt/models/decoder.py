"""One decoder described by data: it can be a Llama, Mistral, Qwen, Gemma, Phi, OLMo, GPT-2, GPT-OSS
or DeepSeek.
"""

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
from shardopt.core import LeafRole, Loss, PyTree, format_error, leaves_with_paths, wide_dtype
from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.kernels._flash import capped
from shardopt.models import _layers as layers
from shardopt.models._decoder_block import (
    BlockStream,
    apply_block,
    block_shapes,
    norm_leaves,
    roundings,
)
from shardopt.models._decoder_config import BlockKind, DecoderConfig, ExpertsConfig
from shardopt.models._inputs import Batch, Inputs, Params, Tokens, check_ids, mean_loss, read_inputs
from shardopt.models._latent_attention import LatentConfig
from shardopt.models._rope import Rope
from shardopt.models._routers import balanced_loss, first_routers
from shardopt.nn._norm import apply_norm
from shardopt.nn._order import row_length
from shardopt.nn._sequence_parallel import gather_positions, shard_positions
from shardopt.optimizers import Matrix
from shardopt.partition._plan import Shape

__all__ = [
    "BlockKind",
    "DecoderConfig",
    "ExpertsConfig",
    "LatentConfig",
    "Rope",
    "init",
    "logits_of",
    "matrices",
    "model",
    "num_parameters",
    "rules",
]

_CALLER = "decoder"
"""The name in errors about a batch."""
_Entry = TypeVar("_Entry")

_BLOCK_RULES = (
    ("attention/(q|k|v|kv)$", (None, "tensor")),
    ("attention/((q|k|v|kv)_bias|sinks)$", ("tensor",)),
    ("attention/out$", ("tensor",)),
    ("(mlp|shared)/(gate|up)$", (None, "tensor")),
    ("(mlp|shared)/((gate|up)_bias|down)$", ("tensor",)),
    ("experts/(gate|up)$", (None, None, "tensor")),
    ("experts/((gate|up)_bias|down)$", (None, "tensor")),
)
_FUSED_RULES = (
    ("(attention/qkv|mlp/up)$", (None, None, "tensor")),
    ("(attention/qkv|mlp/up)_bias$", (None, "tensor")),
)
"""Rules of `DecoderConfig.fused`, whose products have one more dim; they come before the others."""
_BLOCK_MATRICES = (
    ("attention/qkv$", Matrix(rows=1, columns=(3, 4))),
    ("attention/(q|k|v|kv)$", Matrix(rows=1, columns=(2, 3))),
    ("attention/out$", Matrix(rows=(1, 2), columns=3)),
    ("(attention/(q|kv)_down|(mlp|shared)/(gate|up|down))$", Matrix(rows=1, columns=2)),
    ("experts/(gate|up|down)$", Matrix(rows=2, columns=3)),
)
_KINDS: tuple[tuple[str, LeafRole], ...] = (
    ("(^|/)(embedding|head)$", "if_divisible"),
    ("(^|/)(first_)?blocks/attention/(k|v|kv)(_bias)?$", "if_divisible"),
    ("(^|/)blocks/experts/", "experts"),
    # the biases that balance DeepSeek-V3's experts have no gradient
    ("(^|/)blocks/router/choice_bias$", "frozen"),
)


def rules(config: DecoderConfig) -> tuple[tuple[str, LeafRole], ...]:
    """Return the rules of a strategy: tensor splits heads, hidden units and the vocabulary. Heads of
    keys and a vocabulary that it does not divide stay whole, and the report says so.

    With experts they also name the leaves of experts, and the bias of their choice as frozen. They
    match below a prefix such as "base/" too.

    Example:
      >>> for pattern, spec in rules(DecoderConfig(tied=True)):
      ...     print(pattern, spec if isinstance(spec, str) else tuple(spec))
      (^|/)blocks/attention/(q|k|v|kv)$ (None, 'tensor')
      (^|/)blocks/attention/out$ ('tensor',)
      (^|/)blocks/(mlp|shared)/(gate|up)$ (None, 'tensor')
      (^|/)blocks/(mlp|shared)/((gate|up)_bias|down)$ ('tensor',)
      (^|/)(embedding|head)$ ('tensor',)
      (^|/)(embedding|head)$ if_divisible
      (^|/)(first_)?blocks/attention/(k|v|kv)(_bias)?$ if_divisible
    """
    # one head of keys and values is on every device of tensor
    single_head = (("attention/(k|v|kv)(_bias)?$", ()),) * (config.kv_heads == 1)
    block_rules = (*single_head, *(_FUSED_RULES if config.fused else ()), *_BLOCK_RULES)
    all_rules: list[tuple[str, LeafRole]] = [
        (f"(^|/)blocks/{pattern}", P(*spec)) for pattern, spec in block_rules
    ]
    all_rules += [(f"(^|/)first_blocks/{pattern}", P(None, *spec)) for pattern, spec in block_rules]
    all_rules += [("(^|/)(embedding|head)$", P("tensor"))]
    return _that_match(config, [*all_rules, *_KINDS])


def matrices(config: DecoderConfig) -> tuple[tuple[str, Matrix], ...]:
    """Return the leaves of blocks that are matrices, for the `matrices` of `so.optimizers` and of
    `shardopt.adapters`.

    Args:
      config: the description of the model.

    Returns:
      [(regex, Matrix), ...]; each regex matches a leaf of the model.
    """
    fused = [("mlp/up$", Matrix(rows=1, columns=3))] if config.fused else []
    return _that_match(
        config, [(f"blocks/{pattern}", matrix) for pattern, matrix in (*fused, *_BLOCK_MATRICES)]
    )


def _that_match(
    config: DecoderConfig, entries: Iterable[tuple[str, _Entry]]
) -> tuple[tuple[str, _Entry], ...]:
    """Return the entries (regex, ...) that match a leaf of the model."""
    paths = leaf_shapes(config)
    return tuple(entry for entry in entries if any(re.search(entry[0], path) for path in paths))


def leaf_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return key path -> shape of each leaf."""
    return dict(leaves_with_paths(shapes_of(config), is_leaf=is_shape))


def shapes_of(config: DecoderConfig) -> Params:
    """Return the shape of each leaf, in the tree that `init` returns."""
    V = config.vocab_size
    D = config.dim
    L = config.num_layers
    first = config.num_first

    def stacked(count: int, *, dense: bool) -> Params:
        parts = block_shapes(config, dense=dense)
        return {
            part: {name: (count, *shape) for name, shape in leaves.items()}
            for part, leaves in parts.items()
        }

    shapes: Params = {"embedding": (V, D)}
    if first:
        shapes["first_blocks"] = stacked(first, dense=True)
    shapes |= {"blocks": stacked(L - first, dense=config.experts is None)}
    shapes |= dict.fromkeys(norm_leaves(config, "norm"), (D,))
    if config.positions:
        shapes["positions"] = (config.positions, D)
    if not config.tied:
        shapes["head"] = (V, D)
    if config.experts is not None and config.experts.loads:
        names = ("router_load", "router_bias")[: 1 + (config.experts.balance == "bias")]
        shapes |= dict.fromkeys(names, (L - first, config.experts.number))
    return shapes


def init(config: DecoderConfig, rng: jax.Array) -> Params:
    """Return random normal parameters, so that the loss starts at the loss of a uniform guess.

    Norms are ones, biases zeros.

    The standard deviation is 0.02; it is 0.02 / sqrt(2 num_layers) for the last product of each
    branch, and 1 / dim for a tied embedding.

    Args:
      config: the description of the model, with L blocks of width D.
      rng: a jax random key.

    Returns:
      A dict with "embedding" [V, D], "norm" [D] and "blocks". Some configs add "head", "positions",
      "norm_bias", "first_blocks", "router_load" and "router_bias".

      "blocks" has "attention" with "q" [L, D, H, K], "k" and "v" [L, D, G, K] and "out" [L, H, K,
      D], or the shapes of `LatentConfig.shapes`. It also has "mlp" with "gate" and "up" [L, D, F] and
      "down" [L, F, D], or it has "router", "experts" and "shared". Norms and biases are in the part
      that they belong to.

    Example:
      >>> import jax
      >>> config = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden=64)
      >>> params = init(config, jax.random.key(0))
      >>> params["blocks"]["attention"]["k"].shape
      (2, 32, 2, 8)
      >>> sum(leaf.size for leaf in jax.tree.leaves(params)) == num_parameters(config)
      True
    """
    keys = iter(jax.random.split(rng, len(leaf_shapes(config))))
    # The sum of the 2 L branches then has the variance of one branch. A tied embedding is also the
    # head: with 0.02 each token would predict itself with a logit of 0.02 D.
    branch_scale = 0.02 / (2 * config.num_layers) ** 0.5
    scales: dict[str, float] = {"out": branch_scale, "down": branch_scale}
    scales |= {"embedding": 1 / config.dim} if config.tied else {}

    def draw(name: str, shape: Shape | Params) -> PyTree:
        if isinstance(shape, dict):
            return {name: draw(name, part) for name, part in shape.items()}
        if name.endswith("norm"):
            return jnp.full(shape, 0 if config.norm.endswith("plus_one") else 1, config.param_dtype)
        if name.startswith("router_"):
            return jnp.zeros(shape, wide_dtype(config.param_dtype))
        if name.endswith("bias") or name == "sinks":
            return jnp.zeros(shape, config.param_dtype)
        return scales.get(name, 0.02) * jax.random.normal(next(keys), shape, config.param_dtype)

    return draw("", shapes_of(config))


def is_shape(x: object) -> bool:
    """Return whether a node of the tree of shapes is a shape."""
    return isinstance(x, tuple)


def num_parameters(config: DecoderConfig, *, active: bool = False) -> int:
    """Return the number of trained parameters, or with `active` the number that one token goes
    through.
    """
    sizes = {
        path: math.prod(shape)
        for path, shape in leaf_shapes(config).items()
        if not path.startswith("router_")
    }
    total = sum(sizes.values())
    if active and config.experts is not None:
        in_experts = sum(size for path, size in sizes.items() if path.startswith("blocks/experts/"))
        total -= in_experts - in_experts * config.experts.top_k // config.experts.number
    return total


def model(config: DecoderConfig, *, remat: Remat = None) -> BlockModel:
    """Return the decoder as a `BlockModel`.

    Its loss is the mean cross-entropy of the next token, in nats.

    Args:
      config: the description of the model.
      remat: the values that the backward pass recomputes, as in `BlockModel`. With T tokens, blocks
        name these values:

        - "qkv", queries, keys and values: [3 T D] for a GPT. Queries and keys are rotated, unless a
          norm of heads comes before the rotation or a kernel for TPU rotates them. No norm of heads
          is in them;
        - "attention" [T D], the output of attention;
        - "attention_out" [T D], the block's input plus attention's branch. With post norms it is
          the branch's last product;
        - "mlp_hidden", the first products of the mlp: [2 T F] with a gate. The backward pass does
          not need the last product;
        - "mlp_out" [T D], with post norms alone: the last product of the mlp, which its norm needs;
        - "router", "dispatched" and "experts" of `so.nn.mixture_of_experts`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> kinds = (BlockKind(window=8), BlockKind(rope=Rope(base=1e6)))
      >>> config = DecoderConfig(dim=32, num_layers=4, hidden=64, kinds=kinds, pattern=(0, 0, 0, 1))
      >>> params = init(config, jax.random.key(0))
      >>> loss = jax.jit(model(config).loss_fn)(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05)
      True

    A batch is a dict of "tokens", integers [B, T + 1]: the first T are the input and the last T are
    the targets. Or it has "tokens" and "targets", integers [B, T] each; a context axis can split
    this form (`so.data.next_token` converts to it). It may also have, [B, T] each:

    - "weights", one per target (0 leaves it out): the loss is then a `so.losses.Weighted`, the
      weighted mean over the whole global batch;
    - "segment_ids", integers, the document of each token in a packed row (`so.data.pack`): tokens
      attend to their own document only, and no gradient crosses from one document to another;
    - "positions", integers, the position of each token in its document, for position embeddings
      alone. By default it is the position in the row. With rotary positions this gives the same
      result, since they act by their distances;
    - "order", integers, the position of each token in a row that was permuted (`so.nn.zigzag`).
      Attention then uses plain XLA, not the kernel of the devices. Rows in natural order need no
      "order", packed or not.

    Targets of -100 are left out, as in torch and transformers. So with "targets" the loss is a
    `so.losses.Weighted` as well; in a loop of your own differentiate its total / weight. Other ids that the model does not
    have are refused in a numpy batch; in arrays of jax they make the loss NaN. Give strategies
    `rules=decoder.rules(config)` over tensor, and with experts.

    **Kinds of blocks**: all blocks run one program. The number of a block goes with the
    activations, and selects its window and its row in a table of frequencies.
    """
    return BlockModel(
        functools.partial(_embed, config),
        functools.partial(apply_block, config),
        functools.partial(_loss, config),
        remat,
        tables=() if config.tied else ("embedding",),
        rounded=roundings(config),
        check_batch=functools.partial(
            check_ids, _CALLER, vocab_size=config.vocab_size, num_positions=config.positions
        ),
    )


def _embed(config: DecoderConfig, outer: Params, batch: Batch) -> BlockStream:
    stream = embed_tokens(config, outer, read_inputs(batch))
    return _run_blocks(config, outer["first_blocks"], stream) if config.num_first else stream


def embed_tokens(config: DecoderConfig, outer: Params, inputs: Inputs) -> BlockStream:
    """Return the input of the first block; NaN for an id outside the vocabulary."""
    x = nn.embedding(layers.cast(outer["embedding"], config.dtype), inputs.tokens)
    if config.embedding_scale != 1:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.positions:
        table = layers.cast(outer["positions"], config.dtype)
        T = x.shape[1]
        _check_length(config, inputs, T)
        if inputs.whole and config.positions >= T:
            x = x + table[None, :T]
        else:
            places = layers.places(T, inputs.positions, inputs.order)
            x = x + jnp.broadcast_to(nn.embedding(table, places), x.shape)
    if config.sequence_parallel:
        x = shard_positions(x)
    layer = jnp.zeros((), jnp.int32) if len(config.used_kinds) > 1 else None
    routers = (
        first_routers(config.experts, outer, x)
        if config.experts is not None and config.experts.loads
        else None
    )
    return BlockStream(x, layer, inputs.segment_ids, inputs.positions, inputs.order, routers)


def _check_length(config: DecoderConfig, inputs: Inputs, length: int) -> None:
    """Refuse, by a ValueError, rows that are longer than the table of positions."""
    total = row_length(length)
    if inputs.positions is None and total > config.positions:
        problem = (
            f"rows have {total} positions, and the model's table of positions has"
            f" {config.positions}."
        )
        fix = (
            "cut the rows, or give the batch positions within each document, as so.data.pack does."
        )
        raise ValueError(format_error(_CALLER, problem, fix=fix))


def _run_blocks(config: DecoderConfig, blocks: Params, stream: BlockStream) -> BlockStream:
    return jax.lax.scan(
        lambda stream, weights: (apply_block(config, weights, stream), None), stream, blocks
    )[0]


def _final_norm_and_head(
    config: DecoderConfig, outer: Params, x: Float[Array, "B T D"]
) -> tuple[Array, Array]:
    head = "embedding" if config.tied else "head"
    leaves = {name: outer[name] for name in (*norm_leaves(config, "norm"), head)}
    leaves = layers.cast(leaves, config.dtype)
    return apply_norm(config.norm, leaves, "norm", x, config.norm_epsilon), leaves[head]


def _loss(config: DecoderConfig, outer: Params, stream: BlockStream, batch: Batch) -> Loss:
    inputs = read_inputs(batch)
    normed, head = _final_norm_and_head(config, outer, stream.x)
    normed = gather_positions(normed) if config.sequence_parallel else normed
    options = {
        "chunk": config.loss_chunk,
        "softcap": config.logits_softcap,
        "logits_dtype": config.logits_dtype,
    }
    loss = mean_loss(nn.cross_entropy(normed, head, inputs.targets, **options), inputs)
    if stream.routers is None:
        return loss
    assert config.experts is not None
    return balanced_loss(config.experts, outer, stream.routers, loss)


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
    stream = _embed(config, params, {"tokens": tokens, "targets": tokens})
    return last_logits(config, params, _run_blocks(config, params["blocks"], stream).x)


def last_logits(
    config: DecoderConfig, outer: Params, x: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """Return the logits for the output of the last block, in float32 at least, since bfloat16 would
    cost a digit of the loss.
    """
    normed, head = _final_norm_and_head(config, outer, x)
    wide = wide_dtype(normed.dtype)
    return capped(
        jnp.einsum("btd,vd->btv", normed, head, preferred_element_type=wide), config.logits_softcap
    )
