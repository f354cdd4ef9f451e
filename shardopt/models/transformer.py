"""The `BlockModel` of a `so.planning.Transformer`: grouped-query attention, so that published shapes can be compiled."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.core.block_model import BlockModel
from shardopt.core.block_remat import Remat
from shardopt.models.gpt import Batch, Params
from shardopt.models.layers import rms_norm, rotate
from shardopt.planning import Transformer


def model(shape: Transformer, *, remat: Remat = None, chunk: int | None = None) -> BlockModel:
    """Return the mean cross-entropy of the next token as a `BlockModel`, with the parameters of the shape.

    A batch is a dict of "tokens", integers [B, T + 1]. Norms are RMS norms and positions rotary, or learned where the
    shape has rows for them; without a gate the mlp is GELU. Weights are cast to the dtype of the shape. Attention is
    `so.nn.attention`: a fused kernel on TPU and GPU; `fused_attention` speaks of the formulas only.

    Args:
      shape: sizes and dtypes.
      remat: what the backward pass recomputes, as in `BlockModel`; blocks name the values that `gpt.model` names.
      chunk: positions whose logits are held at a time, as in `so.nn.cross_entropy`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from shardopt.planning import Transformer
      >>> sizes = dict(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden=64, vocab_size=256, length=16)
      >>> shape = Transformer("tiny", **sizes, dtype=jnp.float32)
      >>> params = init(shape, jax.random.key(0))
      >>> loss = jax.jit(model(shape).loss_fn)(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05)
      True
    """
    T = shape.length

    def embed(outer: Params, batch: Batch) -> Float[Array, "B T D"]:
        x = nn.embedding(outer["embedding"].astype(shape.dtype), batch["tokens"][:, :T], mode="clip")
        return x + _cast(outer["positions"], shape)[None, :T] if shape.positions else x

    def block(weights: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        weights = jax.tree.map(lambda leaf: _cast(leaf, shape), weights)
        x = x + _grouped_attend(shape, weights, rms_norm(x, weights["norms"][0]))
        return x + _mlp(shape, weights, rms_norm(x, weights["norms"][1]))

    def loss(outer: Params, x: Float[Array, "B T D"], batch: Batch) -> Float[Array, ""]:
        head = _cast(outer["embedding" if shape.tied else "head"], shape)
        normed = rms_norm(x, _cast(outer["norm"], shape))
        return jnp.mean(nn.cross_entropy(normed, head, jnp.asarray(batch["tokens"])[:, 1 : T + 1], chunk=chunk))

    return BlockModel(embed, block, loss, remat, tables=() if shape.tied else ("embedding",))


def init(shape: Transformer, rng: jax.Array) -> Params:
    """Draw parameters: normal with deviation 0.02, norms ones."""
    shapes = shape.abstract_params()
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    keys = jax.random.split(rng, len(leaves))

    def one(path, leaf, key):
        if "norm" in str(path[-1]):
            return jnp.ones(leaf.shape, leaf.dtype)
        return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)

    return treedef.unflatten([one(path, leaf, key) for (path, leaf), key in zip(leaves, keys, strict=True)])


def abstract_batch(shape: Transformer, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    return {"tokens": jax.ShapeDtypeStruct((batch_size, shape.length + 1), jnp.int32)}


def _grouped_attend(shape: Transformer, weights: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    query = jnp.einsum("btd,dhk->bthk", x, weights["q"])
    key, value = jnp.split(jnp.einsum("btd,dgk->btgk", x, weights["kv"]), 2, axis=-1)
    if not shape.positions:
        at = jnp.arange(x.shape[1])
        query, key = rotate(query, at, 500_000.0), rotate(key, at, 500_000.0)
    mixed = nn.attention(*checkpoint_name((query, key, value), "qkv"))
    return checkpoint_name(jnp.einsum("bthk,hkd->btd", mixed, weights["out"]), "attention_out")


def _mlp(shape: Transformer, weights: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    up = checkpoint_name(jnp.einsum("btd,dcf->cbtf", x, weights["up"]), "mlp_hidden")
    hidden = jax.nn.silu(up[0]) * up[1] if shape.gated else jax.nn.gelu(up[0])
    return jnp.einsum("btf,fd->btd", hidden, weights["down"])


def _cast(leaf: Array, shape: Transformer) -> Array:
    return leaf.astype(shape.dtype)
