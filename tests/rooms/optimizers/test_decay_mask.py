"""Weight decay leaves norms and biases of stacked blocks alone, in our models and in others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from support.reference import jitted
from support.tiers import tiered

import shardopt as so
from shardopt.core._types import leaves_with_paths
from shardopt.models import decoder, gpt, moe
from shardopt.models.decoder import DecoderConfig

MODELS = {
    "gpt": lambda: gpt.init(gpt.config(dim=32, num_layers=2), jax.random.key(0)),
    "moe": lambda: moe.init(moe.config(dim=32, num_layers=2), jax.random.key(0)),
    "biases": lambda: decoder.init(DecoderConfig(dim=32, num_layers=2, hidden=32, fused="qkv"), jax.random.key(0)),
    "norms of all heads": lambda: decoder.init(DecoderConfig(dim=32, num_layers=2, hidden=32, qk_norm="all"), jax.random.key(0)),
    "adapters": lambda: {"base": gpt.init(gpt.config(dim=32, num_layers=2), jax.random.key(0))},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_biases_of_models_are_not_decayed(name):
    params = jax.eval_shape(MODELS[name])
    mask = dict(leaves_with_paths(so.optimizers.decay_mask(params)))
    undecayed_paths = {path for path, is_decayed in mask.items() if not is_decayed}
    assert {path for path in mask if "norm" in path or path.endswith("bias")} <= undecayed_paths
    assert {path for path in mask if path.endswith(("up", "down", "out", "embedding"))}.isdisjoint(
        undecayed_paths
    )


def nnx_params(make):
    return so.interop.nnx(make(nnx.Rngs(0)), lambda module, batch: 0.0).params


def attention(rngs):
    """Biases of queries, keys and values are [H, K]."""
    return nnx.MultiHeadAttention(
        num_heads=2, in_features=8, decode=False, normalize_qk=True, rngs=rngs
    )


class OnTwoDims(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones((2, 4)))  # of a norm over two dims
        self.up = nnx.LinearGeneral((2, 4), (3, 5), axis=(-2, -1), rngs=rngs)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.vmap(attention)(rngs.fork(split=3))


def boxed(key):
    """A linen model whose leaves name their dims."""
    names = linen.with_partitioning
    layer = linen.DenseGeneral(
        (2, 4),
        kernel_init=names(jax.nn.initializers.ones, (None, "heads", None)),
        bias_init=names(jax.nn.initializers.zeros, ("heads", None)),
    )
    return layer.init(key, jnp.ones((1, 8)))["params"]


OF_FLAX = {
    "attention of nnx": lambda: nnx_params(attention),
    "a norm over two dims": lambda: nnx_params(OnTwoDims),
    "stacked attention of nnx": lambda: nnx_params(Stacked),
    "boxed leaves of linen": lambda: boxed(jax.random.key(0)),
    "attention of linen": lambda: linen.MultiHeadDotProductAttention(2).init(
        jax.random.key(0), jnp.ones((1, 3, 8))
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", tiered(OF_FLAX, lambda name: "stacked" in name or "boxed" in name))
def test_weights_of_flax_are_decayed_and_its_biases_and_norms_are_not(name):
    mask = dict(leaves_with_paths(so.optimizers.decay_mask(jax.eval_shape(OF_FLAX[name]))))
    assert {path for path, is_decayed in mask.items() if is_decayed} == {
        path for path in mask if "kernel" in path
    }
    assert any("bias" in path for path in mask)


def test_decay_changes_weights_alone():
    params = {
        "blocks": {
            "norm": np.ones((2, 4)),
            "qkv_bias": np.ones((2, 3, 4)),
            "up": np.ones((2, 4, 8)),
        },
        "layers": {"w": np.ones((4, 4)), "scale": np.ones(4)},
    }
    tx = jitted(optax.adamw(0.1, weight_decay=0.5, mask=so.optimizers.decay_mask))
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    changed = {path for path, update in leaves_with_paths(updates) if np.any(update)}
    assert changed == {"blocks/up", "layers/w"}


@pytest.mark.parametrize(
    "blocks",
    [
        [{"w": jnp.ones((4, 4)), "b": jnp.ones(4)}] * 2,
        ({"w": jnp.ones((4, 4)), "b": jnp.ones(4)},),
        {"0": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, "10": {"w": jnp.ones((4, 4))}},
        [jnp.ones((4, 4)), jnp.ones(4)],
    ],
    ids=["list", "tuple", "dict", "arrays"],
)
@pytest.mark.parametrize("prefix", ["", "encoder"])
def test_blocks_of_a_list_are_not_stacked(blocks, prefix):
    params = {prefix: {"blocks": blocks}} if prefix else {"blocks": blocks}
    mask = so.optimizers.decay_mask(params)
    assert mask == jax.tree.map(lambda x: x.ndim > 1, params)


def test_one_stacked_leaf_is_no_weight_if_its_blocks_are_vectors():
    params = {"blocks": jnp.ones((3, 4)), "first_blocks": jnp.ones((3, 4, 4))}
    assert so.optimizers.decay_mask(params) == {"blocks": False, "first_blocks": True}


def test_other_stacks_are_named_by_a_regex():
    params = {
        "encoder": {"norm": jnp.ones((2, 4)), "w": jnp.ones((2, 4, 4))},
        "out": jnp.ones((4, 4)),
    }
    mask = so.optimizers.decay_mask(params, stacked="^encoder/")
    assert mask == {"encoder": {"norm": False, "w": True}, "out": True}
