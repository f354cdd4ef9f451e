"""Each transformation against one device, in every place where an axis can be bound, inside optax's
combinators.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered
from support.trajectory import trajectory

import shardopt as so
from shardopt.parameter_server import make_server, make_update

T, N, STEPS = so.transforms, 3, 5
MATRIX = {"w": (4, 3), "b": (5,), "s": ()}


def gradients(steps=STEPS, size=N, dtype=np.float64):
    """Local gradients [size, steps, ...]."""
    draw = np.random.default_rng(0)
    return {
        name: np.asarray(draw.normal(size=(size, steps, *shape)), dtype)
        for name, shape in MATRIX.items()
    }


def parameters(dtype=np.float64):
    draw = np.random.default_rng(1)
    return {name: np.asarray(draw.normal(size=shape), dtype) for name, shape in MATRIX.items()}


def close(found, expected, rtol=1e-10):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12), found, expected
    )


def on_the_mean(tx):
    """What one device does with the mean gradients."""
    return jax.jit(trajectory(tx, parameters()))(jax.tree.map(lambda g: g.mean(0), gradients()))


def every_second(tx):
    """optax.MultiSteps takes its means in fp32."""

    def update(g, state, params):
        count, kept, inner = state
        if count == 0:
            return jax.tree.map(jnp.zeros_like, g), (1, g, inner)
        updates, inner = tx.update(jax.tree.map(lambda a, b: (a + b) / 2, kept, g), inner, params)
        return updates, (0, g, inner)

    return optax.GradientTransformation(lambda params: (0, params, tx.init(params)), update)


average = functools.partial(T.average_gradients, "data")
labels = {"w": "one", "b": "two", "s": "two"}
EQUAL = {
    "average": (optax.chain(average(), optax.adamw(0.1)), optax.adamw(0.1)),
    "average in multi_transform": (
        optax.multi_transform(
            {"one": optax.chain(average(), optax.sgd(0.1)), "two": average()}, labels
        ),
        optax.multi_transform({"one": optax.sgd(0.1), "two": optax.identity()}, labels),
    ),
    "average of some": (
        optax.chain(
            optax.masked(average(), {"w": True, "b": False, "s": False}), average(), optax.sgd(0.1)
        ),
        optax.sgd(0.1),
    ),
    "injected": (
        optax.chain(
            average(),
            optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0, 9)),
        ),
        optax.adam(optax.linear_schedule(0.1, 0, 9)),
    ),
    "shard": (
        T.shard_updates(optax.adamw(0.1, weight_decay=0.1), "data"),
        optax.adamw(0.1, weight_decay=0.1),
    ),
    "shard with a mask by dims": (
        T.shard_updates(
            optax.adamw(
                0.1, weight_decay=0.3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
            ),
            "data",
        ),
        optax.adamw(0.1, weight_decay=0.3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    ),
    "average, then shard": (
        optax.chain(average(), T.shard_updates(optax.adam(0.1), "data")),
        optax.adam(0.1),
    ),
    "shard in multi_transform": (
        optax.multi_transform(
            {"one": T.shard_updates(optax.lion(0.1), "data"), "two": average()}, labels
        ),
        optax.multi_transform({"one": optax.lion(0.1), "two": optax.identity()}, labels),
    ),
    "accumulate": (
        T.accumulate(
            optax.chain(average(), optax.inject_hyperparams(optax.adam)(learning_rate=0.1)), 2
        ),
        every_second(optax.adam(0.1)),
    ),
    "accumulate injected": (
        optax.inject_hyperparams(
            lambda every: T.accumulate(optax.chain(average(), optax.sgd(0.1)), every)
        )(every=2),
        every_second(optax.sgd(0.1)),
    ),
    "clip injected": (
        optax.chain(
            average(),
            optax.inject_hyperparams(T.clip_by_global_norm)(
                max_norm=0.5, axis_names="data", split=False
            ),
            optax.sgd(0.1),
        ),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    ),
    "local, always averaged": (
        T.local_updates(optax.sgd(0.1), "data", sync_every=1),
        optax.sgd(0.1),
    ),
}


QUICK = ("clip injected", "shard in multi_transform")


@pytest.mark.parametrize("name", tiered(EQUAL, lambda name: name in QUICK))
def test_equal_to_one_device_wherever_the_axis_is_bound(name, ways, x64):
    tx, reference = EQUAL[name]
    expected = jax.tree.map(lambda x: jnp.stack([x] * N), on_the_mean(reference))
    for way in ways if name in ("average", "shard") else ("vmap", "shard_map"):
        close(ways[way](trajectory(tx, parameters()), N)(gradients()), expected)


@pytest.mark.parametrize("sync_every", tiered([2, 3], lambda every: False))
def test_local_updates_are_local_sgd(sync_every, ways, x64):
    """Against loops over devices: each has its own parameters and momentum, averaged now and then."""
    tx, grads = optax.sgd(0.1, momentum=0.9), gradients()
    devices = [parameters() for _ in range(N)]
    states = [tx.init(p) for p in devices]
    expected = []
    for t in range(STEPS):
        for d in range(N):
            updates, states[d] = tx.update(
                jax.tree.map(lambda g, d=d, t=t: g[d, t], grads), states[d]
            )
            devices[d] = optax.apply_updates(devices[d], updates)
        if (t + 1) % sync_every == 0:
            devices = [jax.tree.map(lambda *x: sum(x) / N, *devices)] * N
        expected.append(jax.tree.map(lambda *x: jnp.stack(x), *devices))
    for way in ways.values():
        close(
            way(trajectory(T.local_updates(tx, "data", sync_every), parameters()), N)(grads),
            expected,
        )


def test_local_updates_bring_half_precision_together(on_devices):
    """The mean itself is reached, although p + (mean - p) in bfloat16 would miss it."""
    tx = T.local_updates(optax.identity(), "data", sync_every=1)
    params = jnp.asarray(np.random.default_rng(0).normal(size=(4, 500)), jnp.bfloat16)

    def run(p):
        updates, _ = tx.update(jnp.zeros_like(p), tx.init(p), p)
        return optax.apply_updates(p, updates)

    found = on_devices(run, 4, params)
    assert all((found[d] == found[0]).all() for d in range(4))


RULES = {
    "none": (None, lambda g, now, then, tau: g),
    "learning rate": (T.staleness_learning_rate(), lambda g, now, then, tau: g / max(1, tau)),
    "compensation": (
        T.delay_compensation(0.3),
        lambda g, now, then, tau: g + 0.3 * g * g * (now - then),
    ),
}


@pytest.mark.parametrize("staleness", tiered([0, 1, 3], lambda staleness: staleness == 3))
@pytest.mark.parametrize("name", tiered(RULES, lambda name: False))
def test_delayed_gradients_are_those_of_an_asynchronous_run(staleness, name, ways, x64):
    rule, corrected = RULES[name]
    tx = optax.chain(
        T.average_gradients("data"), T.delay_gradients(staleness, rule, inner=optax.sgd(0.1))
    )
    params, means = parameters(), jax.tree.map(lambda g: g.mean(0), gradients())
    history, expected = [], []
    for t in range(STEPS):
        history.append(params)
        if t >= staleness:
            late = jax.tree.map(lambda g, t=t: g[t - staleness], means)
            correct = functools.partial(corrected, tau=staleness)
            late = jax.tree.map(correct, late, params, history[t - staleness])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, late)
        expected.append(params)
    for way in ways.values() if staleness == 3 else (ways["vmap"],):
        close(
            way(trajectory(tx, parameters()), N)(gradients()),
            jax.tree.map(lambda x: np.stack([x] * N), expected),
        )


def test_staleness_divides_the_update_also_of_adam_as_the_parameter_server_does(x64):
    """Three workers take turns, so that each push is two versions late.

    The first two find nothing.
    """
    staleness, steps = 2, 8
    start, noise = jnp.arange(1.0, 4.0), np.random.default_rng(3).normal(size=(steps, 3))
    rules = so.parameter_server.rules

    def gradient(w, t):
        return 4 * w**3 + noise[t]

    def delayed(rule):
        tx, w, found = T.delay_gradients(staleness, rule, inner=optax.adam(0.1)), start, []
        state = tx.init(w)
        for t in range(steps):
            updates, state = tx.update(gradient(w, t), state, w)
            w = optax.apply_updates(w, updates)
            found.append(w)
        return np.stack(found)

    def served(rule):
        server, found = make_server(optax.adam(0.1), max_staleness=None, rule=rule), []
        state, pulled = server.init({"w": start}), {}
        for worker in range(staleness + 1):
            state, _ = server.join(state, worker)
        for worker in range(staleness + 1):
            state, event = server.pull(state, worker)
            pulled[worker] = event.version, start
        for t in range(steps):
            worker = t % (staleness + 1)
            version, w = pulled[worker]
            late = jnp.zeros(3) if t < staleness else gradient(w, t - staleness)
            state, event = server.push(state, worker, make_update({"w": late}), version)
            assert event.delay == min(t, staleness)
            found.append(state.params["w"])
            state, event = server.pull(state, worker)
            pulled[worker] = event.version, state.params["w"].copy()
        return np.stack(found)

    divided, plain = delayed(T.staleness_learning_rate()), delayed(None)
    np.testing.assert_allclose(divided, served(rules.staleness_learning_rate()), rtol=1e-12)
    np.testing.assert_allclose(plain, served(rules.plain()), rtol=1e-12)
    # the first step that moves: Adam's is as long as its learning rate, whatever the gradient
    first = staleness
    np.testing.assert_allclose(
        start - divided[first], (start - plain[first]) / staleness, rtol=1e-6
    )
    assert np.abs(divided[-1] - plain[-1]).max() > 0.1


@pytest.mark.slow
def test_delayed_before_averaging_is_the_same(ways, x64):
    before = optax.chain(T.delay_gradients(2), T.average_gradients("data"), optax.sgd(0.1))
    after = optax.chain(T.average_gradients("data"), T.delay_gradients(2), optax.sgd(0.1))
    for way in ways.values():
        close(*(way(trajectory(tx, parameters()), N)(gradients()) for tx in (before, after)))


def test_each_device_keeps_a_part_of_the_state(on_devices):
    tx = T.shard_updates(optax.adam(0.1), "data")
    shapes = {"w": (5, 4), "h": 3, "s": (), "e": (0, 2)}
    params = {
        name: np.ones(shape, jnp.bfloat16 if name == "h" else np.float32)
        for name, shape in shapes.items()
    }
    state = so.reducers.Stacked(tx, "data", axis_size=4).init(params)
    assert {name: mu.shape for name, mu in state.inner.value[0].mu.items()} == {
        "w": (4, 5, 1),
        "h": (4, 1),
        "s": (4,),
        "e": (4, 0, 1),
    }
    grads = {name: np.broadcast_to(x, (4, *x.shape)) for name, x in params.items()}
    updates = on_devices(lambda g: tx.update(g, tx.init(params), params)[0], 4, grads)
    assert {name: (u.shape[1:], u.dtype) for name, u in updates.items()} == {
        n: (p.shape, p.dtype) for n, p in params.items()
    }
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-4)
    np.testing.assert_allclose(updates["h"].astype(np.float32), -0.1, rtol=1e-2)
