"""State that differs between devices: stored, seen from inside, carried to another axis size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so

R = so.reducers


def chain():
    return optax.chain(
        so.transforms.average_gradients("data", R.error_feedback(R.top_k(0.3))),
        optax.sgd(0.1, momentum=0.9),
    )


def stored_step(stacked, mesh, params, state):
    """Return a step over the stored form, jitted."""
    specs = stacked.specs(state)

    def step(state, grads):
        return stacked.update(jax.tree.map(lambda g: g[0], grads), state, params)

    shard = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs), check_vma=False
    )
    return jax.jit(shard)


@pytest.mark.slow  # test_a_change_of_axis_size_loses_nothing
def test_the_stored_form_goes_in_and_out_of_shard_map(mesh_of, draw_gradients):
    """Two steps through it equal two steps that never left the axis."""
    grads = draw_gradients([(4, 3), (5,)], 4)
    tx = chain()
    params = jax.tree.map(lambda g: g[0], grads)
    stacked = so.transforms.on_mesh(tx, mesh_of(data=4), "data")
    state = stacked.init(params)
    step = stored_step(stacked, mesh_of(data=4), params, state)
    update_history = []
    for _ in range(2):
        updates, state = step(state, grads)
        update_history.append(updates)

    def inside(g):
        first_update, device_state = tx.update(g, tx.init(params), params)
        two, device_state = tx.update(g, device_state, params)
        return [first_update, two], device_state

    expected, device_state = jax.jit(jax.vmap(inside, axis_name="data"))(grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b[0], rtol=1e-6), update_history, expected
    )
    memory = state[0].reducer.memory.value
    expected_memory = device_state[0].reducer.memory.value
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), memory, expected_memory
    )
    assert memory["leaf0"].sharding.spec == P("data")
    assert memory["leaf0"].addressable_shards[0].data.shape == (1, 4, 3)


def test_abstract_parameters_give_the_shapes_of_the_state(mesh_of):
    stacked = so.transforms.on_mesh(chain(), mesh_of(data=4), "data")
    state = jax.jit(stacked.init)({"w": jnp.ones((4, 3))})
    abstract = jax.eval_shape(stacked.init, {"w": jnp.ones((4, 3))})
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(abstract)]
    assert jax.tree.leaves(state)[0].shape == (4, 4, 3)


def test_the_mesh_and_the_axis_of_a_stacked_state_are_checked(mesh_of):
    with pytest.raises(TypeError, match=r"^on_mesh: mesh must be a jax\.sharding\.Mesh, got 4\.$"):
        so.transforms.on_mesh(chain(), 4, "data")
    with pytest.raises(ValueError, match=r"^on_mesh: the mesh has no axis 'rows'"):
        so.transforms.on_mesh(chain(), mesh_of(data=4), "rows")


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 8), (3, 1)])
def test_a_change_of_axis_size_loses_nothing(
    before, after, x64, on_devices, draw_gradients, mesh_of
):
    """Gradients that were fed in before, and not sent, add to the mean over the new axis."""
    reducer = R.error_feedback(R.top_k(0.2))
    old = draw_gradients([(7, 3), ()], before, dtype=np.float64)
    new = draw_gradients([(7, 3), ()], after, seed=1, dtype=np.float64)
    first, state = on_devices(lambda g: reducer.reduce(g, reducer.init(g), "data"), before, old)
    state = so.transforms.on_mesh(chain(), mesh_of(data=after), "data").resized(state)
    second, state = on_devices(lambda g, state: reducer.reduce(g, state, "data"), after, new, state)
    for name in old:
        unsent_mean = state.memory.value[name].mean(0)
        total = np.asarray(old[name]).mean(0) + np.asarray(new[name]).mean(0)
        np.testing.assert_allclose(
            first[name][0] + second[name][0] + unsent_mean, total, rtol=1e-12, atol=1e-12
        )


def test_other_state_is_carried_as_it_is(mesh_of):
    state = {
        "count": jnp.int32(3),
        "mu": jnp.ones(5),
        "memory": R.ErrorFeedback({"w": jnp.arange(6.0).reshape(2, 3)}),
    }
    resized = so.transforms.on_mesh(chain(), mesh_of(data=4), "data").resized(state)
    assert resized["count"] == 3
    assert resized["mu"].shape == (5,)
    np.testing.assert_array_equal(resized["memory"].value["w"], np.tile([1.5, 2.5, 3.5], (4, 1)))


def test_optax_finds_the_parts_that_are_like_parameters():
    """`tree_map_params` initialises with placeholders; strategies place optimizer state by it."""
    for reducer in (R.error_feedback(R.power_sgd(2)), R.error_feedback(R.top_k())):
        tx = so.transforms.average_gradients("data", reducer)
        state = tx.init({"w": jnp.ones((9, 9)), "b": jnp.ones(3)})
        marked = optax.tree_map_params(
            tx, lambda _: "like", state, transform_non_params=lambda _: "other"
        )
        assert jax.tree.leaves(marked.reducer.memory.value) == ["like", "like"]
