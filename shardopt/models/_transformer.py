"""The `BlockModel` of a `so.planning.Transformer`, with grouped-query attention, so that published shapes can be compiled."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.collectives import constrain_tensor
from shardopt.collectives._per_device import TENSOR
from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.core._errors import format_error
from shardopt.core._types import PyTree, Weighted
from shardopt.mesh import mesh_under_trace
from shardopt.models._inputs import attach_marks, make_block, mean_loss, plain_activations, read_inputs
from shardopt.models._layers import cast, grouped_attention, places, rms_norm
from shardopt.models.gpt import Batch, Params
from shardopt.nn._low_precision import Precision, check_precision
from shardopt.planning import Transformer


def model(
    shape: Transformer,
    *,
    remat: Remat = None,
    chunk: int | None = None,
    logits_dtype: DTypeLike | None = None,
    sequence_parallel: bool = False,
    precision: Precision | None = None,
) -> BlockModel:
    """Return the model of the shape as a `BlockModel`; its loss is the mean cross-entropy of the next token.

    Args:
      shape: sizes and dtypes.
      remat: what the backward pass recomputes, as in `BlockModel`; blocks name the same values as `gpt.model`.
      chunk: positions whose logits are held at a time, as in `so.nn.cross_entropy`.
      logits_dtype: the dtype of the logits, as in `so.nn.cross_entropy`.
      sequence_parallel: whether tensor shards the positions of block inputs, block outputs and norms. tensor must divide the
        positions. A block stores 1 / tensor of its input. An all-gather and a reduce-scatter of as many bytes replace each
        all-reduce. The step is the same, up to summation order. `so.plan` does not plan for it.
      precision: precision of products with block weights: "int8" or "fp8" as in `so.nn.quantized_einsum`; None is the dtype
        of the shape.

    Raises:
      ValueError: if the precision is unknown. While tracing, if `sequence_parallel` is set and tensor does not divide the
        positions.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from shardopt.planning import Transformer
      >>> sizes = dict(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden=64, vocab_size=256, length=16)
      >>> shape = Transformer("tiny", **sizes, dtype=jnp.float32)
      >>> params = init(shape, jax.random.key(0))
      >>> loss = jax.jit(model(shape).loss_fn)(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05)
      True

    A batch is the same as for `gpt.model`. Norms are RMS norms. Positions are rotary, or learned if the shape has rows for them.
    Without a gate the mlp is GELU. Weights are cast to the dtype of the shape. Attention is `so.nn.attention`: a fused kernel on
    TPU and GPU. `fused_attention` of the shape changes only the planner's formulas.

    References:
      Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
    """
    check_precision("transformer", precision)

    def shard_positions(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return _shard_over_tensor(x, _POSITIONS) if sequence_parallel else x

    def gather_positions(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return _shard_over_tensor(x, PartitionSpec()) if sequence_parallel else x

    def embed(outer: Params, batch: Batch) -> PyTree:
        inputs = read_inputs("transformer", batch)
        x = nn.embedding(outer["embedding"].astype(shape.dtype), inputs.tokens, mode="clip")
        if shape.positions:
            table, T = cast(outer["positions"], shape.dtype), x.shape[1]
            if {"targets", "positions", "order"} & set(batch):  # positions may be split over devices
                x = x + jnp.take(table, jnp.atleast_2d(places(T, inputs.positions, inputs.order)), axis=0)
            else:
                x = x + table[None, :T]
        return attach_marks(shard_positions(x), inputs)

    def run(
        weights: Params, x: Array, segment_ids: Array | None, positions: Array | None, order: Array | None
    ) -> Array:
        weights = cast(weights, shape.dtype)
        normed = gather_positions(rms_norm(x, weights["norms"][0]))
        marks = {"segment_ids": segment_ids, "positions": positions, "order": order}
        rope_base = None if shape.positions else 500_000.0
        mixed = grouped_attention(weights, normed, rope_base=rope_base, precision=precision, **marks)
        x = shard_positions(x + shard_positions(mixed))
        normed = gather_positions(rms_norm(x, weights["norms"][1]))
        return shard_positions(x + shard_positions(_mlp(shape, weights, normed, precision, sharded=sequence_parallel)))

    def loss(outer: Params, x: PyTree, batch: Batch) -> Float[Array, ""] | Weighted:
        inputs = read_inputs("transformer", batch)
        head = cast(outer["embedding" if shape.tied else "head"], shape.dtype)
        normed = gather_positions(rms_norm(plain_activations(x), cast(outer["norm"], shape.dtype)))
        return mean_loss(nn.cross_entropy(normed, head, inputs.targets, chunk=chunk, logits_dtype=logits_dtype), inputs)

    return BlockModel(embed, make_block(run), loss, remat, tables=() if shape.tied else ("embedding",))


def init(shape: Transformer, rng: jax.Array) -> Params:
    """Return random parameters: normal with standard deviation 0.02, and ones for norms."""
    shapes = shape.abstract_params()
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    keys = jax.random.split(rng, len(leaves))

    def init_leaf(path, leaf, key):
        if "norm" in str(path[-1]):
            return jnp.ones(leaf.shape, leaf.dtype)
        return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)

    return treedef.unflatten([init_leaf(path, leaf, key) for (path, leaf), key in zip(leaves, keys, strict=True)])


Form = Literal["tokens", "targets", "packed"]


def abstract_batch(shape: Transformer, batch_size: int, *, form: Form = "tokens") -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch.

    Args:
      shape: the model, whose length is T.
      batch_size: B.
      form: "tokens": tokens [B, T + 1]. "targets": tokens and targets [B, T], as `so.data.next_token` returns them and a
        context axis needs them. "packed": the arrays of `so.data.pack`.
    """
    length = shape.length + (form == "tokens")
    names_by_form = {"tokens": ("tokens",), "targets": ("tokens", "targets")}
    packed_names = "tokens", "targets", "weights", "segment_ids", "positions"
    return {
        name: jax.ShapeDtypeStruct((batch_size, length), jnp.float32 if name == "weights" else jnp.int32)
        for name in names_by_form.get(form, packed_names)
    }


def _mlp(
    shape: Transformer,
    weights: Params,
    x: Float[Array, "B T D"],
    precision: Precision | None = None,
    *,
    sharded: bool = False,
) -> Float[Array, "B T D"]:
    up = checkpoint_name(nn.quantized_einsum("btd,dcf->cbtf", x, weights["up"], precision=precision), "mlp_hidden")
    if sharded:  # otherwise the partitioner shards the gradient of the two halves differently, and moves it
        up = _shard_over_tensor(up, PartitionSpec(None, None, None, TENSOR))
    hidden = jax.nn.silu(up[0]) * up[1] if shape.gated else jax.nn.gelu(up[0])
    if sharded:
        hidden = _shard_over_tensor(hidden, PartitionSpec(None, None, TENSOR))
    return nn.quantized_einsum("btf,fd->btd", hidden, weights["down"], precision=precision)


_POSITIONS = PartitionSpec(None, TENSOR, None)


def _shard_over_tensor(x: Array, spec: PartitionSpec) -> Array:
    tensor_size = mesh_under_trace().shape.get(TENSOR, 1)
    if spec == _POSITIONS and x.shape[1] % tensor_size:
        problem = (
            f"sequence_parallel shards {x.shape[1]} positions over tensor={tensor_size}, which does not divide them."
        )
        fix = f"choose a length that {tensor_size} divides, or leave sequence_parallel out."
        raise ValueError(format_error("transformer", problem, fix=fix))
    return constrain_tensor([x], [spec])[0]
