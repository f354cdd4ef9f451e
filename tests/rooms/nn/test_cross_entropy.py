"""Cross-entropy by chunks: the same numbers and gradients, without the logits of every position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import tiered

import shardopt as so

B, T, D, V = 2, 24, 8, 512
X, HEAD = jax.random.normal(jax.random.key(0), (B, T, D)), jax.random.normal(jax.random.key(1), (V, D))
TARGETS = jax.random.randint(jax.random.key(2), (B, T), 0, V)
WEIGHTS = np.linspace(0, 1, B * T).reshape(B, T).astype(np.float32)


def mean(x, head, chunk):
    return jnp.mean(so.nn.cross_entropy(x, head, TARGETS, chunk=chunk) * WEIGHTS)


@pytest.mark.parametrize("chunk", tiered([None, 1, 7, 8, 24, 100], lambda chunk: chunk in (7, 8, 100)))
def test_it_is_minus_the_log_probability_of_the_target(chunk):
    log_probs = jax.nn.log_softmax(X @ HEAD.T)
    expected = -jnp.take_along_axis(log_probs, TARGETS[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(so.nn.cross_entropy(X, HEAD, TARGETS, chunk=chunk), expected, rtol=1e-5, atol=1e-5)
    found, whole = (jax.jit(jax.grad(mean, (0, 1)), static_argnums=2)(X, HEAD, one) for one in (chunk, None))
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_logits_of_one_chunk_are_held():
    def temporary(chunk):
        compiled = jax.jit(jax.grad(lambda x, head: mean(x, head, chunk), (0, 1))).lower(X, HEAD).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(None) - temporary(4) > 4 * B * (T - 4) * V


@pytest.mark.parametrize("chunk", [None, 7])
def test_logits_are_rounded_where_that_is_asked_for(chunk):
    logits = jnp.einsum("btd,vd->btv", X, HEAD).astype(jnp.bfloat16)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), TARGETS[..., None], axis=-1)[..., 0]
    found = so.nn.cross_entropy(X, HEAD, TARGETS, chunk=chunk, logits_dtype=jnp.bfloat16)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(found - so.nn.cross_entropy(X, HEAD, TARGETS)).max() > 1e-3


def test_of_what_is_as_large_as_logits_only_rounded_ones_are_kept():
    _, kept = jax.vjp(lambda x: so.nn.cross_entropy(x, HEAD, TARGETS, logits_dtype=jnp.bfloat16), X)
    assert [x.dtype for x in jax.tree.leaves(kept) if x.size == B * T * V] == [jnp.bfloat16]


def test_refusals():
    with pytest.raises(ValueError, match=r"^cross_entropy: chunk must be at least 1"):
        so.nn.cross_entropy(X, HEAD, TARGETS, chunk=0)
