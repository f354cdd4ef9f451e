"""The server is a state machine: each transition is tested, and is a pure function."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardopt.core._types import TrainState
from shardopt.parameter_server import NonFiniteUpdateError, make_server, make_update, rules

pytestmark = pytest.mark.fast


def started(server, workers=3, params=None):
    state = server.init({"w": jnp.arange(2.0)} if params is None else params)
    for worker in range(workers):
        state, _ = server.join(state, worker)
    return state


def push(server, state, worker, gradient, **options):
    update = make_update({"w": jnp.asarray(gradient, jnp.float32)}, **options)
    return server.push(state, worker, update, state.working[worker].version)


def test_without_staleness_the_mean_is_applied_once_all_have_pushed():
    server = make_server(optax.sgd(1.0), max_staleness=0)
    state = started(server)
    for worker in range(3):
        state, event = server.pull(state, worker)
        assert (event.version, event.staleness) == (0, 0)
    for worker, gradient in ((2, [3.0, 0.0]), (0, [0.0, 6.0])):
        state, event = push(server, state, worker, gradient)
        assert event.version == 0
        assert not server.may_pull(state, worker)
    state, event = push(server, state, 1, [0.0, 0.0])
    assert event.version == 1
    np.testing.assert_allclose(state.params["w"], [-1.0, -1.0])


def test_lookahead_is_refused_by_the_type_of_its_state():
    server = make_server(
        optax.chain(optax.clip(1.0), optax.lookahead(optax.sgd(1.0), 5, 0.5)), max_staleness=0
    )
    with pytest.raises(
        ValueError, match=r"^parameter_server: optax.lookahead steps two copies of the parameters, "
    ):
        server.init({"w": jnp.arange(2.0)})


def test_weights_and_rows_make_it_the_mean_of_the_union():
    server = make_server(optax.sgd(1.0), max_staleness=0)
    state = started(server, 2)
    for worker in (0, 1):
        state, _ = server.pull(state, worker)
    state, _ = push(server, state, 0, [2.0, 2.0], weight=0.5, rows=4, loss=1.0)
    state, _ = push(server, state, 1, [8.0, 0.0], weight=2.0, rows=1, loss=6.0)
    np.testing.assert_allclose(state.params["w"], [0.0 - 16 / 4, 1.0 - 8 / 4])
    np.testing.assert_allclose(state.metrics["loss"], 10 / 4)


def test_the_order_of_arrival_leaves_no_trace_where_a_clock_is_applied_as_one():
    server = make_server(optax.adam(0.1), max_staleness=0)
    draw = np.random.default_rng(0)
    gradients = [draw.normal(size=2) * 10.0**k for k in range(3)]
    finals = set()
    for order in itertools.permutations(range(3)):
        state = started(server)
        for worker in order:
            state, _ = server.pull(state, worker)
        for worker in order:
            state, _ = push(server, state, worker, gradients[worker])
        finals.add(np.asarray(state.params["w"]).tobytes())
    assert len(finals) == 1


def test_with_staleness_each_push_is_applied_as_it_comes():
    server = make_server(optax.sgd(1.0), max_staleness=1)
    state = started(server, 2)
    for worker in (0, 1):
        state, _ = server.pull(state, worker)
    state, event = push(server, state, 1, [1.0, 0.0], weight=2.0)
    assert (event.version, event.pulled, event.delay) == (1, 0, 0)
    np.testing.assert_allclose(state.params["w"], [-0.5, 1.0])
    state, event = push(server, state, 0, [0.0, 1.0])
    assert (event.version, event.pulled, event.delay) == (2, 0, 1)
    np.testing.assert_allclose(state.params["w"], [-0.5, 0.0])


def test_a_transition_is_a_function_and_leaves_its_argument_alone():
    server = make_server(optax.adam(0.1), max_staleness=2)
    state, _ = server.pull(started(server), 0)
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    once, twice = (push(server, state, 0, [1.0, -1.0]) for _ in range(2))
    assert once[1] == twice[1]
    np.testing.assert_array_equal(once[0].params["w"], twice[0].params["w"])
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert dict(state.clock.steps) == {0: 0, 1: 0, 2: 0}
    server.pull(state, 1)
    assert set(state.working) == {0}


def test_donating_takes_over_the_optimizer_state_but_never_parameters():
    server = make_server(optax.adam(0.1), max_staleness=2, donate=True)
    state, _ = server.pull(started(server), 0)
    after, _ = push(server, state, 0, [1.0, -1.0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert not state.params["w"].is_deleted()
    plain = make_server(optax.adam(0.1), max_staleness=2)
    expected, _ = push(plain, plain.pull(started(plain), 0)[0], 0, [1.0, -1.0])
    np.testing.assert_array_equal(after.params["w"], expected.params["w"])


def test_the_second_update_compiles_nothing():
    server = make_server(optax.adam(0.1), max_staleness=None)
    state = started(server, params={"w": np.ones(2, np.float32), "scale": 2.0})
    updates = [make_update({"w": jnp.full(2, x), "scale": jnp.array(x)}) for x in (1.0, 2.0)]
    state, pulled = server.pull(state, 0)
    state, _ = server.push(state, 0, updates[0], pulled.version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax._src.compiler,
            "compile_or_get_cached",
            lambda *_, **__: pytest.fail("compiled again"),
        )
        state, pulled = server.pull(state, 1)
        state, _ = server.push(state, 1, updates[1], pulled.version)
    assert state.version == 2


def test_leaves_that_are_not_floating_are_not_trained():
    params = {"w": jnp.ones(2), "count": jnp.int32(3), "key": jax.random.key(0)}
    server = make_server(optax.sgd(1.0), max_staleness=1)
    state, pulled = server.pull(started(server, 1, params), 0)
    update = make_update({"w": jnp.ones(2), "count": None, "key": None})
    state, _ = server.push(state, 0, update, pulled.version)
    np.testing.assert_allclose(state.params["w"], 0.0)
    assert int(state.params["count"]) == 3
    assert state.params["key"] == jax.random.key(0)


def test_whoever_leaves_is_no_longer_waited_for_and_its_half_step_is_lost(message_of):
    server = make_server(optax.sgd(1.0), max_staleness=0)
    state = started(server)
    for worker in range(3):
        state, _ = server.pull(state, worker)
    for worker in (0, 1):
        state, _ = push(server, state, worker, [2.0 * worker, 0.0])
    state, event = server.leave(state, 2)
    assert event.version == 1
    np.testing.assert_allclose(state.params["w"], [-1.0, 1.0])
    assert (
        message_of(ValueError, server.push, state, 2, make_update({"w": jnp.ones(2)}), 0)
        == "parameter_server: worker 2 is not among the 2 workers (0, 1).\n"
        "Fix: let it join; what a worker pushes after it left is lost."
    )


def test_what_was_pushed_before_leaving_counts():
    server = make_server(optax.sgd(1.0), max_staleness=0)
    state = started(server, 2)
    for worker in (0, 1):
        state, _ = server.pull(state, worker)
    state, _ = push(server, state, 0, [4.0, 0.0])
    state, _ = server.leave(state, 0)
    state, _ = server.join(state, 0)  # and once more in the same clock
    state, _ = server.pull(state, 0)
    state, _ = push(server, state, 0, [0.0, 4.0])
    assert state.version == 0
    state, event = server.leave(state, 1)
    assert event.version == 1
    np.testing.assert_allclose(state.params["w"], [-2.0, -1.0])
    state, _ = server.leave(state, 0)
    state, event = server.join(state, 5)
    assert (event.clock, event.version) == (1, 1)


def test_a_newcomer_takes_part_in_the_open_clock():
    server = make_server(optax.sgd(1.0), max_staleness=0)
    state = started(server, 2)
    for worker in (0, 1):
        state, _ = server.pull(state, worker)
    state, _ = push(server, state, 0, [3.0, 0.0])
    state, event = server.join(state, 2)
    assert event.clock == 0
    state, _ = push(server, state, 1, [3.0, 0.0])
    assert state.version == 0
    state, _ = server.pull(state, 2)
    state, event = push(server, state, 2, [3.0, 3.0])
    assert event.version == 1
    np.testing.assert_allclose(state.params["w"], [-3.0, 0.0])


@pytest.mark.parametrize("max_staleness", [0, 1, None])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_and_named(max_staleness, bad):
    server = make_server(optax.sgd(1.0), max_staleness=max_staleness)
    state, _ = server.pull(started(server, 2), 1)
    with pytest.raises(NonFiniteUpdateError) as caught:
        push(server, state, 1, [0.0, bad], loss=bad)
    assert (
        str(caught.value) == "parameter_server: the push of worker 1 at its step 0 was refused:\n"
        "  loss: not finite\n"
        "  w: not finite\n"
        'Fix: look at the data and the learning rate, or drop such pushes with nonfinite="skip".'
    )
    assert (caught.value.worker, caught.value.clock) == (1, 0)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_push_that_is_not_finite_may_be_skipped(max_staleness):
    server = make_server(optax.sgd(1.0), max_staleness=max_staleness, nonfinite="skip")
    state = started(server, 2)
    for worker in (0, 1):
        state, _ = server.pull(state, worker)
    state, event = push(server, state, 1, [np.nan, 0.0])
    assert (event.kind, event.version) == ("refuse", 0)
    assert state.clock.steps[1] == 1
    state, event = push(server, state, 0, [1.0, 1.0])
    assert (event.kind, event.version) == ("push", 1)
    np.testing.assert_allclose(state.params["w"], [-1.0, 0.0])


def test_rows_without_weight_count_for_nothing_beside_others_and_are_refused_alone():
    server = make_server(optax.sgd(1.0), max_staleness=0, nonfinite="skip")
    state = started(server, 2)
    for gradient in ([2.0, 0.0], [0.0, 0.0]):
        for worker in (0, 1):
            state, _ = server.pull(state, worker)
        state, _ = push(server, state, 0, gradient, weight=gradient[0] / 2)
        state, _ = push(server, state, 1, [0.0, 0.0], weight=0.0)
        np.testing.assert_allclose(state.params["w"], [-2.0, 1.0])
        assert state.version == 1
    late = make_server(optax.sgd(1.0), max_staleness=1)
    state, _ = late.pull(started(late), 0)
    with pytest.raises(NonFiniteUpdateError, match="loss: its weight is 0"):
        push(late, state, 0, [0.0, 0.0], weight=0.0)


def pull_twice(server, state):
    server.pull(state, 0)


def push_without_pull(server, state):
    server.push(state, 1, make_update({"w": jnp.ones(2)}), 0)


def push_another_version(server, state):
    server.push(state, 0, make_update({"w": jnp.ones(2)}), 7)


def push_something(server, state):
    server.push(state, 0, {"w": jnp.ones(2)}, 0)


def push_another_shape(server, state):
    server.push(state, 0, make_update({"w": jnp.ones(3, jnp.int32)}), 0)


def push_another_structure(server, state):
    server.push(state, 0, make_update({"v": jnp.ones(2)}), 0)


def join_twice(server, state):
    server.join(state, 1)


def join_as_minus_one(server, state):
    server.join(state, -1)


def leave_from_nowhere(server, state):
    server.leave(state, 9)


MESSAGES = {
    pull_twice: (
        ValueError,
        (
            "parameter_server: worker 0 cannot pull: it has not pushed its step 0 yet.\n"
            "Fix: push first, or let it leave and join again."
        ),
    ),
    push_without_pull: (
        ValueError,
        (
            "parameter_server: worker 1 pushes for version 0 at its step 0, but has pulled"
            " nothing.\nFix: push once for each pull, with the version of its event."
        ),
    ),
    push_another_version: (
        ValueError,
        (
            "parameter_server: worker 0 pushes for version 7 at its step 0, but has pulled version"
            " 0.\nFix: push once for each pull, with the version of its event."
        ),
    ),
    push_something: (
        TypeError,
        (
            "parameter_server: worker 0 must push an Update, got dict.\n"
            "Fix: make one with parameter_server.make_update(grads)."
        ),
    ),
    push_another_shape: (
        ValueError,
        (
            "parameter_server: 1 leaf of the push of worker 0 does not fit.\n"
            "  w: int32[3], the parameter is float32[2]\n"
            "Fix: push gradients of the parameters' own shapes and dtypes."
        ),
    ),
    push_another_structure: (
        ValueError,
        (
            "parameter_server: the push of worker 0 has another structure than the trained"
            " parameters.\n  v: pushed, but not a trained parameter\n  w: missing\nFix: push the"
            " gradient of the parameters that were pulled."
        ),
    ),
    join_twice: (
        ValueError,
        (
            "parameter_server: worker 1 cannot join: it is there already, at clock 0.\n"
            "Fix: let it leave first, or give the newcomer a number of its own."
        ),
    ),
    join_as_minus_one: (ValueError, "parameter_server: worker must be at least 0, got -1."),
    leave_from_nowhere: (
        ValueError,
        (
            "parameter_server: worker 9 is not among the 3 workers (0, 1, 2).\n"
            "Fix: let it join; what a worker pushes after it left is lost."
        ),
    ),
}


@pytest.mark.parametrize("do", MESSAGES, ids=lambda do: do.__name__)
def test_transitions_that_cannot_be_are_refused(do):
    server = make_server(optax.sgd(1.0), max_staleness=1)
    state, _ = server.pull(started(server), 0)
    error, message = MESSAGES[do]
    with pytest.raises(error) as caught:
        do(server, state)
    assert str(caught.value) == message


def test_a_worker_beyond_the_bound_cannot_pull(message_of):
    server = make_server(optax.sgd(1.0), max_staleness=0)
    state, _ = server.pull(started(server), 0)
    state, _ = push(server, state, 0, [0.0, 0.0])
    assert (
        message_of(ValueError, server.pull, state, 0)
        == "parameter_server: worker 0 cannot start step 1: the slowest is at 0, and"
        " max_staleness=0.\nFix: ask may_pull first."
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: make_server(optax.sgd),
            TypeError,
            (
                "parameter_server: tx must be an optax.GradientTransformation, got function.\n"
                "Fix: pass an optimizer such as optax.adamw(1e-3), called, not the function itself."
            ),
        ),
        (
            lambda: make_server(None, max_staleness=-1),
            ValueError,
            (
                "parameter_server: max_staleness must be at least 0, got -1.\nFix: 0 waits at every"
                " step, s lets the fastest run s steps ahead, None never waits."
            ),
        ),
        (
            lambda: make_server(None, max_staleness=1.5),
            TypeError,
            (
                "parameter_server: max_staleness must be an integer or None, got 1.5 (float).\nFix:"
                " 0 waits at every step, s lets the fastest run s steps ahead, None never waits."
            ),
        ),
        (
            lambda: make_server(None, rule="dc_asgd"),
            TypeError,
            (
                "parameter_server: rule must be a StalenessRule or None, got str.\n"
                "Fix: call one of parameter_server.rules, such as rules.dc_asgd()."
            ),
        ),
        (
            lambda: make_server(None, rule=rules.StalenessRule("mine", {"by": {1}})),
            TypeError,
            (
                "parameter_server: the config of rule 'mine' cannot be written to a log: {'by':"
                " {1}}.\nFix: keep plain numbers and strings in it."
            ),
        ),
        (
            lambda: make_server(None, nonfinite="ignore"),
            ValueError,
            "parameter_server: nonfinite must be 'raise' or 'skip', got 'ignore'.",
        ),
        (
            lambda: make_server(optax.sgd(1.0)).init({"n": jnp.int32(1)}),
            ValueError,
            (
                "parameter_server: nothing is trainable among 1 parameter leaf.\nFix: pass floating"
                " leaves."
            ),
        ),
        (
            lambda: make_server(optax.sgd(1.0)).init(
                {"w": "a", "v": jax.ShapeDtypeStruct((2,), jnp.float32)}
            ),
            TypeError,
            (
                "parameter_server: parameters must be a pytree of arrays.\n"
                "  v: ShapeDtypeStruct\n  w: str\nFix: pass arrays with values."
            ),
        ),
        (
            lambda: make_server(optax.sgd(1.0)).init(TrainState(0, {}, (), None)),
            TypeError,
            "parameter_server: parameters were expected, got a TrainState.\nFix: pass its .params.",
        ),
    ],
)
def test_bad_input_is_refused(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message
