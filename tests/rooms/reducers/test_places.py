"""One result wherever the axis is bound, whatever the dtype; non-finite gradients stay visible."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so

R = so.reducers
PLAIN = [
    R.exact(),
    R.exact(jnp.bfloat16),
    R.int8(8),
    R.sign(16),
    R.top_k(0.2),
    R.warm_up(R.power_sgd(2), 1),
]
PLAIN.append(R.warm_up(R.top_k(0.2), 1))
REDUCERS = [
    *PLAIN,
    *(R.error_feedback(reducer) for reducer in PLAIN),
]
FED_BACK = REDUCERS[len(PLAIN) :]
by_name = pytest.mark.parametrize("reducer", FED_BACK, ids=lambda reducer: reducer.name)


def tiered_by_name(*names):
    """Return the reducers with error feedback; those with such a name run by default."""

    def is_quick(scheme):
        return any(name in scheme.name for name in names)

    return tiered(FED_BACK, is_quick, ids=lambda scheme: scheme.name)


def mixed(size):
    draw = np.random.default_rng(0)

    def normal(*shape):
        return np.asarray(draw.normal(size=(size, *shape)))

    return {
        "f64": normal(7, 13),
        "f32": normal(5).astype(jnp.float32),
        "scalar": normal().astype(jnp.float32),
        "bf16": normal(3, 3).astype(jnp.bfloat16),
        "f16": normal(4).astype(jnp.float16),
        "empty": normal(0, 4),
        "complex": (normal(4) + 1j * normal(4)).astype(jnp.complex64),
    }


def two_calls(reducer):
    def run(grads):
        state = reducer.init(grads)
        first, state = reducer.reduce(grads, state, "data")
        return first, *reducer.reduce(grads, state, "data")

    return run


@pytest.mark.parametrize("reducer", tiered_by_name("power_sgd"))
def test_vmap_pmap_and_shard_map_agree(reducer, ways, draw_gradients):
    grads = draw_gradients([(7, 3), (5,), ()], 3)
    results = {
        name: jax.tree.map(np.asarray, way(two_calls(reducer), 3)(grads))
        for name, way in ways.items()
    }
    reference = results.pop("vmap")
    for way_result in results.values():
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            way_result,
            reference,
        )


@pytest.mark.parametrize("reducer", tiered_by_name("int8", "top_k")[:-1])
def test_mass_is_conserved_in_every_dtype(reducer, on_devices, x64):
    grads = mixed(3)
    first, second, state = on_devices(two_calls(reducer), 3, grads)
    assert {name: leaf.dtype for name, leaf in first.items()} == {
        name: g.dtype for name, g in grads.items()
    }
    for name, g in grads.items():
        total = 3 * (first[name][0].astype(complex) + second[name][0].astype(complex))
        total += state.memory.value[name].astype(complex).sum(0)
        np.testing.assert_allclose(
            total, 2 * np.asarray(g).astype(complex).sum(0), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("reducer", tiered_by_name("int8", "top_k"))
def test_a_non_finite_gradient_reaches_the_mean_and_no_memory(reducer, ways, draw_gradients):
    # Programs of their own: in one, XLA may compute the same memory twice and round it differently.
    first = ways["vmap"](lambda grads: reducer.reduce(grads, reducer.init(grads), "data")[1], 3)
    later = ways["vmap"](lambda grads, state: reducer.reduce(grads, state, "data"), 3)
    good = draw_gradients([(9, 8), (5,)], 3)
    before = first(good)
    for value, device in itertools.product([np.nan, np.inf, -np.inf], [0, 2]):
        bad = {**good, "leaf0": good["leaf0"].copy()}
        bad["leaf0"][device, 4, 4] = value
        broken, between = later(bad, before)
        assert not np.isfinite(np.asarray(broken["leaf0"])).all()
        jax.tree.map(np.testing.assert_array_equal, between, before)
        assert all(
            np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(later(good, between))
        )


@pytest.mark.parametrize(
    "reducer",
    tiered(
        [R.int8(), R.sign(), R.exact(jnp.bfloat16)],
        lambda scheme: "int8" in scheme.name,
        ids=lambda scheme: scheme.name,
    ),
)
def test_several_axes_are_one(reducer, mesh_of, on_devices, draw_gradients):
    grads = draw_gradients([(5, 3)], 4)["leaf0"]
    over = ("replica", "data")

    def f(g):
        return reducer.reduce(g, (), over)[0]

    spec = P(over)
    placed = jax.jit(
        jax.shard_map(
            lambda g: f(g[0])[None], mesh=mesh_of(replica=2, data=2), in_specs=spec, out_specs=spec
        )
    )
    nested = jax.jit(jax.vmap(jax.vmap(f, axis_name="data"), axis_name="replica"))
    alone = on_devices(lambda g: reducer.reduce(g, (), "data")[0], 4, grads)
    np.testing.assert_allclose(placed(grads), alone, rtol=1e-6)
    np.testing.assert_allclose(nested(grads.reshape(2, 2, 5, 3)).reshape(4, 5, 3), alone, rtol=1e-6)


@by_name
def test_state_is_made_from_shapes_alone(reducer):
    params = {"w": jnp.ones((9, 8), jnp.bfloat16), "b": jnp.ones(3)}
    abstract = jax.eval_shape(reducer.init, jax.eval_shape(lambda: params))
    concrete = reducer.init(params)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    assert [x.shape for x in jax.tree.leaves(abstract)] == [
        x.shape for x in jax.tree.leaves(concrete)
    ]


@by_name
def test_an_empty_tree_is_reduced_without_a_word(reducer, mesh_of):
    def f(x):
        return x, reducer.reduce({}, reducer.init({}), "data")[0]

    mesh = mesh_of(data=4)
    program = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()), check_vma=False)
    )
    assert program(jnp.ones(4))[1] == {}
    assert so.hlo.audit(program, jnp.ones(4), mesh=mesh).collectives == ()
    assert reducer.wire_bytes({}, 4) == 0
