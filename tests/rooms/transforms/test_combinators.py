"""Averages, delays and local steps inside optax's own combinators: each against loops over devices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered
from support.trajectory import trajectory

import shardopt as so

T, N, STEPS, RATE = so.transforms, 3, 5, 0.1
DRAW = np.random.default_rng(0)
PARAMS = {
    name: DRAW.normal(size=shape) for name, shape in {"w": (4, 3), "b": (5,), "s": ()}.items()
}
GRADS = {name: DRAW.normal(size=(N, STEPS, *x.shape)) for name, x in PARAMS.items()}
LABELS = {"w": "one", "b": "two", "s": "two"}
ONLY_W = {"w": True, "b": False, "s": False}


def averaged(params, grads):
    """One leaf, [N, ...], and its gradients [N, steps, ...]: the leaf after each step, SGD on the
    mean.
    """
    for t in range(STEPS):
        params = params - RATE * grads[:, t].mean(0)
        yield params


def delayed(params, grads):
    """Each device by itself, two steps late, without an average."""
    for t in range(STEPS):
        if t >= 2:
            params = params - RATE * grads[:, t - 2]
        yield params


def local(params, grads):
    """Each device by itself, all brought together on every second step."""
    for t in range(STEPS):
        params = params - RATE * grads[:, t]
        if t % 2:
            params = np.stack([params.mean(0)] * N)
        yield params


def alone(params, grads):
    """Plain SGD, devices never talking."""
    for t in range(STEPS):
        params = params - RATE * grads[:, t]
        yield params


def still(params, grads):
    """Nothing happens."""
    for _ in range(STEPS):
        yield params


def averaging(rate):
    return optax.chain(T.average_gradients("data"), optax.sgd(rate))


def delaying(rate, staleness=2):
    return optax.chain(T.delay_gradients(staleness), optax.sgd(rate))


def syncing(rate, sync_every=2):
    return T.local_updates(optax.sgd(rate), "data", sync_every)


KINDS = {"average": (averaging, averaged), "delay": (delaying, delayed), "local": (syncing, local)}
COMBINED = {
    "multi_transform": (
        lambda make: optax.multi_transform({"one": make(RATE), "two": optax.sgd(RATE)}, LABELS),
        alone,
    ),
    "masked": (
        lambda make: optax.chain(
            optax.masked(make(RATE), ONLY_W),
            optax.masked(optax.set_to_zero(), {name: not on for name, on in ONLY_W.items()}),
        ),
        still,
    ),
    "inject_hyperparams": (
        lambda make: optax.multi_transform({"one": injected(make), "two": optax.sgd(RATE)}, LABELS),
        alone,
    ),
}


def injected(make):
    """Hyperparameters that come out of the state: what shapes the state is named, the others are
    arrays.
    """
    given = {delaying: {"staleness": 2}, syncing: {"sync_every": 2}}.get(make, {})
    static = ("staleness",) if make is delaying else ()
    return optax.inject_hyperparams(make, static_args=static)(rate=lambda count: RATE, **given)


def expected_of(rules):
    whole = {name: rules[name](np.stack([PARAMS[name]] * N), GRADS[name]) for name in PARAMS}
    return [dict(zip(whole, values, strict=True)) for values in zip(*whole.values(), strict=True)]


@pytest.mark.parametrize(
    ("kind", "combined"),
    tiered(
        itertools.product(KINDS, COMBINED),
        lambda row: (
            row
            in [
                ("local", "multi_transform"),
                ("delay", "inject_hyperparams"),
                ("average", "masked"),
            ]
        ),
    ),
)
def test_inside_of_optax(kind, combined, ways, x64):
    (make, rule), (combine, rest) = KINDS[kind], COMBINED[combined]
    expected = expected_of({"w": rule, "b": rest, "s": rest})
    for way in ("vmap", "shard_map"):
        found = ways[way](trajectory(combine(make), jax.tree.map(jnp.asarray, PARAMS)), N)(
            jax.tree.map(jnp.asarray, GRADS)
        )
        # injected rates are fp32
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
        jax.tree.map(close, found, expected)


# jax says that it truncates
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_a_state_of_double_precision_goes_on_in_single():
    """A branch that only hands it on would else return what no branch can compute where
    jax_enable_x64 is off.
    """
    tx = T.accumulate(optax.adam(RATE), 2)
    grads = {name: x[0] for name, x in GRADS.items()}

    def run(precisions):
        state = updates = None
        for t, double in enumerate(precisions):
            with jax.enable_x64(double):
                state = tx.init(jax.tree.map(jnp.asarray, PARAMS)) if state is None else state
                updates, state = tx.update(
                    {name: jnp.asarray(x[t]) for name, x in grads.items()}, state
                )
        return updates

    found, expected = run([True, True, True, False]), run([False] * 4)
    for name, x in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], x, rtol=1e-5)
