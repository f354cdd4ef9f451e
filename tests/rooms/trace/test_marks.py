"""Marks: an analysis reads the kind, the operands and the data of a function that a layer has
marked.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from shardopt.trace._marks import (
    EXPERTS,
    GROUPED_PRODUCT,
    has_mark,
    mark_of,
    marked,
    marks_in,
    named_values,
)

pytestmark = pytest.mark.fast
WEIGHTS = jnp.ones((3, 4, 4))
X = jnp.ones((2, 4))


def layer(weights, x):
    return marked(EXPERTS, lambda weights, x: jnp.tanh(x @ weights), top_k=2)(weights, x)


TRACED = {
    "alone": lambda: layer(WEIGHTS[0], X),
    "scan": lambda: jax.lax.scan(lambda x, weights: (layer(weights, x), None), X, WEIGHTS)[0],
    "checkpoint": lambda: jax.checkpoint(layer)(WEIGHTS[0], X),
    "vmap": lambda: jax.vmap(layer)(WEIGHTS[:2], X[:, None])[:, 0],
    "jit": lambda: jax.jit(layer)(WEIGHTS[0], X),
}


@pytest.mark.parametrize("form", TRACED)
def test_kind_operands_and_data_are_read_back(form):
    traced = jax.make_jaxpr(TRACED[form])()
    (mark,) = marks_in(traced, EXPERTS)
    assert (mark.kind, mark.data) == (EXPERTS, {"top_k": 2})
    assert [atom.aval.shape[-1] for atom in mark.operands] == [4, 4]
    assert marks_in(traced, GROUPED_PRODUCT) == []


def test_a_gradient_keeps_the_kind():
    traced = jax.make_jaxpr(jax.grad(lambda x: layer(WEIGHTS[0], x).sum()))(X)
    assert {mark.kind for mark in marks_in(traced, EXPERTS)} == {EXPERTS}


def test_a_mark_needs_its_data():
    with pytest.raises(AssertionError):
        marked(EXPERTS, jnp.sin)


def test_other_functions_have_no_mark():
    (call,) = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x))(X).eqns
    assert mark_of(call) is None
    assert not has_mark(call, EXPERTS)


def test_named_values_come_in_order():
    def f(x):
        return jax.checkpoint(lambda x: checkpoint_name(jnp.sin(checkpoint_name(x, "a")), "b"))(
            checkpoint_name(x, "a")
        )

    named = named_values(jax.make_jaxpr(f)(X))
    assert {name: len(values) for name, values in named.items()} == {"a": 2, "b": 1}
