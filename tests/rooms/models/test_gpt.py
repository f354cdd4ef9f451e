"""The GPT reads no later token, starts at a uniform guess and learns. A tensor axis changes
nothing.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.host import host_params
from support.tiers import tiered

import shardopt as so
from shardopt.models import gpt

SMALL = gpt.config(dim=32, num_layers=2, num_heads=4)


@functools.partial(jax.jit, static_argnums=0)
def loss_of(config, params, batch):
    return gpt.model(config).loss_fn(params, batch)


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape)


@functools.partial(jax.jit, static_argnums=1)
def logits(params, config, inputs):
    return gpt.logits_of(config, params, inputs)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_right(tied):
    config = gpt.config(vocab_size=50, dim=24, num_layers=3, num_heads=2, mlp_multiple=2, tied=tied)
    params = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == gpt.num_parameters(config)
    # By hand: an embedding (and a head), three blocks of 4 + 3 * 2 squares and two norms, a last
    # norm.
    assert gpt.num_parameters(config) == 50 * 24 * (1 if tied else 2) + 3 * (10 * 24 * 24 + 48) + 24


@pytest.mark.slow  # contract/test_hybrid_exact.py trains a GPT
@pytest.mark.parametrize("tied", tiered([True, False], lambda tied: not tied))
def test_loss_starts_at_that_of_a_uniform_guess(tied):
    config = gpt.config(dim=256, num_layers=2, tied=tied)
    params = jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0))
    # a larger tied embedding would predict this batch
    repeating = np.repeat(tokens(128, 1), 5, axis=1)
    for batch in (tokens(128, 5), repeating):
        assert abs(loss_of(config, params, {"tokens": batch}) - np.log(256)) < 0.1


def test_logits_see_no_later_token():
    params = host_params(gpt.init, SMALL)
    inputs = jnp.asarray(tokens(1, 12))
    changed = inputs.at[0, 7].set((inputs[0, 7] + 1) % 256)
    before = logits(params, SMALL, inputs)
    after = logits(params, SMALL, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (jnp.abs(before - after).max(axis=(0, 2))[7:] > 1e-5).all()


def test_each_token_is_the_target_of_the_ones_before_it():
    params = host_params(gpt.init, SMALL)
    batch = tokens(2, 9)
    log_probs = jax.nn.log_softmax(logits(params, SMALL, batch[:, :-1]))
    expected = -np.mean([log_probs[b, t, batch[b, t + 1]] for b in range(2) for t in range(8)])
    np.testing.assert_allclose(loss_of(SMALL, params, {"tokens": batch}), expected, rtol=1e-5)


def test_weights_leave_targets_out_and_make_the_loss_a_weighted_mean():
    params = host_params(gpt.init, SMALL)
    batch = tokens(2, 9)
    weights = np.ones((2, 8), np.float32)
    weights[:, 5:] = 0
    masked = loss_of(SMALL, params, {"tokens": batch, "weights": weights})
    assert isinstance(masked, so.losses.Weighted)
    assert masked.weight == 10
    shorter = loss_of(SMALL, params, {"tokens": batch[:, :6]})
    np.testing.assert_allclose(masked.total / masked.weight, shorter, rtol=1e-6)


@pytest.mark.slow
def test_a_few_steps_learn_a_repeating_text():
    model = gpt.model(SMALL)
    tx = optax.adam(3e-3)
    text = np.resize(np.frombuffer(b"the quick brown fox ", np.uint8), (4, 33))
    params = host_params(gpt.init, SMALL)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(model.loss_fn)(params, {"tokens": text})
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    losses = []
    for _ in range(80):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    assert losses[0] > 5.4
    assert losses[-1] < 0.5


@pytest.mark.parametrize(
    ("data", "tensor", "tied"), tiered([(4, 2, True), (2, 4, False)], lambda row: False)
)
def test_a_tensor_axis_changes_no_gradient_and_moves_sums_only(data, tensor, tied):
    config = gpt.config(dim=32, num_layers=2, num_heads=4, tied=tied)
    grad = jax.jit(jax.value_and_grad(gpt.model(config).loss_fn))
    params = host_params(gpt.init, config)
    batch = {"tokens": tokens(8, 17)}
    expected = grad(params, batch)

    mesh = so.make_mesh(data=data, tensor=tensor)
    sharded = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(leaf, NamedSharding(mesh, spec_of(path))), params
    )
    rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
    compiled = grad.lower(sharded, rows).compile()
    for ours, reference in zip(
        jax.tree.leaves(compiled(sharded, rows)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, reference, atol=2e-6, rtol=2e-5)
    collectives = re.findall(
        r" (all-gather|all-to-all|collective-permute|all-reduce)\(", compiled.as_text()
    )
    assert set(collectives) == {"all-reduce"}


def spec_of(path):
    name = "/".join(entry.key for entry in path)
    spec = next((spec for pattern, spec in gpt.rules if re.search(pattern, name)), P())
    return P(None, *spec) if name.startswith("blocks/") else spec


def test_every_large_leaf_has_a_rule():
    params = jax.eval_shape(lambda key: gpt.init(gpt.config(tied=False), key), jax.random.key(0))
    replicated_paths = [
        path for path, _ in jax.tree_util.tree_leaves_with_path(params) if spec_of(path) == P()
    ]
    assert {path[-1].key for path in replicated_paths} == {"norm"}


@pytest.mark.slow  # contract/test_features.py
def test_compute_dtype_is_the_parameters_unless_chosen():
    params = host_params(gpt.init, SMALL)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    chosen = gpt.config(dim=32, num_layers=2, num_heads=4, dtype=jnp.bfloat16)
    batch = {"tokens": tokens(4, 17)}
    assert jax.eval_shape(gpt.model(SMALL).embed, half, batch).x.dtype == jnp.bfloat16
    assert jax.eval_shape(gpt.model(chosen).embed, params, batch).x.dtype == jnp.bfloat16
    full = loss_of(SMALL, params, batch)
    for loss in (loss_of(SMALL, half, batch), loss_of(chosen, params, batch)):
        assert loss.dtype == jnp.float32
        assert 0 < abs(loss - full) < 0.02


def test_double_precision_holds_throughout(x64):
    config = gpt.config(dim=32, num_layers=2, num_heads=4, param_dtype=jnp.float64)
    params = host_params(gpt.init, config)
    batch = {"tokens": tokens(2, 9)}
    assert "f32" not in str(jax.make_jaxpr(gpt.model(config).loss_fn)(params, batch))
    single = loss_of(config, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), batch)
    double = loss_of(config, params, batch)
    assert (single.dtype, double.dtype) == (jnp.float32, jnp.float64)
    np.testing.assert_allclose(single, double, rtol=1e-6)


def test_small_unsigned_tokens_are_read_as_they_are():
    params = host_params(gpt.init, SMALL)
    batch = tokens(4, 17)
    assert batch.max() > 127
    wide, narrow = (
        loss_of(SMALL, params, {"tokens": batch.astype(kind)}) for kind in (np.int32, np.uint8)
    )
    assert wide == narrow


def test_a_token_outside_the_vocabulary_is_not_passed_over():
    params = host_params(gpt.init, SMALL)
    assert jnp.isnan(loss_of(SMALL, params, {"tokens": np.full((2, 9), 256)}))


@pytest.mark.parametrize(
    ("batch", "kind", "got"),
    [
        ({"inputs": tokens(2, 9)}, TypeError, "a dict with ['inputs']"),
        (tokens(2, 9), TypeError, "ndarray"),
        ({"tokens": np.zeros((2, 9), np.float32)}, TypeError, "tokens of float32"),
        ({"tokens": tokens(9)}, ValueError, "tokens of shape (9,)"),
        ({"tokens": tokens(9, 1)}, ValueError, "tokens of shape (9, 1)"),
    ],
)
def test_other_batches_are_refused(batch, kind, got):
    message = (
        "decoder: a batch is a dict with integer tokens [B, T + 1], or tokens and targets [B, T], T at"
        f" least 1; got {got}."
    )
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        gpt.model(SMALL).embed(host_params(gpt.init, SMALL), batch)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"dim": 0, "num_layers": -1},
            (
                "DecoderConfig: 3 fields cannot be used.\n  dim must be positive, got 0\n  num_layers"
                " must be positive, got -1\n  hidden must be positive, got 0"
            ),
        ),
        (
            {"dim": 36, "num_heads": 4},
            (
                "DecoderConfig: 1 field cannot be used.\n  the dims that rotate must be even and the"
                " same in all kinds, got [9]"
            ),
        ),
        (
            {"dim": 34, "num_heads": 4},
            (
                "DecoderConfig: 1 field cannot be used.\n  dim=34 cannot be cut into num_heads=4, so"
                " give head_dim"
            ),
        ),
    ],
)
def test_unusable_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        gpt.config(**sizes)
