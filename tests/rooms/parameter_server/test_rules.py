"""Every rule, through the server, against the formula of its paper written in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardopt.parameter_server import make_server, make_update, rules

pytestmark = pytest.mark.fast

LR = 0.1
EVERY = 3
BETA = 0.8


def plain(w, g, old, tau, memory):
    return w - LR * g


def staleness_learning_rate(w, g, old, tau, memory):
    return w - LR / max(1, tau) * g


def dc_asgd(w, g, old, tau, memory):
    return w - LR * (g + 0.7 * g * g * (w - old))


def delayed_nesterov(c):
    def step(w, g, old, tau, memory):
        memory["t"] = memory.get("t", -1) + 1
        buffer = memory["buffer"] = memory.get("buffer", 0.0) + g
        m = memory.get("m", 0.0)
        if (memory["t"] + 1) % EVERY:
            return w - LR * (c * BETA * m + g / EVERY)
        m = memory["m"] = BETA * m + buffer / EVERY
        memory["buffer"] = 0.0
        return w - LR * ((1 - c * EVERY + c) * BETA * m + g / EVERY)

    return step


CASES = {
    "none": (None, plain),
    "plain": (rules.plain(), plain),
    "staleness_learning_rate": (rules.staleness_learning_rate(), staleness_learning_rate),
    "dc_asgd": (rules.dc_asgd(0.7), dc_asgd),
    "delayed_nesterov": (rules.delayed_nesterov(EVERY, BETA), delayed_nesterov(0.0)),
    "delayed_nesterov, active": (
        rules.delayed_nesterov(EVERY, BETA, activation=0.2),
        delayed_nesterov(0.2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule_follows_its_formula(name, x64):
    """Three workers push in random order.

    The loss is sum (w^4 + a w), and its gradient is taken at the parameters that the worker pulled.
    """
    rule, reference = CASES[name]
    draw = np.random.default_rng(5)
    server = make_server(optax.sgd(LR), max_staleness=None, rule=rule)
    start = draw.normal(size=4)
    state = server.init({"w": jnp.asarray(start)})
    w = start
    memory = {}
    pulled = {}
    delays = set()
    for worker in range(3):
        state, _ = server.join(state, worker)
    for _ in range(60):
        worker = int(draw.integers(3))
        if worker not in pulled:
            state, event = server.pull(state, worker)
            pulled[worker] = (event.version, w.copy())
            np.testing.assert_allclose(state.params["w"], w, rtol=1e-12)
            continue
        version, old = pulled.pop(worker)
        g = 0.2 * (4 * old**3 + draw.normal(size=4))
        tau = state.version - version
        w = reference(w, g, old, tau, memory)
        state, event = server.push(state, worker, make_update({"w": jnp.asarray(g)}), version)
        assert event.delay == tau
        delays.add(tau)
        np.testing.assert_allclose(state.params["w"], w, rtol=1e-12)
    assert {0, 1, 2} <= delays


@pytest.mark.parametrize("name", ["plain", "staleness_learning_rate", "dc_asgd"])
def test_a_rule_changes_nothing_where_nobody_is_late(name, x64):
    finals = []
    for rule in (None, CASES[name][0]):
        server = make_server(optax.adamw(0.1), max_staleness=0, rule=rule)
        state = server.init({"w": jnp.arange(3.0)})
        for worker in (0, 1):
            state, _ = server.join(state, worker)
        for step in range(4):
            for worker in (0, 1):
                state, pulled = server.pull(state, worker)
            for worker in (1, 0):
                update = make_update({"w": jnp.full(3, 1.0 + worker + step)})
                state, _ = server.push(state, worker, update, pulled.version)
        finals.append(np.asarray(state.params["w"]))
    np.testing.assert_allclose(*finals, rtol=1e-14)  # the compiler may fuse the two differently


def test_delayed_nesterov_over_whole_rounds_is_nesterov_on_the_mean(x64):
    """N pushes of the same gradient move as far as one step of optax's Nesterov momentum on it."""
    draw = np.random.default_rng(0)
    tx = optax.sgd(LR)
    nesterov = optax.sgd(LR, momentum=BETA, nesterov=True)
    rule = rules.delayed_nesterov(EVERY, BETA)
    w = params = {"w": jnp.asarray(draw.normal(size=3))}
    expected = w
    state = tx.init(w)
    opt_state = nesterov.init(w)
    memory = rule.init(w)
    for _ in range(5):
        g = {"w": jnp.asarray(draw.normal(size=3))}
        for _ in range(EVERY):
            step, memory = rule.gradient(g, memory, params=params, pulled=params, delay=0)
            updates, state = tx.update(step, state)
            params = optax.apply_updates(params, updates)
        updates, opt_state = nesterov.update(g, opt_state)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_half_precision_stays_half_precision_and_is_remembered_in_full(name):
    rule = CASES[name][0] or rules.plain()
    w = {"w": jnp.ones(3, jnp.bfloat16)}
    state = rule.init(w)
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))
    grads, after = rule.gradient(w, state, params=w, pulled=w, delay=jnp.int32(2))
    assert grads["w"].dtype == jnp.bfloat16
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_the_learning_rate_falls_also_for_optimizers_that_do_not_mind_the_size_of_gradients():
    moved = []
    for delay in (1, 4):
        server = make_server(
            optax.adam(0.1), max_staleness=None, rule=rules.staleness_learning_rate()
        )
        state = server.init({"w": jnp.zeros(2)})
        for worker in (0, 1):
            state, _ = server.join(state, worker)
        state, first = server.pull(state, 0)
        for _ in range(delay):
            state, pulled = server.pull(state, 1)
            state, _ = server.push(state, 1, make_update({"w": jnp.ones(2)}), pulled.version)
        before = state.params["w"]
        state, _ = server.push(state, 0, make_update({"w": jnp.ones(2)}), first.version)
        moved.append(float(jnp.abs(state.params["w"] - before).max()))
    assert moved[1] == pytest.approx(moved[0] / 4, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: rules.dc_asgd(-1.0),
            ValueError,
            "dc_asgd: strength must be finite, at least 0; got -1.0.",
        ),
        (
            lambda: rules.dc_asgd("a"),
            TypeError,
            "dc_asgd: strength must be a number, got 'a' (str).",
        ),
        (
            lambda: rules.delayed_nesterov(0),
            ValueError,
            "delayed_nesterov: every must be at least 1, got 0.",
        ),
        (
            lambda: rules.delayed_nesterov(4, activation=0.3),
            ValueError,
            "delayed_nesterov: activation must be at most 1/every = 0.25, got 0.3.",
        ),
        (
            lambda: rules.delayed_nesterov(4, float("nan")),
            ValueError,
            "delayed_nesterov: momentum must be finite, at least 0 and below 1; got nan.",
        ),
    ],
)
def test_bad_input_is_refused(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message
