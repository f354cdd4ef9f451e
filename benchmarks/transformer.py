"""The `BlockModel` of a `so.planning.Transformer`, with grouped-query attention, so that published
shapes can be compiled.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.core._rounding import Precision
from shardopt.low_precision._numbers import check_precision
from shardopt.models import decoder
from shardopt.models._decoder_block import BlockStream, apply_block
from shardopt.models._decoder_config import BlockKind, DecoderConfig
from shardopt.models._inputs import Params
from shardopt.models._rope import Rope
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
    """Return the model of the shape as a `BlockModel`.

    Its loss is the mean cross-entropy of the next token.

    Args:
      shape: sizes and dtypes.
      remat: the values that the backward pass recomputes, as in `BlockModel`; blocks name the same
        values as `decoder.model`.
      chunk: positions whose logits are held at a time, as in `so.nn.cross_entropy`.
      logits_dtype: the dtype of the logits, as in `so.nn.cross_entropy`.
      sequence_parallel: whether tensor shards positions, as in `DecoderConfig`.
      precision: precision of products with block weights: "int8" or "fp8" as in
        `so.nn.quantized_einsum`; None is the dtype of the shape.

    Raises:
      ValueError: if the precision is unknown. While tracing, if `sequence_parallel` is set and
        tensor does not divide the positions.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from shardopt.planning import Transformer
      >>> sizes = dict(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden=64, vocab_size=256, length=16)
      >>> shape = Transformer("tiny", **sizes, dtype=jnp.float32)
      >>> params = init(shape, jax.random.key(0))
      >>> loss = jax.jit(model(shape).loss_fn)(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05)
      True

    A batch is the same as for `decoder.model`. Norms are RMS norms. Positions are rotary, or
    learned if the shape has rows for them. Without a gate the mlp is GELU. Weights are cast to the
    dtype of the shape. Attention is `so.nn.attention`: a fused kernel on TPU and GPU.
    `fused_attention` of the shape changes only the planner's formulas.
    """
    check_precision("transformer", precision)
    config = DecoderConfig(
        shape.vocab_size,
        shape.dim,
        shape.num_layers,
        shape.num_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.width,
        hidden=shape.hidden,
        kinds=(BlockKind(rope=None if shape.positions else Rope(base=500_000.0)),),
        positions=shape.positions,
        activation="silu" if shape.gated else "gelu_tanh",
        gated=shape.gated,
        tied=shape.tied,
        loss_chunk=chunk,
        logits_dtype=logits_dtype,
        fused="kv",
        recompute_activation=False,  # the closed form of `so.plan` counts it among the residuals
        sequence_parallel=sequence_parallel,
        param_dtype=shape.param_dtype,
        dtype=shape.dtype,
        precision=precision,
    )

    def block(weights: Params, stream: BlockStream) -> BlockStream:
        attention = {"norm": weights["norms"][0]} | {
            name: weights[name] for name in ("q", "kv", "out")
        }
        mlp = {"norm": weights["norms"][1]} | {name: weights[name] for name in ("up", "down")}
        return apply_block(config, {"attention": attention, "mlp": mlp}, stream)

    nested_model = decoder.model(config, remat=remat)
    rounded = {path.split("/")[1]: rounding for path, rounding in nested_model.rounded.items()}
    return nested_model._replace(block=block, rounded=rounded)


def init(shape: Transformer, rng: jax.Array) -> Params:
    """Return random parameters: normal with standard deviation 0.02, and ones for norms."""
    shapes = shape.abstract_params()
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    keys = jax.random.split(rng, len(leaves))

    def init_leaf(path, leaf, key):
        if "norm" in str(path[-1]):
            return jnp.ones(leaf.shape, leaf.dtype)
        return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)

    return treedef.unflatten(
        [init_leaf(path, leaf, key) for (path, leaf), key in zip(leaves, keys, strict=True)]
    )


Form = Literal["tokens", "targets", "packed"]


def abstract_batch(
    shape: Transformer, batch_size: int, *, form: Form = "tokens"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch.

    Args:
      shape: the model, whose length is T.
      batch_size: B.
      form: "tokens": tokens [B, T + 1]. "targets": tokens and targets [B, T], as
        `so.data.next_token` returns them and a context axis needs them. "packed": the arrays of
        `so.data.pack`.
    """
    length = shape.length + (form == "tokens")
    names_by_form = {"tokens": ("tokens",), "targets": ("tokens", "targets")}
    packed_names = "tokens", "targets", "weights", "segment_ids", "positions"
    return {
        name: jax.ShapeDtypeStruct(
            (batch_size, length), jnp.float32 if name == "weights" else jnp.int32
        )
        for name in names_by_form.get(form, packed_names)
    }
