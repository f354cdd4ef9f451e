"""What the transformations send, read off the compiled program, and how often it really runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardopt as so

T, R = so.transforms, so.reducers
PARAMS = {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}
ELEMENTS = 64 * 8 + 8


def program(tx, mesh, size=4):
    """Return (a jitted step over the stored form of the state, the state).

    All devices have one set of parameters.
    """
    stacked = R.Stacked(tx, "data", size)
    state = stacked.init(PARAMS)
    specs = stacked.specs(state)

    def step(state, grads):
        own = jax.tree.map(lambda g: g[0], grads)
        updates, new = stacked.update(own, state, PARAMS)
        return jax.tree.map(lambda u: u[None], updates), new

    run = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P("data"), specs), check_vma=False
    )
    return jax.jit(run), state


def local_gradients(size=4):
    return jax.tree.map(lambda p: jnp.stack([p * (d + 1) for d in range(size)]), PARAMS)


def counting(calls):
    """A transformation that counts how often a device runs it."""

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_accumulate_talks_once_a_real_step(mesh_of):
    calls = []
    tx = T.accumulate(optax.chain(T.average_gradients("data"), counting(calls), optax.sgd(0.1)), 3)
    step, state = program(tx, mesh_of(data=4))
    grads, seen = local_gradients(), []
    for _ in range(7):
        updates, state = jax.block_until_ready(step(state, grads))
        jax.effects_barrier()
        seen.append((len(calls), float(updates["b"][0, 0])))
    assert [count for count, _ in seen] == [
        0,
        0,
        4,
        4,
        4,
        8,
        8,
    ], "each of four devices, on every third step"
    np.testing.assert_allclose(
        [value for _, value in seen], [0, 0, -0.25, 0, 0, -0.25, 0], rtol=1e-6
    )
    found = so.hlo.audit(step, state, grads, mesh=mesh_of(data=4))
    assert found.total_wire_bytes == R.exact().wire_bytes(PARAMS, 4)
    assert found.collectives
    assert all(one.conditional for one in found.collectives)


def test_local_updates_talk_in_a_branch(mesh_of):
    step, state = program(T.local_updates(optax.adam(0.1), "data", sync_every=4), mesh_of(data=4))
    found = so.hlo.audit(step, state, local_gradients(), mesh=mesh_of(data=4))
    assert found.total_wire_bytes == R.exact().wire_bytes(PARAMS, 4)
    assert all(one.conditional for one in found.collectives)


def test_shard_updates_scatters_and_gathers(mesh_of):
    step, state = program(T.shard_updates(optax.adam(0.1), "data"), mesh_of(data=4))
    found = so.hlo.audit(step, state, local_gradients(), mesh=mesh_of(data=4))
    whole = 4 * ELEMENTS
    assert {kind: traffic.bytes for kind, traffic in found.by_kind().items()} == {
        "reduce-scatter": whole,
        "all-gather": whole,
    }


def test_clipping_sends_a_number(mesh_of):
    tx = T.clip_by_global_norm(1.0, "data", split={"w": True, "b": False})
    step, state = program(tx, mesh_of(data=4))
    found = so.hlo.audit(step, state, local_gradients(), mesh=mesh_of(data=4))
    assert [(one.kind, one.bytes) for one in found.collectives] == [("all-reduce", 4)]


def test_averaging_sends_what_its_reducer_states(mesh_of):
    for reducer in (None, R.int8(), R.error_feedback(R.sign())):
        step, state = program(T.average_gradients("data", reducer), mesh_of(data=4))
        found = so.hlo.audit(step, state, local_gradients(), mesh=mesh_of(data=4))
        assert found.total_wire_bytes == (reducer or R.exact()).wire_bytes(PARAMS, 4)


def test_a_second_step_does_not_compile(mesh_of):
    tx = optax.chain(
        T.accumulate(T.average_gradients("data", R.error_feedback(R.int8())), 2),
        T.delay_gradients(1),
    )
    step, state = program(tx, mesh_of(data=4))
    grads = local_gradients()
    for _ in range(3):
        _, state = jax.block_until_ready(step(state, grads))
    _, state = step(state, grads)
    assert step._cache_size() <= 2, "once for the state as it was made, once as it is returned"
