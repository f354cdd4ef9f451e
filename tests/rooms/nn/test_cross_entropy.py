"""Cross-entropy by chunks: the same numbers and gradients, without the logits of every position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import tiered

import shardopt as so

B = 2
T = 24
D = 8
V = 512
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(B, T, D)).astype(np.float32)
HEAD = DRAW.normal(size=(V, D)).astype(np.float32)
TARGETS = DRAW.integers(0, V, (B, T))
WEIGHTS = np.linspace(0, 1, B * T).reshape(B, T).astype(np.float32)


def mean(x, head, chunk):
    losses = so.nn.cross_entropy(x, head, TARGETS, chunk=chunk)
    return jnp.mean(losses * WEIGHTS), losses


gradients = jax.jit(jax.grad(mean, (0, 1), has_aux=True), static_argnums=2)


def minus_log_probability(logits):
    """Return that of each target, in numpy."""
    logits = np.asarray(logits, np.float64)
    at_target = np.take_along_axis(logits, TARGETS[..., None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - at_target


@pytest.mark.parametrize("chunk", tiered([None, 1, 7, 8, 24, 100], lambda chunk: chunk in (7, 100)))
def test_it_is_minus_the_log_probability_of_the_target(chunk):
    chunk_gradients, losses = gradients(X, HEAD, chunk)
    np.testing.assert_allclose(losses, minus_log_probability(X @ HEAD.T), rtol=1e-5, atol=1e-5)
    for a, b in zip(chunk_gradients, gradients(X, HEAD, None)[0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_logits_of_one_chunk_are_held():
    def temporary(chunk):
        compiled = (
            jax.jit(jax.grad(lambda x, head: mean(x, head, chunk)[0], (0, 1)))
            .lower(X, HEAD)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(None) - temporary(4) > 4 * B * (T - 4) * V


@pytest.mark.parametrize("chunk", [None, 7])
def test_logits_are_rounded_where_that_is_asked_for(chunk):
    logits = X @ HEAD.T
    run = functools.partial(so.nn.cross_entropy, chunk=chunk, logits_dtype=jnp.bfloat16)
    losses = jax.jit(run)(X, HEAD, TARGETS)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(
        losses, minus_log_probability(logits.astype(jnp.bfloat16)), rtol=1e-5, atol=1e-5
    )
    assert np.abs(losses - minus_log_probability(logits)).max() > 1e-3


def test_only_rounded_logits_are_kept():
    _, residuals = jax.vjp(
        lambda x: so.nn.cross_entropy(x, HEAD, TARGETS, logits_dtype=jnp.bfloat16), X
    )
    assert [x.dtype for x in jax.tree.leaves(residuals) if x.size == B * T * V] == [jnp.bfloat16]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"^cross_entropy: chunk must be at least 1"):
        so.nn.cross_entropy(X, HEAD, TARGETS, chunk=0)
