"""Bad input is refused, and the message says what to do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so

pytestmark = pytest.mark.fast

T = so.transforms
SGD = optax.sgd(0.1)
CONSTRUCTION = [
    (
        lambda: T.average_gradients(0),
        TypeError,
        (
            "average_gradients: an axis name is a string or a tuple of strings, got 0.\n"
            'Fix: pass the name of a mesh axis, such as "data".'
        ),
    ),
    (
        lambda: T.average_gradients("data", so.reducers.int8),
        TypeError,
        (
            "average_gradients: reducer must be a Reducer, got int8.\nFix: pass one such as"
            " so.reducers.int8(), called."
        ),
    ),
    (
        lambda: T.shard_updates(optax.adam, "data"),
        TypeError,
        (
            "shard_updates: inner must be an optax.GradientTransformation, got adam.\n"
            "Fix: pass a transformation such as optax.adamw(1e-3), called, not the function itself."
        ),
    ),
    (lambda: T.accumulate(SGD, 0), ValueError, "accumulate: every must be at least 1, got 0."),
    (
        lambda: T.accumulate(SGD, 2.5),
        TypeError,
        "accumulate: every must be an integer, got 2.5 (float).",
    ),
    (
        lambda: T.local_updates(SGD, "data", 0),
        ValueError,
        "local_updates: sync_every must be at least 1, got 0.",
    ),
    (
        lambda: T.delay_gradients(-1),
        ValueError,
        "delay_gradients: staleness must be at least 0, got -1.",
    ),
    (
        lambda: T.delay_gradients(True),
        TypeError,
        "delay_gradients: staleness must be an integer, got True (bool).",
    ),
    (
        lambda: T.delay_gradients(1, "adaptive"),
        TypeError,
        (
            "delay_gradients: rule must be a DelayRule, got 'adaptive'.\nFix: pass"
            " so.transforms.staleness_learning_rate(), so.transforms.delay_compensation(), or a"
            " DelayRule."
        ),
    ),
    (
        lambda: T.delay_gradients(1, T.staleness_learning_rate()),
        ValueError,
        (
            "delay_gradients: the rule scales the updates of an optimizer, and there is none.\nFix:"
            " pass the optimizer as inner, such as delay_gradients(2, rule,"
            " inner=optax.adamw(1e-3))."
        ),
    ),
    (
        lambda: T.delay_gradients(1, inner=optax.sgd),
        TypeError,
        (
            "delay_gradients: inner must be an optax.GradientTransformation, got sgd.\n"
            "Fix: pass a transformation such as optax.adamw(1e-3), called, not the function itself."
        ),
    ),
    (
        lambda: optax.inject_hyperparams(T.delay_gradients)(staleness=2).init(jnp.ones(3)),
        TypeError,
        (
            "delay_gradients: staleness must be a Python integer: it shapes the state.\n"
            'Fix: under optax.inject_hyperparams, add static_args=("staleness",).'
        ),
    ),
    (
        lambda: T.delay_compensation("a lot"),
        TypeError,
        "delay_compensation: strength must be a number, got 'a lot' (str).",
    ),
    (
        lambda: T.clip_by_global_norm(0, "data"),
        ValueError,
        "clip_by_global_norm: max_norm must be above 0, got 0.",
    ),
    (
        lambda: T.clip_by_global_norm("1", "data"),
        TypeError,
        "clip_by_global_norm: max_norm must be a number, got '1' (str).",
    ),
    (
        lambda: T.clip_by_global_norm(1.0, "data", split={"w": "data"}),
        TypeError,
        "clip_by_global_norm: split must be True, False or a tree of PartitionSpecs.\n  'data'",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), CONSTRUCTION)
def test_bad_arguments(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


NEED_AN_AXIS = {
    "average_gradients": T.average_gradients("data"),
    "shard_updates": T.shard_updates(SGD, "data"),
    "clip_by_global_norm": T.clip_by_global_norm(1.0, "data", split=True),
    "local_updates": T.local_updates(SGD, "data", 2),
}


@pytest.mark.parametrize("who", NEED_AN_AXIS)
def test_outside_an_axis_it_says_which_to_bind_and_how(who):
    tx, params = NEED_AN_AXIS[who], {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="not bound") as caught:
        tx.update(params, tx.init(params), params)
    assert (
        str(caught.value)
        == f"{who}: axis 'data' is not bound here.\nFix: call it inside jax.shard_map over a mesh"
        " with axis 'data' (manual, not left to the partitioner), or inside jax.pmap or"
        " jax.vmap with axis_name='data'."
    )


def test_several_axes_are_named_together():
    tx = T.average_gradients(("replica", "data"))
    with pytest.raises(ValueError, match="not bound") as caught:
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
    assert (
        str(caught.value)
        == "average_gradients: axis 'replica', 'data' are not bound here.\nFix: call it inside"
        " jax.shard_map over a mesh with axis 'replica', 'data' (manual, not left to the"
        " partitioner), or inside jax.pmap or jax.vmap with axis_name=('replica', 'data')."
    )


def updated(tx, grads, params=None):
    return jax.vmap(lambda g: tx.update(g, tx.init(g), params)[0], axis_name="data")(grads)


INSIDE = [
    (
        lambda: updated(T.local_updates(SGD, "data", 2), jnp.ones((2, 3))),
        ValueError,
        "local_updates: update needs the parameters.\nFix: call update(grads, state, params).",
    ),
    (
        lambda: updated(T.delay_gradients(2, T.delay_compensation()), jnp.ones((2, 3))),
        ValueError,
        "delay_gradients: update needs the parameters.\nFix: call update(grads, state, params).",
    ),
    (
        lambda: updated(T.clip_by_global_norm(1.0, "data"), jnp.ones((2, 3))),
        ValueError,
        (
            "clip_by_global_norm: nothing says which leaves are split over the axis and which are"
            " whole: types do not tell it here.\nFix: pass split=True, False, or the PartitionSpecs"
            " of the leaves; or use shard_map with check_vma=True."
        ),
    ),
    (
        lambda: updated(
            T.clip_by_global_norm(1.0, "data", split={"v": P()}), {"w": jnp.ones((2, 3))}
        ),
        ValueError,
        (
            "clip_by_global_norm: split is neither like the gradients nor a prefix of their tree.\n"
            "Fix: give it the specs that shard_map has for them."
        ),
    ),
    (
        lambda: updated(T.accumulate(SGD, 2), {"n": jnp.ones((2, 3), jnp.int32)}),
        TypeError,
        (
            "accumulate: 1 leaf cannot be reduced: a mean needs floating or complex arrays.\n"
            "  n: int32\nFix: leave such leaves out, for instance with optax.masked."
        ),
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), INSIDE)
def test_bad_updates(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


MIXERS = {
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=5), "reduce_sum"),
    "lamb": (optax.lamb(0.1), "reduce_sum"),
    "global norm": (optax.clip_by_global_norm(1.0), "reduce_sum"),
    "centralized": (optax.centralize(), "reduce_sum"),
    "skips": (optax.apply_if_finite(SGD, 3), "reduce_and"),
}


@pytest.mark.parametrize("name", MIXERS)
def test_what_mixes_elements_is_not_sharded(name):
    inner, primitives = MIXERS[name]
    tx, params = T.shard_updates(inner, "data"), {"w": jnp.ones((4, 4))}
    run = jax.vmap(lambda g: tx.update(g, tx.init(params), params)[0], axis_name="data")
    with pytest.raises(ValueError, match="mixes") as caught:
        run({"w": jnp.ones((2, 4, 4))})
    assert (
        str(caught.value)
        == f"shard_updates: inner mixes elements of a leaf ({primitives}), which means something"
        " else on a shard of it.\nFix: use so.zero, which runs any optimizer; or one that works"
        " element by element, with so.transforms.clip_by_global_norm(..., split=True) inside of"
        " it for clipping."
    )


def test_a_spec_over_an_axis_that_was_not_named(mesh_of):
    tx = T.clip_by_global_norm(1.0, "data", split=P("replica", "data"))
    run = jax.shard_map(
        lambda g: tx.update(g, ())[0],
        mesh=mesh_of(replica=2, data=2),
        in_specs=P("replica", "data"),
        out_specs=P("replica", "data"),
    )
    with pytest.raises(ValueError, match="not among") as caught:
        run(jnp.ones((4, 4)))
    assert (
        str(caught.value).split("splits over")[1]
        == " 'replica', which is not among axis_names=('data',).\nFix: name every axis that leaves"
        " are split over."
    )


def test_a_whole_leaf_that_was_said_to_be_split(mesh_of):
    tx = T.clip_by_global_norm(1.0, "data", split=True)
    run = jax.shard_map(
        lambda g: tx.update(g, ())[0], mesh=mesh_of(data=2), in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match="cannot be") as caught:
        run({"w": jnp.ones((4, 4))})
    assert (
        str(caught.value)
        == "clip_by_global_norm: 1 leaf said to be split by split= cannot be: its type does not"
        " vary.\n  w: split over ('data',)\nFix: say what is whole, or leave split= out."
    )


def test_gradients_unlike_the_parameters():
    tx = T.accumulate(SGD, 2)
    with pytest.raises(ValueError, match="another shape") as caught:
        tx.update({"w": jnp.ones(3)}, tx.init({"w": jnp.ones(2)}))
    assert (
        str(caught.value)
        == "accumulate: 1 gradient leaf has another shape than the parameters that init saw.\n  w:"
        " (3,), was (2,)"
    )
