"""Bad input is refused, and the message says what to do."""

import jax.numpy as jnp
import pytest

import shardopt as so

pytestmark = pytest.mark.fast

average_gradients = so.transforms.average_gradients
CONSTRUCTION = [
    (
        lambda: average_gradients(0),
        TypeError,
        (
            "average_gradients: an axis name is a string or a tuple of strings, got 0.\n"
            'Fix: pass the name of a mesh axis, such as "data".'
        ),
    ),
    (
        lambda: average_gradients("data", so.reducers.int8),
        TypeError,
        (
            "average_gradients: reducer must be a Reducer, got int8.\nFix: pass one such as"
            " so.reducers.int8(), called."
        ),
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), CONSTRUCTION)
def test_bad_arguments_are_refused(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("axis", "axes", "bound"),
    [
        ("data", "axis 'data' is", "axis_name='data'"),
        (
            ("replica", "data"),
            "axis 'replica', 'data' are",
            "axis_name=('replica', 'data')",
        ),
    ],
)
def test_outside_an_axis_it_says_which_to_bind_and_how(axis, axes, bound):
    tx = average_gradients(axis)
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="not bound") as caught:
        tx.update(params, tx.init(params), params)
    assert (
        str(caught.value)
        == f"average_gradients: {axes} not bound here.\nFix: call it inside jax.shard_map over a"
        f" mesh with {axes.removesuffix(' is').removesuffix(' are')} (manual, not left to the"
        f" partitioner), or inside jax.pmap or jax.vmap with {bound}. Under jax.jit, wrap an optax"
        " chain in so.transforms.on_mesh."
    )
