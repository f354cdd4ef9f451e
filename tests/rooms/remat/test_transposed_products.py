"""A product that is transposed becomes the product the other way round, with the same result.

Everything else stays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardopt.remat._split_backward import without_transposes

DRAW = np.random.default_rng(0)
A = DRAW.normal(size=(2, 3, 4, 5))
B = DRAW.normal(size=(2, 4, 6, 7))
HIGH_LOW = (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)


def product(a, b):
    """[2, 3, 5, 6, 7], of one batch dim: two dims of a, two of b."""
    return jax.lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), precision=HIGH_LOW)


def swapped(a, b):
    return product(a, b).transpose(0, 3, 4, 1, 2)


def no_batch(a, b):
    return jnp.tensordot(a[0], b[0], axes=((1,), (0,))).transpose(2, 3, 0, 1)


def in_checkpoint(a, b):
    return jax.checkpoint(lambda a, b: jnp.sin(swapped(a, b)))(a, b).sum(1)


def dims_of_b_in_another_order(a, b):
    return product(a, b).transpose(0, 4, 3, 1, 2)


def batch_behind(a, b):
    return product(a, b).transpose(3, 4, 0, 1, 2)


def read_twice(a, b):
    y = product(a, b)
    return y.transpose(0, 3, 4, 1, 2), y


def returned_twice(a, b):
    y = swapped(a, b)
    return y, y + 1


@pytest.mark.parametrize(
    ("f", "transposes"),
    [
        (swapped, 0),
        (no_batch, 0),
        (in_checkpoint, 0),
        (returned_twice, 0),
        (dims_of_b_in_another_order, 1),
        (batch_behind, 1),
        (read_twice, 1),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_only_transposes_that_a_product_cannot_take_are_left(f, transposes, x64):
    closed = jax.make_jaxpr(f)(A, B)
    new_jaxpr = without_transposes(closed.jaxpr)
    assert str(closed.jaxpr).count("transpose[") == 1
    assert (str(new_jaxpr).count("transpose["), str(new_jaxpr).count("dot_general[")) == (
        transposes,
        1,
    )
    results = jax.core.eval_jaxpr(new_jaxpr, closed.consts, A, B)
    for a, b in zip(results, jax.tree.leaves(f(A, B)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_each_keeps_its_precision():
    new_jaxpr = without_transposes(jax.make_jaxpr(swapped)(A, B).jaxpr)
    assert new_jaxpr.eqns[0].params["precision"] == HIGH_LOW[::-1]
    assert new_jaxpr.eqns[0].invars == new_jaxpr.invars[::-1]


def test_where_the_result_lies_follows_its_dims():
    """Under `shard_map` the product of a gradient says it."""
    mesh = jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("one"))
    a = A[0, 0].T
    b = B[0, :, :, 0]
    with jax.set_mesh(mesh):
        closed = jax.make_jaxpr(lambda a, b: jax.lax.dot(a, b, out_sharding=rows).T)(a, b)
        new_jaxpr = without_transposes(closed.jaxpr)
        assert new_jaxpr.eqns[0].params["out_sharding"].spec == jax.sharding.PartitionSpec(
            None, "one"
        )
        assert jax.eval_shape(
            lambda *args: jax.core.eval_jaxpr(new_jaxpr, closed.consts, *args), a, b
        )[0].shape == (6, 5)
