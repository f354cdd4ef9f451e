"""Links in a loop of one's own: no state shares a buffer, devices agree, and misuse is refused."""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.any_optimizer import ANY_OPTIMIZER
from support.tiers import tiered

import shardopt as so

T = so.transforms
R = so.reducers
LINKS = {
    "skip_anomalies": lambda: T.skip_anomalies(optax.adam(0.1)),
    "average_params": lambda: T.average_params(0.9),
    "eight_bit": lambda: T.eight_bit(optax.adam(0.1), min_elements=8),
    "local_updates": lambda: T.local_updates(optax.adam(0.1), "data", 2),
    "diloco": lambda: T.local_updates(optax.adam(0.1), "data", 2, optax.sgd(0.7, momentum=0.9)),
    "stochastic_round": lambda: T.stochastic_round(optax.adam(0.1), seed=0),
    "exact": lambda: T.average_gradients("data"),
    "error_feedback": lambda: T.average_gradients("data", R.error_feedback(R.int8())),
    "warm_up": lambda: T.average_gradients("data", R.error_feedback(R.warm_up(R.sign(), 2))),
    "top_k": lambda: T.average_gradients("data", R.error_feedback(R.top_k(density=0.5))),
    "power_sgd": lambda: T.average_gradients("data", R.error_feedback(R.power_sgd(rank=2))),
    "soap": lambda: so.optimizers.soap(0.1),
}
"""Links whose `init` needs no axis."""


SHARING = {
    "dog": optax.contrib.dog,
    "madgrad": lambda: optax.contrib.madgrad(0.1),
    "prodigy": optax.contrib.prodigy,
    "cocob": optax.contrib.cocob,
    "lbfgs": optax.lbfgs,
    "mechanize": lambda: optax.contrib.mechanize(optax.contrib.dowg()),
}
"""Optimizers of optax whose state has one array in two leaves, or an array of the parameters."""
AROUND = {
    "skip_anomalies": lambda tx: T.skip_anomalies(tx, loss_z=None),
    "zero": lambda tx: T.zero(tx, "data"),
    "local_updates": lambda tx: T.local_updates(tx, "data", 2),
    "outer": lambda tx: T.local_updates(optax.sgd(0.1), "data", 2, outer=tx),
    "stochastic_round": lambda tx: T.stochastic_round(tx, seed=0),
    "eight_bit": lambda tx: T.eight_bit(optax.chain(optax.scale_by_adam(), tx), min_elements=8),
}


@pytest.mark.parametrize(
    ("link", "optimizer"),
    tiered(
        [*itertools.product(LINKS, [None]), *itertools.product(AROUND, SHARING)],
        lambda row: row[1] in (None, "dog") or row == ("skip_anomalies", "cocob"),
        ids=str,
    ),
)
def test_a_state_has_a_buffer_for_each_leaf_so_that_it_can_be_donated(link, optimizer):
    # of one shape: without jit each operation is a program for each shape
    params = {"w": jnp.ones((8, 16)), "v": jnp.ones((8, 16))}
    tx = LINKS[link]() if optimizer is None else AROUND[link](SHARING[optimizer]())
    leaves = jax.tree.leaves((tx.init(params), params))
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
    params, state = place(params), place(tx.init(params))
    for _ in range(3):
        params, state = step(params, state)
    assert np.isfinite(params["w"]).all()


GRADIENTS = {
    "nan": [1.0, 1.0, np.nan, 1.0],
    "infinite": [np.inf, 1.0, 1.0, 1.0],
    "spike": [1.0, 1.0, 1.0, 1e4],
    "none": [1.0, 1.1, 0.9, 1.0],
}


@pytest.mark.parametrize(
    ("kind", "way"),
    tiered(
        itertools.product(GRADIENTS, ["pmap", "shard_map", "checked shard_map", "vmap"]),
        lambda row: row[0] == "nan" or row[1] == "pmap",
        ids="-".join,
    ),
)
def test_devices_decide_alike_although_each_sees_its_own_gradients(kind, way, ways):
    chain = optax.chain(T.average_gradients("data"), optax.sgd(0.1, momentum=0.9))
    tx = T.skip_anomalies(chain, window=4)

    update = jax.jit(tx.update)  # traced once for all steps

    def run(gradients, losses):
        params = jnp.ones(3)
        state = tx.init(params)
        for step in range(5):
            gradient = jnp.full(3, jnp.where(step < 4, 1 + 0.1 * step, gradients))
            updates, state = update(gradient, state, params, value=losses + 0.01 * step)
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


# A loop with a state that differs between devices.

MEAN = T.average_gradients("data")
PER_DEVICE = {
    "error_feedback": lambda: T.average_gradients("data", R.error_feedback(R.int8())),
    "sign": lambda: T.average_gradients("data", R.error_feedback(R.sign())),
    "top_k": lambda: T.average_gradients("data", R.error_feedback(R.top_k(density=0.5))),
    "power_sgd": lambda: T.average_gradients("data", R.error_feedback(R.power_sgd(rank=1))),
    "local_updates": lambda: T.local_updates(optax.sgd(0.1, momentum=0.9), "data", 2),
    "diloco": lambda: T.local_updates(optax.adam(0.1), "data", 3, optax.sgd(0.7)),
    "local_updates with skips": lambda: T.skip_anomalies(
        T.local_updates(optax.adam(0.1), "data", 2), loss_z=None
    ),
    "zero": lambda: optax.chain(MEAN, T.zero(optax.adam(0.1), "data")),
    "zero of a chain": lambda: T.skip_anomalies(
        optax.chain(MEAN, T.zero(optax.chain(optax.clip(1.0), optax.lamb(0.1)), "data")),
        loss_z=None,
    ),
}
SIZE = 4


def gradients_of_devices():
    return {"w": np.random.default_rng(0).normal(size=(SIZE, 8, 4)).astype(np.float32)}


# error_feedback notices it with sign and top_k as with int8
@pytest.mark.parametrize("name", [name for name in PER_DEVICE if name not in ("sign", "top_k")])
def test_a_state_that_was_unreplicated_and_replicated_gives_nan_at_the_next_step(name):
    tx = PER_DEVICE[name]()
    grads = gradients_of_devices()
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
    assert np.isnan(updates["w"][1:]).all()
    if "local" not in name and name != "diloco":  # they agree by an all-reduce of one number
        assert np.isnan(updates["w"][0]).all()


@pytest.mark.parametrize(
    "name", ["error_feedback", "sign", "top_k", "power_sgd", "local_updates", "diloco"]
)
def test_a_state_made_outside_of_the_axis_and_replicated_takes_its_first_step(name):
    tx = PER_DEVICE[name]()
    grads = gradients_of_devices()
    params = jax.tree.map(lambda x: np.zeros_like(x[0]), grads)
    state = jax.jit(tx.init)(params)
    replicated = jax.tree.map(lambda x: np.stack([x] * SIZE), (state, params))
    update = jax.pmap(
        lambda grads, state, params: tx.update(grads, state, params),
        axis_name="data",
        devices=jax.devices()[:SIZE],
    )
    updates, _ = update(grads, *replicated)
    assert np.isfinite(updates["w"]).all()


AROUND_ZERO = {
    "skip_anomalies": lambda tx: T.skip_anomalies(tx, loss_z=None),
    "eight_bit": lambda tx: T.eight_bit(tx, min_elements=8),
}


@pytest.mark.parametrize("around", AROUND_ZERO)
@pytest.mark.parametrize("name", [name for name in PER_DEVICE if "zero" in name])
def test_a_link_around_a_state_that_zero_cuts_later_is_refused_with_a_remedy(name, around):
    tx = AROUND_ZERO[around](PER_DEVICE[name]())
    grads = gradients_of_devices()

    def replicated(params):
        return jax.tree.map(lambda x: jnp.stack([x] * SIZE), (tx.init(params), params))

    params = jax.tree.map(lambda x: x[0], grads)
    update = jax.pmap(tx.update, axis_name="data", devices=jax.devices()[:SIZE])
    with pytest.raises(ValueError, match=r"(skip_anom|eight_bit).* another structure.*\nFix: make"):
        jax.eval_shape(update, grads, *jax.eval_shape(replicated, params))


@pytest.mark.parametrize("name", PER_DEVICE)
def test_a_stored_state_that_is_not_taken_apart_is_refused(name, mesh_of):
    tx = PER_DEVICE[name]()
    mesh = mesh_of(data=8)
    stacked = T.on_mesh(tx, mesh, "data")
    params = {"w": np.zeros((8, 4), np.float32)}
    state = jax.eval_shape(stacked.init, params)
    specs = stacked.specs(state)

    def local(grads, state, params):
        return tx.update(jax.tree.map(lambda x: x[0], grads), state, params)

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), specs, P()), out_specs=(P(), specs))
    grads = {"w": np.ones((8, 8, 4), np.float32)}
    with pytest.raises(ValueError, match=r"(?s)a device has.*so\.transforms\.on_mesh"):
        jax.eval_shape(step, grads, state, params)


@pytest.mark.parametrize("way", ["jit", "shard_map"])
@pytest.mark.parametrize("name", PER_DEVICE)
def test_a_state_of_another_number_of_devices_is_refused_with_a_remedy(name, way, mesh_of):
    own_params = "local" in name or name == "diloco"
    of_8, of_4 = (
        T.on_mesh(PER_DEVICE[name](), mesh_of(data=size), "data", own_params=own_params)
        for size in (8, 4)
    )
    grads = {"w": jnp.ones((4, 8, 4))}
    params = {"w": jnp.ones((8, 4))}
    state = jax.eval_shape(of_8.init, {"w": jnp.ones((8, 8, 4))} if own_params else params)
    params = grads if own_params else params
    split = P("data") if own_params else P()

    def local(grads, state, params):
        return of_4.update({"w": grads["w"][0]}, state, params)

    step = of_4.update
    specs = of_4.specs(state)
    if way == "shard_map":
        in_specs = (P("data"), specs, split)
        out_specs = (split, specs)
        step = jax.shard_map(local, mesh=mesh_of(data=4), in_specs=in_specs, out_specs=out_specs)
    with pytest.raises(ValueError, match=r"on_mesh: .* not that of 4 devices.*\nFix: .*resized"):
        jax.eval_shape(step, grads, state, params)


AVERAGED = {
    "average_gradients": lambda: T.average_gradients("data"),
    "int8": lambda: T.average_gradients("data", R.int8()),
    "local_updates": lambda: T.local_updates(optax.sgd(0.1), "data", 2),
}


@pytest.mark.parametrize(
    ("averaged_by", "name"),
    [
        *itertools.product(["jax"], AVERAGED),
        *itertools.product(["pmean", "link"], ["average_gradients", "local_updates"]),
    ],
)
def test_gradients_that_are_averaged_already_are_refused_with_each_reason(
    averaged_by, name, mesh_of
):
    tx = AVERAGED[name]()
    if averaged_by == "link":
        tx = optax.chain(T.average_gradients("data"), tx)

    def local(params, x):
        if averaged_by != "jax":
            params = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda params: params @ x)(params)
        if averaged_by == "pmean":
            grads = jax.lax.pmean(grads, "data")
        return tx.update(grads, tx.init(params), params)[0]

    step = jax.shard_map(
        local, mesh=mesh_of(data=8), in_specs=(P(), P("data")), out_specs=P("data")
    )
    run = functools.partial(jax.eval_shape, step)
    if averaged_by != "jax" and name == "average_gradients":
        run = step  # a trace has another message, which knows more
    with pytest.raises(
        ValueError, match=r"jax has summed .*link has averaged.*MultiSteps"
    ) as error:
        run(jnp.ones(8), jnp.ones(64))
    assert "check_vma" not in str(error.value)


@pytest.mark.parametrize("name", AVERAGED)
def test_multi_steps_around_a_link_that_averages_is_named_by_the_error(name, mesh_of):
    tx = optax.MultiSteps(AVERAGED[name](), 2).gradient_transformation()
    stacked = T.on_mesh(tx, mesh_of(data=4), "data")
    params = {"w": jnp.ones((4, 4))}
    grads = {"w": jnp.ones((4, 4, 4))}
    state = jax.eval_shape(stacked.init, params)
    with pytest.raises(ValueError, match=r"optax\.MultiSteps is around.\n(.*\n)+Fix: .* after"):
        jax.eval_shape(stacked.update, grads, state, params)


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adafactor(0.1), optax.lamb(0.1)])
def test_zero_before_the_mean_is_refused_where_types_show_it(inner, mesh_of):
    tx = optax.chain(T.zero(inner, "data"), T.average_gradients("data"))

    def local(params, x):
        varying = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda params: (params * x[0]).sum())(varying)
        return tx.update(grads, tx.init(params), params)[0]

    step = jax.shard_map(local, mesh=mesh_of(data=8), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"no mean yet.*\n.*\nFix: put so\.transforms"):
        jax.eval_shape(step, np.ones(16, np.float32), np.ones((8, 16), np.float32))


WITH_MESH = {
    "zero": lambda mesh, axis: T.zero(optax.adam(0.1), axis, mesh),
    "on_mesh": lambda mesh, axis: T.on_mesh(MEAN, mesh, axis),
    "per_device_grads": lambda mesh, axis: T.per_device_grads(jax.value_and_grad(sum), mesh, axis),
}


@pytest.mark.parametrize("name", WITH_MESH)
@pytest.mark.parametrize("axis", ["batch", ("replica", "data"), None])
def test_a_mesh_without_the_axis_is_refused_before_the_first_step(name, axis, mesh_of):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*\nFix: "):
        WITH_MESH[name](mesh_of(replica=2, data=4), axis)


def test_zero_without_an_axis_or_a_mesh_says_what_to_pass():
    tx = T.zero(optax.adam(0.1), "data")
    params = {"w": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"zero: axis 'data' is not bound .*\nFix: pass the mesh"):
        tx.update(params, tx.init(params), params)


# `zero` of any optimizer, in every kind of loop.

OPTIMIZERS = {
    **ANY_OPTIMIZER,
    "skip_anomalies": lambda: T.skip_anomalies(optax.adam(1e-2), loss_z=None),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(1e-2, 0, 9)
    ),
}
STEPS = 4
SHAPES = {"w": (16, 8), "odd": (7, 5), "b": (16,), "s": ()}


def draw_params():
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=shape) for name, shape in SHAPES.items()}


def draw_batches(rows=16):
    draw = np.random.default_rng(1)
    return [
        {"x": draw.normal(size=(rows, 16)), "z": draw.normal(size=(rows, 7))} for _ in range(STEPS)
    ]


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"]).sum(-1) + batch["x"] @ params["b"]
    other = jnp.sin(batch["z"] @ params["odd"]).sum(-1) * params["s"]
    return jnp.mean((hidden + other - 1) ** 2)


@functools.cache
def trained_on_one_device(name):
    tx = OPTIMIZERS[name]()

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = draw_params()
    state = jax.jit(tx.init)(draw_params())
    for batch in draw_batches():
        params, state = step(params, state, batch)
    return params


def bytes_of_whole_state(name):
    state = jax.eval_shape(OPTIMIZERS[name]().init, draw_params())
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def train_under_jit(tx, mesh):
    tx = T.zero(tx, "data", mesh)

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    replicated_sharding = jax.NamedSharding(mesh, P())
    rows = jax.NamedSharding(mesh, P("data"))
    params = jax.device_put(draw_params(), replicated_sharding)
    state = tx.init(params)
    for batch in draw_batches():
        params, state = step(params, state, jax.device_put(batch, rows))
    return params, state


def train_under_shard_map(tx, mesh):
    tx = T.on_mesh(optax.chain(T.average_gradients("data"), T.zero(tx, "data")), mesh, "data")
    state = jax.jit(tx.init)(draw_params())
    specs = tx.specs(state)

    def local_step(params, state, batch):
        varying = jax.lax.pcast(params, "data", to="varying")
        updates, state = tx.update(jax.grad(loss_fn)(varying, batch), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            local_step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
        )
    )
    params = draw_params()
    for batch in draw_batches():
        params, state = step(params, state, batch)
    return params, state


def train_under_pmap(tx, mesh):
    tx = T.zero(tx, "data")

    def local_step(params, state, batch):
        grads = jax.lax.pmean(jax.grad(loss_fn)(params, batch), "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.pmap(local_step, axis_name="data")
    params = draw_params()
    replicated = jax.tree.map(lambda x: np.stack([x] * 8), (params, jax.jit(tx.init)(params)))
    params, state = replicated
    for batch in draw_batches():
        batch = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        params, state = step(params, state, batch)
    return jax.tree.map(lambda x: x[0], params), state


LOOPS = {"jit": train_under_jit, "shard_map": train_under_shard_map, "pmap": train_under_pmap}
EIGENVECTORS = ("soap",)  # decompositions amplify the rounding of sums


@pytest.mark.parametrize(
    ("name", "loop"),
    tiered(
        itertools.product(OPTIMIZERS, LOOPS),
        lambda row: row[0] == "clip_adamw" or row in [("muon", "jit"), ("adafactor", "shard_map")],
        ids="-".join,
    ),
)
def test_zero_of_any_optimizer_equals_one_device_in_every_loop(name, loop, mesh_of, x64):
    expected = trained_on_one_device(name)
    params, state = LOOPS[loop](OPTIMIZERS[name](), mesh_of(data=8))
    tolerance = 1e-6 if name in EIGENVECTORS else 1e-9
    for leaf in expected:
        np.testing.assert_allclose(params[leaf], expected[leaf], rtol=tolerance, atol=tolerance)
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    small = 8 * (7 * 5 + 64)  # what eight devices do not divide, counts and keys
    assert stored <= bytes_of_whole_state(name) / 8 + 8 * small


KINDS = {"explicit": jax.sharding.AxisType.Explicit, "auto": jax.sharding.AxisType.Auto}
WHOLE_LEAVES = ["adam", "lion", "clip_adamw", "multi_steps", "injected", "skip_anomalies"]
"""Optimizers with counts; the other states also have arrays that no dim of which can be sharded."""
WHOLE_LEAVES += ["muon", "adafactor", "soap"]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", tiered(WHOLE_LEAVES, lambda name: name in ("adam", "muon")))
def test_a_step_with_zero_is_compiled_once_although_leaves_of_its_state_stay_whole(name, kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(KINDS[kind],))
    tx = T.zero(OPTIMIZERS[name](), "data", mesh)
    step = jax.jit(lambda params, state: tx.update(params, state, params))
    params = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    if kind == "auto":
        params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    state = tx.init(params)
    for _ in range(3):
        _, state = step(params, state)
    assert step._cache_size() == 1


def test_the_mean_of_local_parameters_is_local_sgd_in_a_loop_of_ones_own(mesh_of, x64):
    tx = T.local_updates(optax.sgd(0.05, momentum=0.9), "data", 2)
    mesh = mesh_of(data=4)
    stacked = T.on_mesh(tx, mesh, "data")

    def local_step(params, state, batch):
        local_params = jax.tree.map(lambda x: x[0], params)
        updates, state = stacked.update(jax.grad(loss_fn)(local_params, batch), state, local_params)
        return jax.tree.map(lambda p, u: (p + u)[None], local_params, updates), state

    params = jax.tree.map(lambda x: np.stack([x] * 4), draw_params())
    state = jax.jit(stacked.init)(draw_params())
    specs = stacked.specs(state)
    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(P("data"), specs, P("data")),
            out_specs=(P("data"), specs),
        )
    )
    opt = so.local_sgd(
        so.ddp(optax.sgd(0.05, momentum=0.9), mesh_of(replica=4), loss_fn), sync_every=2
    )
    expected = opt.init(draw_params())
    for batch in draw_batches():
        params, state = step(params, state, batch)
        expected, _ = opt.step(expected, batch)
    for name in SHAPES:
        np.testing.assert_allclose(
            params[name], np.stack([expected.params[name]] * 4), rtol=1e-9, atol=1e-12
        )


def nested(step):
    return jax.vmap(jax.vmap(step))


VMAPPED = {"seeds": jax.vmap, "two axes": nested, "last dim": lambda f: jax.vmap(f, -1, -1)}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", tiered(VMAPPED, lambda name: name == "last dim"))
def test_zero_trains_several_seeds_at_once_and_still_warns_of_a_whole_state(
    name, whole, mesh_of, no_stored_programs
):
    mesh = mesh_of(data=8)
    inner = optax.adam(1e-2)
    transform = VMAPPED[name]
    tx = T.zero(inner, "data", mesh)
    replicated = jax.NamedSharding(mesh, P())
    shape = {"seeds": (2, 16, 8), "two axes": (2, 3, 16, 8), "last dim": (16, 8, 2)}[name]
    params = jax.device_put(np.random.default_rng(0).normal(size=shape), replicated)
    state = jax.jit(transform(tx.init))(params)
    if whole:
        state = jax.device_put(state, replicated)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updates, new_state = jax.jit(transform(tx.update))(params, state, params)
    expected, _ = jax.jit(
        lambda params: transform(inner.update)(params, transform(inner.init)(params), params)
    )(params)
    np.testing.assert_allclose(updates, expected, rtol=1e-5)
    assert any("come in unsharded" in str(warning.message) for warning in caught) == whole
    assert new_state[0].mu.addressable_shards[0].data.size == params.size // 8


# Gradients of each device under jit.


@pytest.mark.parametrize(
    "sizes",
    tiered(
        [{"data": 4, "tensor": 2}, {"data": 8}, {"replica": 2, "data": 4}],
        lambda sizes: sizes == {"data": 8},
        ids=str,
    ),
)
def test_int8_under_jit_sends_what_it_sends_under_shard_map(sizes, mesh_of):
    mesh = mesh_of(**sizes)
    reducer = R.error_feedback(R.int8())
    tx = T.on_mesh(
        optax.chain(T.average_gradients("data", reducer), optax.sgd(0.05, momentum=0.9)),
        mesh,
        "data",
    )
    grads_of = T.per_device_grads(jax.value_and_grad(loss_fn), mesh, "data")

    @jax.jit
    def step(params, state, batch):
        loss, grads = grads_of(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    local = optax.chain(T.average_gradients("data", reducer), optax.sgd(0.05, momentum=0.9))
    size = mesh.shape["data"]

    @jax.jit
    @functools.partial(jax.vmap, axis_name="data", in_axes=(None, 0, 0), out_axes=0)
    def one_device(params, state, batch):
        own_loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = local.update(grads, state, params)
        return optax.apply_updates(params, updates), state, own_loss

    # next to an automatic axis each leaf has blocks of its own, so that scales differ
    tolerance = 1e-5 if len(sizes) == 1 else 2e-2
    params = reference = jax.tree.map(np.float32, draw_params())
    state = jax.jit(tx.init)(params)
    init = jax.vmap(lambda _: local.init(params), axis_name="data")
    own_state = jax.jit(init)(np.zeros(size))
    for batch in draw_batches():
        batch = jax.tree.map(np.float32, batch)
        params, state, loss = step(params, state, batch)
        rows = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), batch)
        stacked, own_state, own_losses = one_device(reference, own_state, rows)
        np.testing.assert_allclose(loss, np.mean(own_losses), rtol=tolerance)
        reference = jax.tree.map(lambda x: x[0], jax.device_get(stacked))
    for name in SHAPES:
        np.testing.assert_allclose(params[name], reference[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [7, 1, 12])
def test_rows_that_devices_do_not_divide_are_refused(rows, mesh_of):
    grads_of = T.per_device_grads(jax.value_and_grad(loss_fn), mesh_of(data=8), "data")
    with pytest.raises(ValueError, match=r"per_device_grads: 8 devices .*\n  0/x: shape"):
        grads_of(draw_params(), draw_batches(rows)[0])


def test_gradients_of_the_whole_batch_are_refused_by_a_chain_on_a_mesh(mesh_of):
    tx = T.on_mesh(T.average_gradients("data", R.int8()), mesh_of(data=8), "data")
    params = draw_params()
    with pytest.raises(ValueError, match=r"on_mesh: under jit it takes the gradients of 8 devices"):
        jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)


def masked_loss(params, batch):
    return jnp.sum(jnp.square(batch["x"] @ params).sum(-1) * batch["mask"]) / batch["mask"].sum()


def exact_gradient():
    return jax.jit(jax.grad(masked_loss))(np.ones((4, 3)), masked_batch())


def masked_batch():
    draw = np.random.default_rng(2)
    mask = np.arange(16) % 5 > np.arange(16) // 8
    return {"x": draw.normal(size=(16, 4)), "mask": mask.astype(np.float64)}


@pytest.mark.parametrize("way", ["pmap", "vmap", "checked shard_map"])
def test_a_mean_over_valid_rows_is_exact_with_the_weight_of_each_device(way, ways, x64):
    tx = T.average_gradients("data")
    params = np.ones((4, 3))
    batch = masked_batch()
    expected = exact_gradient()

    def run(params, batch):
        grads = jax.grad(masked_loss)(params, batch)
        return tx.update(grads, tx.init(params), params, weight=batch["mask"].sum())[0]

    rows = jax.tree.map(lambda x: x.reshape(4, 4, *x.shape[1:]), batch)
    means = ways[way](run, 4)(np.stack([params] * 4), rows)
    np.testing.assert_allclose(means, np.stack([expected] * 4), rtol=1e-12)
    plain = jax.jit(jax.vmap(jax.grad(masked_loss), in_axes=(None, 0)))(params, rows).mean(0)
    assert np.abs(plain - expected).max() > 1e-2  # the mean of means is another


@pytest.mark.parametrize("kind", ["alone", "zero", "skipped", "clipped"])
def test_weights_of_all_devices_under_jit_make_a_mean_over_valid_rows_exact(kind, mesh_of, x64):
    mesh = mesh_of(data=8)
    params = np.ones((4, 3))
    batch = masked_batch()
    chain = {
        "alone": MEAN,
        "zero": optax.chain(MEAN, T.zero(optax.identity(), "data")),
        "skipped": optax.chain(MEAN, T.skip_anomalies(optax.identity(), loss_z=None)),
        "clipped": optax.chain(MEAN, optax.clip_by_global_norm(1e3)),
    }[kind]
    tx = T.on_mesh(chain, mesh, "data")
    grads_of = T.per_device_grads(jax.value_and_grad(masked_loss), mesh, "data")
    weights = batch["mask"].reshape(8, 2).sum(1)
    _, grads = jax.jit(grads_of)(params, batch)
    mean, _ = jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params, weight=weights)
    np.testing.assert_allclose(mean, exact_gradient(), rtol=1e-12)


AROUND_ON_MESH = {
    "chain": lambda tx: optax.chain(tx, optax.scale(1.0)),
    "named_chain": lambda tx: optax.named_chain(("links", tx), ("scale", optax.scale(1.0))),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, True),
    "support": optax.with_extra_args_support,
}


@pytest.mark.parametrize("name", AROUND_ON_MESH)
def test_a_transformation_around_on_mesh_passes_the_weights_on(name, mesh_of, x64):
    mesh = mesh_of(data=8)
    params = np.ones((4, 3))
    batch = masked_batch()
    tx = AROUND_ON_MESH[name](T.on_mesh(MEAN, mesh, "data"))
    grads_of = T.per_device_grads(jax.value_and_grad(masked_loss), mesh, "data")
    weights = batch["mask"].reshape(8, 2).sum(1)

    @jax.jit
    def mean_of(params):
        # MultiSteps makes room for sums of its input
        state = tx.init(jnp.stack([params] * 8) if name == "MultiSteps" else params)
        return tx.update(grads_of(params, batch)[1], state, params, weight=weights)[0]

    np.testing.assert_allclose(mean_of(params), exact_gradient(), rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (8, 1)], ids=str)
def test_a_weight_under_jit_that_is_not_that_of_each_device_is_refused(shape, mesh_of):
    tx = T.on_mesh(MEAN, mesh_of(data=8), "data")
    params = jnp.ones(4)
    with pytest.raises(ValueError, match=r"on_mesh: under jit weight has shape \[8\], got .*\nFix"):
        jax.eval_shape(
            lambda: tx.update(jnp.ones((8, 4)), tx.init(params), params, weight=jnp.ones(shape))
        )


@pytest.mark.parametrize("shape", [(3,), (4,), (2, 2)], ids=str)
def test_the_weight_of_a_device_is_one_number(shape, ways):
    def run(grads):
        return MEAN.update(grads, MEAN.init(grads), weight=jnp.ones(shape))[0]

    with pytest.raises(ValueError, match=r"average_gradients: weight is one number .*\nFix"):
        ways["vmap"](run, 4)(np.ones((4, 4)))


@pytest.mark.parametrize("outer", [None, optax.sgd(0.7)])
@pytest.mark.parametrize("way", ["pmap", "checked shard_map"])
def test_local_updates_refuse_a_weight(way, outer, ways):
    tx = T.local_updates(optax.sgd(0.1), "data", 1, outer)

    def run(grads):
        return tx.update(grads, tx.init(grads), grads, weight=grads.sum())[0]

    with pytest.raises(ValueError, match=r"local_updates: it takes no weight.*\nFix"):
        ways[way](run, 4)(np.ones((4, 4), np.float32))


UNAVERAGED = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.1),
    "clip": lambda: optax.clip(1.0),
    "local_updates": lambda: T.local_updates(optax.sgd(0.1), "data", 2),
}


@pytest.mark.parametrize("name", UNAVERAGED)
def test_a_chain_on_a_mesh_whose_updates_differ_is_refused_with_both_remedies(name, mesh_of):
    tx = T.on_mesh(UNAVERAGED[name](), mesh_of(data=8), "data")
    params = {"w": jnp.ones(4)}
    state = jax.eval_shape(tx.init, params)
    remedies = r"on_mesh: updates .* differ .*\n(.*w.*\n)+Fix: .*average_gradients.*own_params=True"
    with pytest.raises(ValueError, match=remedies):
        jax.eval_shape(tx.update, {"w": jnp.ones((8, 4))}, state, params)


@pytest.mark.parametrize("name", ["exact", "int8", "sign"])
def test_unreduced_gradients_of_explicit_axes_are_reduced_by_the_link(name, x64):
    reducer = {
        "exact": R.exact(),
        "int8": R.error_feedback(R.int8()),
        "sign": R.error_feedback(R.sign()),
    }[name]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    optimizer = optax.sgd(0.02, momentum=0.9)
    tx = T.on_mesh(optax.chain(T.average_gradients("data", reducer), optimizer), mesh, "data")
    with jax.set_mesh(mesh):
        params = jax.device_put(np.ones((4, 3)), P())
        state = jax.jit(tx.init)(params)

        @jax.jit
        def step(params, state, batch):
            reduced_params = jax.reshard(params, P(reduced={"data"}))
            updates, state = tx.update(jax.grad(masked_loss)(reduced_params, batch), state, params)
            return optax.apply_updates(params, updates), state

        batch = jax.device_put(masked_batch(), P("data"))
        program = step.lower(params, state, batch).compile()
        for _ in range(20):
            params, state = program(params, state, batch)
    expected = np.ones((4, 3))
    expected_state = optimizer.init(np.ones((4, 3)))

    @jax.jit
    def step_of_one_device(params, state):
        updates, state = optimizer.update(jax.grad(masked_loss)(params, masked_batch()), state)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        expected, expected_state = step_of_one_device(expected, expected_state)
    tolerance = 1e-12 if name == "exact" else 0.3 if name == "sign" else 0.02
    np.testing.assert_allclose(params, expected, atol=tolerance)
    assert ("s8[" in program.as_text()) == (name == "int8")


COMBINED = {
    "int8 and zero": lambda: optax.chain(
        T.average_gradients("data", R.error_feedback(R.int8())), T.zero(optax.adam(1e-2), "data")
    ),
    "skipped outside": lambda: T.skip_anomalies(
        optax.chain(MEAN, T.zero(optax.adam(1e-2), "data")), loss_z=None
    ),
    "skipped inside": lambda: optax.chain(
        MEAN, T.zero(T.skip_anomalies(optax.adam(1e-2), loss_z=None), "data")
    ),
    "steps inside": lambda: optax.chain(
        MEAN, T.zero(optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), "data")
    ),
    "steps between": lambda: optax.chain(
        MEAN, optax.MultiSteps(T.zero(optax.adam(1e-2), "data"), 2).gradient_transformation()
    ),
    "steps outside": lambda: optax.MultiSteps(
        optax.chain(MEAN, T.zero(optax.adam(1e-2), "data")), 2
    ).gradient_transformation(),
    "all": lambda: T.skip_anomalies(
        optax.chain(
            T.average_gradients("data", R.error_feedback(R.int8())),
            T.zero(optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), "data"),
        ),
        loss_z=None,
    ),
}
UNTYPED = ("steps outside", "shard_map")
PLAIN = {
    "steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "none": lambda: optax.adam(1e-2),
}


@pytest.mark.parametrize(
    ("name", "loop"),
    tiered(
        # types refuse to accumulate gradients that differ between devices in a replicated state
        [row for row in itertools.product(COMBINED, ["shard_map", "pmap"]) if row != UNTYPED],
        lambda row: row in [("all", "pmap"), ("skipped outside", "shard_map")],
        ids="-".join,
    ),
)
def test_links_combine_in_each_order(name, loop, mesh_of):
    tx = COMBINED[name]()
    mesh = mesh_of(data=8)
    plain = PLAIN["steps" if "steps" in name or name == "all" else "none"]()
    expected = jax.tree.map(np.float32, draw_params())
    plain_state = jax.jit(plain.init)(expected)
    batches = [jax.tree.map(np.float32, batch) for batch in draw_batches()]

    @jax.jit
    def plain_step(params, state, batch):
        updates, state = plain.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        expected, plain_state = plain_step(expected, plain_state, batch)
    start = jax.tree.map(np.float32, draw_params())

    def local_step(tx, params, state, batch, local_params):
        updates, state = tx.update(jax.grad(loss_fn)(local_params, batch), state, params)
        return optax.apply_updates(params, updates), state

    if loop == "shard_map":
        tx = T.on_mesh(tx, mesh, "data")
        state = jax.jit(tx.init)(start)
        params = start
        specs = tx.specs(state)

        def with_types(params, state, batch):
            local_params = jax.lax.pcast(params, "data", to="varying")
            return local_step(tx, params, state, batch, local_params)

        step = jax.jit(
            jax.shard_map(
                with_types, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
            )
        )
    else:
        params = jax.tree.map(lambda x: np.stack([x] * 8), start)
        state = jax.pmap(tx.init, axis_name="data")(params)
        step = jax.pmap(lambda p, s, b: local_step(tx, p, s, b, p), axis_name="data")
        batches = [jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), b) for b in batches]
    for batch in batches:
        params, state = step(params, state, batch)
    tolerance = 2e-2 if "int8" in name or name == "all" else 1e-5
    for leaf, value in expected.items():
        result = np.asarray(params[leaf])
        result = result if loop == "shard_map" else result[0]
        np.testing.assert_allclose(result, value, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "kinds"),
    tiered(
        itertools.product(
            OPTIMIZERS, [("explicit", "explicit"), ("auto", "explicit"), ("explicit", "auto")]
        ),
        lambda row: row in [("muon", ("explicit", "explicit")), ("adamw", ("auto", "explicit"))],
        ids=lambda row: "-".join((row[0], *row[1])),
    ),
)
def test_zero_of_any_optimizer_equals_one_device_on_explicit_axes(name, kinds, x64):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=tuple(KINDS[k] for k in kinds))
    expected = trained_on_one_device(name)
    tx = T.zero(OPTIMIZERS[name](), "data")

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        params = jax.device_put(draw_params(), P())
        params["w"] = jax.device_put(params["w"], P(None, "tensor"))
        state = jax.jit(tx.init)(params)
        for batch in draw_batches():
            params, state = step(params, state, jax.device_put(batch, P("data")))
    tolerance = 1e-6 if name in EIGENVECTORS else 1e-9
    for leaf in expected:
        np.testing.assert_allclose(params[leaf], expected[leaf], rtol=tolerance, atol=tolerance)
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert stored <= bytes_of_whole_state(name) / 4 + 8 * 8 * (7 * 5 + 64)


def undone_by_outputs(step, replicated):
    return jax.jit(step, out_shardings=replicated)


def undone_before(step, replicated):
    def filtered(params, state, batch):
        return step(params, jax.lax.with_sharding_constraint(state, replicated), batch)

    return jax.jit(filtered)


def undone_after(step, replicated):
    def filtered(params, state, batch):
        return jax.lax.with_sharding_constraint(step(params, state, batch), replicated)

    return jax.jit(filtered)


def undone_between(step, replicated):
    step = jax.jit(step)
    return lambda params, state, batch: step(params, jax.device_put(state, replicated), batch)


def undone_in_part(step, replicated):
    def filtered(params, state, batch):
        state = jax.tree.map(
            lambda x: x if x.ndim < 2 else jax.lax.with_sharding_constraint(x, replicated), state
        )
        return step(params, state, batch)

    return jax.jit(filtered)


UNDONE = {
    function.__name__: function
    for function in (
        undone_by_outputs,
        undone_before,
        undone_after,
        undone_between,
        undone_in_part,
    )
}
WATCHED = {
    "adam": lambda mesh: T.zero(optax.adam(0.1), "data", mesh),
    "muon": lambda mesh: T.zero(optax.contrib.muon(0.1), "data", mesh),
    "accumulated": lambda mesh: optax.MultiSteps(T.zero(optax.adam(0.1), "data", mesh), 2),
    "skipped": lambda mesh: T.skip_anomalies(T.zero(optax.adam(0.1), "data", mesh), loss_z=None),
}


@pytest.fixture
def no_stored_programs():
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


@pytest.mark.parametrize(
    ("undone", "name"),
    tiered(
        itertools.product([None, *UNDONE], WATCHED),
        lambda row: (
            row in [(None, "adam"), ("undone_by_outputs", "adam"), ("undone_in_part", "skipped")]
        ),
        ids=lambda row: "-".join(map(str, row)),
    ),
)
def test_a_state_whose_shards_the_loop_undoes_is_noticed_when_it_comes_in(
    undone, name, mesh_of, no_stored_programs
):
    mesh = mesh_of(data=8)
    tx = WATCHED[name](mesh)
    replicated = jax.NamedSharding(mesh, P())

    def step(params, state, batch):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if undone is None else UNDONE[undone](step, replicated)
    params = jax.device_put({"w": np.ones((16, 8)), "b": np.ones(8)}, replicated)
    state = tx.init(params)
    messages = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params, state = step(params, state, 0)
        messages += [str(warning.message) for warning in caught]
    assert bool(messages) == (undone is not None)
    for message in messages:
        assert re.search(r"^zero: \d+ of \d+ leaves .* come in unsharded along 'data'", message)
        assert "Fix: leave the state out of your out_shardings" in message


@pytest.mark.parametrize(
    "name", tiered([*WATCHED, "scan", "vmap"], lambda name: name in ["adam", "scan"])
)
def test_a_step_with_zero_is_exported_and_still_warns_where_it_runs(
    name, mesh_of, no_stored_programs
):
    mesh = mesh_of(data=8)
    tx = WATCHED.get(name, WATCHED["adam"])(mesh)
    replicated = jax.NamedSharding(mesh, P())

    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    def two_steps(params, state):
        return jax.lax.scan(lambda carry, _: (step(*carry), None), (params, state), None, length=2)

    params = jax.device_put({"w": np.ones((16, 8)), "b": np.ones(8)}, replicated)
    state = tx.init(params)
    if name == "vmap":
        params, state = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (params, state))
    run = jax.jit({"scan": two_steps, "vmap": jax.vmap(step)}.get(name, step))
    exported = jax.export.export(run)(params, state)
    assert "InspectSharding" not in exported.mlir_module()
    whole_state = jax.device_put(state, replicated)
    results = jax.jit(exported.call)(params, whole_state)
    if name == "scan":  # its leaves differ from the incoming leaves
        expected = run(params, whole_state)
    else:
        with pytest.warns(UserWarning, match="come in unsharded along 'data'"):
            expected = run(params, whole_state)
    jax.tree.map(np.testing.assert_array_equal, results, expected)


AUTO = jax.sharding.AxisType.Auto
EXPLICIT = jax.sharding.AxisType.Explicit


@pytest.mark.parametrize(
    ("spec", "kinds", "warns"),
    [
        (P("tensor"), (AUTO, AUTO), True),
        (P(("tensor", "data")), (AUTO, AUTO), True),
        (P(("data", "tensor"), None), (AUTO, AUTO), True),
        (P(None, "tensor"), (AUTO, AUTO), False),
        (P("data"), (AUTO, AUTO), False),
        (P("tensor"), (AUTO, EXPLICIT), False),
        (P("tensor"), (EXPLICIT, EXPLICIT), False),
    ],
    ids=str,
)
def test_zero_warns_where_it_takes_the_dim_of_an_auto_tensor_axis(spec, kinds, warns):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=kinds)
    params = {"w": jax.device_put(np.ones((64, 32)), jax.NamedSharding(mesh, spec))}
    tx = T.zero(optax.sgd(0.1, momentum=0.9), "data", mesh)
    with warnings.catch_warnings(record=True) as caught, jax.set_mesh(mesh):
        warnings.simplefilter("always")
        state = tx.init(params)
    messages = [str(warning.message) for warning in caught]
    assert bool(messages) == warns
    assert all("'data' takes dims that Auto axes shard" in message for message in messages)
    shards = state[0].trace["w"].sharding.shard_shape((64, 32))
    assert shards[0] * shards[1] == 64 * 32 // (8 if not warns and "tensor" in spec else 4)


BEFORE_THE_MEAN = {
    "momentum": lambda: optax.chain(optax.trace(0.9), MEAN),
    "sum": lambda: optax.chain(optax.apply_every(2), MEAN),
    "momenta masked": lambda: optax.chain(optax.masked(optax.trace(0.9), {"w": True}), MEAN),
    "local without its link": lambda: optax.sgd(0.1, momentum=0.9),
    "skipped": lambda: T.skip_anomalies(optax.chain(optax.trace(0.9), MEAN), loss_z=None),
}


@pytest.mark.parametrize("name", BEFORE_THE_MEAN)
@pytest.mark.parametrize("way", ["jit", "shard_map"])
def test_a_state_that_differs_between_devices_without_a_mark_is_refused(name, way, mesh_of):
    mesh = mesh_of(data=4)
    tx = T.on_mesh(BEFORE_THE_MEAN[name](), mesh, "data", own_params="local" in name)
    params = {"w": jnp.ones((4, 4, 4) if "local" in name else (4, 4))}
    state = jax.eval_shape(tx.init, params)
    grads = {"w": jnp.ones((4, 4, 4))}

    def local(grads, state, params):
        return tx.update({"w": grads["w"][0]}, state, params)

    specs = tx.specs(state)
    step = tx.update
    if way == "shard_map":
        step = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("data"), specs, P("data") if "local" in name else P()),
            out_specs=(P("data"), specs),
        )
    with pytest.raises(ValueError, match=r"on_mesh: updates or states differ .*\n(.*\n)+Fix: put"):
        jax.eval_shape(step, grads, state, params)


WITH_BRANCHES = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda step: step < 2),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step < 2),
}


@pytest.mark.parametrize("name", WITH_BRANCHES)
def test_a_transformation_with_branches_around_the_mean_is_refused_with_both_remedies(
    name, mesh_of
):
    chain = WITH_BRANCHES[name](optax.chain(MEAN, optax.sgd(0.1)))
    tx = T.on_mesh(chain, mesh_of(data=4), "data")
    params = {"w": jnp.ones((4, 4))}
    state = jax.eval_shape(tx.init, params)
    with pytest.raises((TypeError, ValueError), match="on_mesh: ") as error:
        jax.eval_shape(tx.update, {"w": jnp.ones((4, 4, 4))}, state, params)
    assert "so.transforms.average_gradients" in str(error.value)
