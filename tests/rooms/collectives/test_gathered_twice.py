"""`gathered_twice`: the backward pass gathers again, and everything else is as without it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardopt.collectives._shards import gathered_twice

pytestmark = pytest.mark.fast

SHARDS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "count": np.arange(2)}
X = np.linspace(0, 1, 6, dtype=np.float32).reshape(1, 6)
GATHERED = (6, 3)


def gather(shards):
    return jax.tree.map(lambda x: jnp.concatenate([x, x + x, x * 3]), shards)


def product(weights, x):
    hidden = jax.nn.gelu(x @ weights["w"]) * weights["count"][3]
    return jnp.einsum("bh,dh->bd", hidden, weights["w"])


def scanned(weights, x):
    return jax.lax.scan(lambda x, _: (product(weights, x), None), x, None, 2)[0]


RUNS = {
    "product": product,
    "jit": jax.jit(product),
    "checkpoint": jax.checkpoint(product),
    "scan": scanned,
}


def both(run):
    """The function with the second gather, and without."""
    return gathered_twice(gather, run), lambda shards, x: run(gather(shards), x)


@pytest.mark.parametrize("name", RUNS)
def test_no_gathered_weight_is_kept(name):
    """Each `run` keeps the weight if the gather is differentiated as it is."""
    shapes = []
    for f in both(RUNS[name]):
        _, pull_back = jax.vjp(lambda w, f=f: f({**SHARDS, "w": w}, X), SHARDS["w"])
        shapes.append([leaf.shape for leaf in jax.tree.leaves(pull_back)])
    assert GATHERED in shapes[1]
    assert GATHERED not in shapes[0]


def test_gradients_of_shards_and_inputs_are_those_of_one_gather():
    grads, expected = (
        jax.jit(jax.grad(lambda shards, x, f=f: (f(shards, x) ** 2).sum(), (0, 1), allow_int=True))(
            SHARDS, X
        )
        for f in both(product)
    )
    chex.assert_trees_all_close(
        (grads[0]["w"], grads[1]), (expected[0]["w"], expected[1]), rtol=1e-6
    )


def test_second_derivatives_are_those_of_one_gather():
    def gradient(f, w):
        return jax.grad(lambda w: f({**SHARDS, "w": w}, X).sum())(w)

    second, expected = (
        jax.jit(jax.jacrev(functools.partial(gradient, f)))(SHARDS["w"]) for f in both(product)
    )
    np.testing.assert_allclose(second, expected, rtol=1e-5)


def test_a_result_that_is_not_differentiated_has_no_derivative():
    """A zero times the infinite derivative of the square root would be NaN."""

    def run(weights, x):
        return (x @ weights["w"]).sum(), jnp.sqrt(0 * weights["w"].sum())

    f = gathered_twice(gather, run)
    grads = jax.jit(jax.grad(lambda w: f({**SHARDS, "w": w}, X), has_aux=True))(SHARDS["w"])[0]
    assert np.isfinite(grads).all()
