"""SOAP equals its paper's algorithm, written plainly in numpy, and has the properties that follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import plain_optimizers as plain
from support.tiers import tiered

import shardopt as so

Matrix = so.optimizers.Matrix


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def run(tx, grads, params=None):
    """Return the updates of all gradients, by one jitted scan, and the last state."""
    params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads) if params is None else params

    def step(state, g):
        update, state = tx.update(g, state, params)
        return state, update

    state, updates = jax.jit(lambda grads: jax.lax.scan(step, tx.init(params), grads))(grads)
    return updates, state


@pytest.mark.parametrize("interval", tiered([1, 4], lambda interval: interval == 4))
def test_soap_is_adam_in_the_eigenbasis_of_shampoo(interval, x64):
    options = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "ridge": 1e-4, "interval": interval}
    grads = draw(12, 5, 3) * np.linspace(0.2, 3, 5)[:, None]
    updates, _ = run(so.optimizers.soap(1.0, **options), jnp.asarray(grads))
    np.testing.assert_allclose(
        -updates, np.stack(list(plain.soap(list(grads), **options))), rtol=1e-9, atol=1e-9
    )


@pytest.mark.slow  # test_soap_is_adam_in_the_eigenbasis_of_shampoo
def test_bases_of_soap_become_eigenvectors(x64):
    mixing = draw(6, 6, seed=1)
    grads = jnp.asarray(np.einsum("ij,tjk->tik", mixing, draw(400, 6, 4)))
    _, state = run(so.optimizers.soap(1.0, b2=0.99, interval=5), grads)
    soap_state = state.inner_states["matrices"].inner_state[0]
    inside = soap_state.left_basis.T @ soap_state.left @ soap_state.left_basis
    scale = jnp.sqrt(jnp.outer(jnp.diag(inside), jnp.diag(inside)))
    assert jnp.abs(inside / scale - jnp.eye(6)).max() < 0.2
    outside = soap_state.left / jnp.sqrt(
        jnp.outer(jnp.diag(soap_state.left), jnp.diag(soap_state.left))
    )
    assert jnp.abs(outside - jnp.eye(6)).max() > 0.5  # the matrix itself is far from diagonal


LEAVES = {
    "plain": ((4, 6), Matrix(), lambda x: [x]),
    "stacked": ((2, 4, 6), Matrix(), list),
    "fused": (
        (2, 4, 3, 2, 3),
        Matrix(rows=1, columns=(3, 4)),
        lambda x: [x[i, :, j].reshape(4, 6) for i in range(2) for j in range(3)],
    ),
    "out": ((2, 2, 3, 4), Matrix(rows=(1, 2), columns=3), lambda x: list(x.reshape(2, 6, 4))),
    "convolution": ((3, 2, 4, 5), Matrix(rows=(0, 1, 2), columns=-1), lambda x: [x.reshape(24, 5)]),
    "long": ((12, 4), Matrix(), lambda x: [x]),
}
RULES = [(f"^{name}$", matrix) for name, (_, matrix, _) in LEAVES.items()]
OPTIMIZERS = {
    "soap": lambda **kw: so.optimizers.soap(0.1, eps=1e-6, interval=2, max_dim=10, **kw),
    "muon": lambda matrices=None: optax.contrib.muon(
        0.1, muon_weight_dimension_numbers=so.optimizers.muon_dimension_numbers(matrices)
    ),
}


@pytest.mark.parametrize("name", tiered(OPTIMIZERS, lambda name: name == "muon"))
def test_each_matrix_of_a_leaf_is_on_its_own_and_what_is_none_goes_to_adamw(name, x64):
    grads = {leaf: draw(5, *shape) for leaf, (shape, *_) in LEAVES.items()}
    adamw_grads = {"norm": draw(5, 2, 4), "scale": draw(5)}
    rules = [*RULES, ("^norm$", None)]
    updates, state = run(OPTIMIZERS[name](matrices=rules), grads | adamw_grads)
    updates = jax.device_get(updates)
    matrix_grads = {
        leaf: [np.stack(g) for g in zip(*map(LEAVES[leaf][2], x), strict=True)]
        for leaf, x in grads.items()
    }
    expected, _ = run(OPTIMIZERS[name](), matrix_grads)
    for leaf, matrices in expected.items():
        stacked_updates = [
            np.stack(g) for g in zip(*map(LEAVES[leaf][2], updates[leaf]), strict=True)
        ]
        for a, b in zip(stacked_updates, matrices, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9, err_msg=leaf)
    adam = {"soap": (0.95, 0.95, 1e-6), "muon": (0.9, 0.999, 1e-8)}[name]
    plain_adam, _ = run(
        optax.adamw(0.1, *adam, weight_decay=0.0, nesterov=name == "muon"), adamw_grads
    )
    for leaf in adamw_grads:
        np.testing.assert_allclose(updates[leaf], plain_adam[leaf], atol=1e-12)
    if name != "muon":
        matrix_state = state.inner_states["matrices"].inner_state[0]
        assert matrix_state.nu["fused"].shape == (2, 4, 3, 2, 3)
        assert (matrix_state.left["fused"].shape, matrix_state.right["fused"].shape) == (
            (2, 3, 4, 4),
            (2, 3, 6, 6),
        )
        assert matrix_state.left["long"] is None
        assert matrix_state.right["long"].shape == (4, 4)
        assert matrix_state.left["convolution"] is None


def test_hyperparameters_can_be_injected_and_halves_are_kept_in_floats():
    grads = {
        "w": np.asarray(draw(4, 6, 4), jnp.bfloat16),
        "dead": np.zeros((4, 3, 3), jnp.bfloat16),
    }
    injected = optax.inject_hyperparams(so.optimizers.soap, static_args=("max_dim",))(
        learning_rate=0.1, interval=2, b2=0.9
    )
    updates, state = jax.device_get(run(injected, grads))
    expected, _ = run(so.optimizers.soap(0.1, interval=2, b2=0.9), grads)
    for leaf in grads:
        np.testing.assert_allclose(
            np.asarray(updates[leaf], np.float32),
            np.asarray(expected[leaf], np.float32),
            rtol=0.02,
            atol=1e-4,
        )
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    matrix_state = state.inner_state.inner_states["matrices"].inner_state[0]
    assert {x.dtype for x in jax.tree.leaves(matrix_state)} == {
        jnp.dtype(jnp.float32),
        jnp.dtype(jnp.int32),
    }
    assert not np.asarray(updates["dead"], np.float32).any()
    assert np.isfinite(np.asarray(updates["w"], np.float32)).all()
    assert np.asarray(updates["w"][1:], np.float32).any()
