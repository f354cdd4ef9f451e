"""Each transformation on whatever trees, axis sizes and settings hypothesis finds, against numpy or
one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reference import jitted
from support.trajectory import trajectory

import shardopt as so

T = so.transforms
STEPS = 4
quick = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=4)
SIZES = st.sampled_from([1, 2, 3, 5])
drawn = given(shapes=SHAPES, size=SIZES, data=st.data())


def draw(shapes, size):
    """Parameters, and local gradients [size, STEPS, ...], of scales far apart."""
    normal = np.random.default_rng(len(shapes) + size).normal
    params = {f"leaf{i}": normal(size=shape) for i, shape in enumerate(shapes)}
    grads = {
        f"leaf{i}": 10.0 ** (i - 1) * normal(size=(size, STEPS, *shape))
        for i, shape in enumerate(shapes)
    }
    return jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, grads)


def at(grads, t):
    """The mean gradients of a step."""
    return {name: np.asarray(g)[:, t].mean(0) for name, g in grads.items()}


def everywhere(found, expected, size):
    """All devices have what is expected after each step."""
    assert len(found) == (len(expected) if found else 0)
    for now, then in zip(found, expected, strict=False):
        for name, value in then.items():
            np.testing.assert_allclose(now[name], np.stack([value] * size), rtol=1e-10, atol=1e-11)


def run(on_devices, tx, params, grads, size):
    return on_devices(trajectory(tx, params), size, grads) if grads else []


def alone(tx, params, means):
    """What one device does with these gradients, step by step."""
    tx = jitted(tx)
    seen, state = [], tx.init(params)
    for mean in means:
        updates, state = tx.update(mean, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen


@settings(quick, max_examples=3)
@drawn
def test_accumulated_means(shapes, size, data, x64, on_devices):
    every = data.draw(st.integers(1, 3))
    params, grads = draw(shapes, size)
    tx = T.accumulate(optax.chain(T.average_gradients("data"), optax.sgd(0.1, momentum=0.5)), every)
    expected, state, inner = [], params, jitted(optax.sgd(0.1, momentum=0.5))
    kept = inner.init(params)
    for t in range(STEPS):
        if (t + 1) % every == 0:
            window = [at(grads, t - i) for i in range(every)]
            updates, kept = inner.update(
                {name: sum(w[name] for w in window) / every for name in params}, kept, state
            )
            state = optax.apply_updates(state, updates)
        expected.append(state)
    everywhere(run(on_devices, tx, params, grads, size), expected, size)


@pytest.mark.slow
@quick
@drawn
def test_sharded_updates(shapes, size, data, x64, on_devices):
    tx = data.draw(
        st.sampled_from([optax.adamw(0.1, weight_decay=0.2), optax.lion(0.1), optax.rmsprop(0.1)])
    )
    params, grads = draw(shapes, size)
    found = run(on_devices, T.shard_updates(tx, "data"), params, grads, size)
    everywhere(found, alone(tx, params, [at(grads, t) for t in range(STEPS)]), size)


@pytest.mark.slow  # test_clip.py has rows of it
@quick
@drawn
def test_clipped_means(shapes, size, data, x64, on_devices):
    bound = data.draw(st.sampled_from([1e-3, 1.0, 1e3]))
    params, grads = draw(shapes, size)
    tx = optax.chain(
        T.average_gradients("data"),
        T.clip_by_global_norm(bound, "data", split=False),
        optax.sgd(0.1),
    )
    plain = optax.chain(optax.clip_by_global_norm(bound), optax.sgd(0.1))
    expected = alone(plain, params, [at(grads, t) for t in range(STEPS)])
    everywhere(run(on_devices, tx, params, grads, size), expected, size)


@quick
@drawn
@pytest.mark.slow
def test_the_norm_of_leaves_that_are_split(shapes, size, data, x64, on_devices):
    """Some are: the stacked gradients of all devices are then one leaf."""
    split = {f"leaf{i}": data.draw(st.booleans()) for i in range(len(shapes))}
    _, grads = draw(shapes, size)
    if not grads:
        return
    here = {
        name: g[:, 0] if split[name] else jnp.stack([g[0, 0]] * size) for name, g in grads.items()
    }
    tx = T.clip_by_global_norm(0.5, "data", split=split)
    found = on_devices(lambda g: tx.update(g, tx.init(g))[0], size, here)
    plain = optax.clip_by_global_norm(0.5)
    whole = {name: g if split[name] else g[0] for name, g in here.items()}
    expected, _ = plain.update(whole, plain.init(whole))
    for name, g in expected.items():
        np.testing.assert_allclose(
            found[name], g if split[name] else np.stack([g] * size), rtol=1e-10, atol=1e-12
        )


@pytest.mark.slow  # test_combinators.py has rows of it
@quick
@drawn
def test_late_means(shapes, size, data, x64, on_devices):
    staleness = data.draw(st.integers(0, 3))
    params, grads = draw(shapes, size)
    tx = optax.chain(T.average_gradients("data"), T.delay_gradients(staleness), optax.sgd(0.1))
    zero = jax.tree.map(np.zeros_like, params)
    late = [at(grads, t - staleness) if t >= staleness else zero for t in range(STEPS)]
    everywhere(run(on_devices, tx, params, grads, size), alone(optax.sgd(0.1), params, late), size)


@pytest.mark.slow  # test_combinators.py has rows of it
@quick
@drawn
def test_local_updates(shapes, size, data, x64, on_devices):
    every = data.draw(st.integers(1, 3))
    params, grads = draw(shapes, size)
    now, seen = {name: np.stack([p] * size) for name, p in params.items()}, []
    for t in range(STEPS):
        now = {name: p - 0.1 * np.asarray(grads[name])[:, t] for name, p in now.items()}
        if (t + 1) % every == 0:
            now = {name: np.stack([p.mean(0)] * size) for name, p in now.items()}
        seen.append(now)
    found = run(on_devices, T.local_updates(optax.sgd(0.1), "data", every), params, grads, size)
    for mine, expected in zip(found, seen, strict=False):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11), mine, expected
        )
