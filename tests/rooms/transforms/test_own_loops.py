"""Links in a loop of one's own: no state shares a buffer, devices agree, and misuse is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so

T, R = so.transforms, so.reducers
LINKS = {
    "skip_anomalies": lambda: T.skip_anomalies(optax.adam(0.1)),
    "accumulate": lambda: T.accumulate(optax.adam(0.1), 2),
    "average_params": lambda: T.average_params(0.9),
    "delay_gradients": lambda: T.delay_gradients(2),
    "delay_compensation": lambda: T.delay_gradients(2, T.delay_compensation(0.1)),
    "eight_bit": lambda: T.eight_bit(optax.adam(0.1), min_elements=8),
    "local_updates": lambda: T.local_updates(optax.adam(0.1), "data", 2),
    "stochastic_round": lambda: T.stochastic_round(optax.adam(0.1), seed=0),
    "exact": lambda: T.average_gradients("data"),
    "error_feedback": lambda: T.average_gradients("data", R.error_feedback(R.int8())),
    "warm_up": lambda: T.average_gradients("data", R.error_feedback(R.warm_up(R.sign(), 2))),
    "top_k": lambda: T.average_gradients("data", R.error_feedback(R.top_k(density=0.5))),
    "momentum_top_k": lambda: T.average_gradients("data", R.top_k(density=0.5, momentum=0.9)),
    "power_sgd": lambda: T.average_gradients("data", R.error_feedback(R.power_sgd(rank=2))),
    "soap": lambda: so.optimizers.soap(0.1),
    "shampoo": lambda: so.optimizers.shampoo(0.1),
}
"""Links whose `init` needs no axis."""


@pytest.mark.parametrize("name", LINKS)
def test_a_state_has_a_buffer_for_each_leaf_so_that_it_can_be_donated(name):
    params = {"w": jnp.ones((8, 16)), "b": jnp.ones(16)}
    leaves = jax.tree.leaves((LINKS[name]().init(params), params))
    addresses = [
        leaf.unsafe_buffer_pointer()
        for leaf in leaves
        if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    assert len(addresses) == len(set(addresses))


def test_a_donated_state_of_eight_devices_takes_steps(mesh_of):
    mesh = mesh_of(data=8)
    tx = T.skip_anomalies(optax.adam(0.1), loss_z=None)
    place = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, P()))
    params = {"w": jnp.ones((8, 16))}

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    params, state = place(params), jax.device_put(tx.init(params), jax.NamedSharding(mesh, P()))
    for _ in range(3):
        params, state = step(params, state)
    assert np.isfinite(params["w"]).all()


GRADIENTS = {
    "nan": [1.0, 1.0, np.nan, 1.0],
    "infinite": [np.inf, 1.0, 1.0, 1.0],
    "spike": [1.0, 1.0, 1.0, 1e4],
    "none": [1.0, 1.1, 0.9, 1.0],
}


@pytest.mark.parametrize("way", ["pmap", "shard_map", "checked shard_map", "vmap"])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_devices_decide_alike_although_each_sees_its_own_gradients(kind, way, ways):
    chain = optax.chain(T.average_gradients("data"), optax.sgd(0.1, momentum=0.9))
    tx = T.skip_anomalies(chain, window=4)

    def run(gradients, losses):
        params = jnp.ones(3)
        state = tx.init(params)
        for step in range(5):
            gradient = jnp.full(3, jnp.where(step < 4, 1 + 0.1 * step, gradients))
            updates, state = tx.update(gradient, state, params, value=losses + 0.01 * step)
            params = params + updates
        return params, state.num_skipped, state.norms, state.losses

    losses = np.float32([1.0, 1.2, 0.9, 1.1])
    results = ways[way](run, 4)(np.float32(GRADIENTS[kind]), losses)
    for result in jax.tree.leaves(results):
        np.testing.assert_array_equal(result, np.broadcast_to(result[:1], result.shape))
    assert np.isfinite(results[0]).all()
    assert results[1][0] == (kind != "none")


def losses_of_devices(kind):
    return {"nan": [1.0, np.nan], "infinite": [np.inf, 1.0], "spike": [1e4, 1.0]}[kind]


@pytest.mark.parametrize("kind", ["nan", "infinite", "spike"])
def test_the_loss_of_one_device_makes_all_devices_skip(kind, ways):
    tx = T.skip_anomalies(optax.sgd(1.0), window=2)

    def run(loss):
        state = tx.init(jnp.ones(2))
        for step in range(3):
            value = jnp.where(step < 2, 1.0, loss)
            _, state = tx.update(jnp.ones(2), state, value=value)
        return state.num_skipped

    skipped = ways["pmap"](run, 2)(np.float32(losses_of_devices(kind)))
    np.testing.assert_array_equal(skipped, [1, 1])


# What a loop may do with a state that differs between devices.

PER_DEVICE = {
    "error_feedback": lambda: T.average_gradients("data", R.error_feedback(R.int8())),
    "sign": lambda: T.average_gradients("data", R.error_feedback(R.sign())),
    "top_k": lambda: T.average_gradients("data", R.top_k(density=0.5, momentum=0.9)),
    "power_sgd": lambda: T.average_gradients("data", R.error_feedback(R.power_sgd(rank=1))),
    "shard_updates": lambda: T.shard_updates(optax.adam(0.1), "data"),
    "in a chain": lambda: optax.chain(
        T.skip_anomalies(T.shard_updates(optax.adam(0.1), "data"), loss_z=None)
    ),
}
SIZE = 4


def gradients_of_devices():
    return {"w": np.random.default_rng(0).normal(size=(SIZE, 8, 4)).astype(np.float32)}


@pytest.mark.parametrize("name", PER_DEVICE)
def test_a_state_that_was_unreplicated_and_replicated_gives_nan_at_the_next_step(name):
    tx, grads = PER_DEVICE[name](), gradients_of_devices()
    devices = jax.devices()[:SIZE]
    init = jax.pmap(tx.init, axis_name="data", devices=devices)
    update = jax.pmap(
        lambda grads, state, params: tx.update(grads, state, params)[:2],
        axis_name="data",
        devices=devices,
    )
    params = jax.tree.map(np.zeros_like, grads)
    updates, state = update(grads, init(params), params)
    assert np.isfinite(updates["w"]).all()
    own_updates, _ = update(grads, state, params)
    assert np.isfinite(own_updates["w"]).all()
    of_device_0 = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), jax.device_get(state))
    updates, _ = update(grads, of_device_0, params)
    assert np.isnan(updates["w"]).any(axis=(1, 2)).tolist() == [False, True, True, True]


@pytest.mark.parametrize("name", ["error_feedback", "sign", "top_k", "power_sgd"])
def test_a_state_made_outside_of_the_axis_and_replicated_takes_its_first_step(name):
    tx, grads = PER_DEVICE[name](), gradients_of_devices()
    params = jax.tree.map(lambda x: np.zeros_like(x[0]), grads)
    replicated = jax.tree.map(lambda x: np.stack([x] * SIZE), (tx.init(params), params))
    update = jax.pmap(
        lambda grads, state, params: tx.update(grads, state, params),
        axis_name="data",
        devices=jax.devices()[:SIZE],
    )
    updates, _ = update(grads, *replicated)
    assert np.isfinite(updates["w"]).all()


@pytest.mark.parametrize("name", PER_DEVICE)
def test_a_stored_state_that_is_not_taken_apart_is_refused(name, mesh_of):
    tx = PER_DEVICE[name]()
    stacked = R.Stacked(tx, "data", axis_size=8)
    params = {"w": np.zeros((8, 4), np.float32)}
    state = stacked.init(params)
    specs = stacked.specs(state)

    def local(grads, state, params):
        return tx.update(jax.tree.map(lambda x: x[0], grads), state, params)

    step = jax.shard_map(
        local, mesh=mesh_of(data=8), in_specs=(P("data"), specs, P()), out_specs=(P(), specs)
    )
    grads = {"w": np.ones((8, 8, 4), np.float32)}
    with pytest.raises(
        ValueError, match=r"(?s)not in the form of one device.*so\.reducers\.Stacked"
    ):
        step(grads, state, params)


AVERAGED = {
    "average_gradients": lambda: T.average_gradients("data"),
    "int8": lambda: T.average_gradients("data", R.int8()),
    "shard_updates": lambda: T.shard_updates(optax.sgd(0.1), "data"),
    "local_updates": lambda: T.local_updates(optax.sgd(0.1), "data", 2),
}


@pytest.mark.parametrize("name", AVERAGED)
@pytest.mark.parametrize("averaged_by", ["jax", "pmean", "link"])
def test_gradients_that_are_averaged_already_are_refused_with_both_reasons(
    name, averaged_by, mesh_of
):
    tx = AVERAGED[name]()
    if averaged_by == "link":
        tx = optax.chain(T.average_gradients("data"), tx)

    def local(params, x):
        if averaged_by != "jax":
            params = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda params: (params * x[0]).sum())(params)
        if averaged_by == "pmean":
            grads = jax.lax.pmean(grads, "data")
        return tx.update(grads, tx.init(params), params)[0]

    step = jax.shard_map(
        local, mesh=mesh_of(data=8), in_specs=(P(), P("data")), out_specs=P("data")
    )
    with pytest.raises(ValueError, match=r"jax has summed .*an earlier link has averaged") as error:
        step(jnp.ones(8), jnp.ones((8, 8)))
    assert "check_vma" not in str(error.value)


@pytest.mark.parametrize("split", [None, True, P("data")])
def test_clipping_before_the_mean_is_refused_where_types_show_it(split, mesh_of):
    tx = optax.chain(T.clip_by_global_norm(1.0, "data", split=split), T.average_gradients("data"))

    def local(params, x):
        varying = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda params: (params * x[0]).sum())(varying)
        return tx.update(grads, tx.init(params), params)[0]

    step = jax.shard_map(local, mesh=mesh_of(data=8), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"no mean yet.*\n.*\nFix: put so\.transforms"):
        step(jnp.ones(2), jnp.ones((8, 2)))


def test_clipping_after_the_mean_clips_the_mean(mesh_of):
    tx = optax.chain(T.average_gradients("data"), T.clip_by_global_norm(1.0, "data"))

    def local(params, x):
        varying = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda params: (params * x[0]).sum())(varying)
        return tx.update(grads, tx.init(params), params)[0]

    mesh = mesh_of(data=2)
    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    clipped = step(jnp.ones(2), jnp.array([[3.0, 0.0], [0.0, 4.0]]))
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)
