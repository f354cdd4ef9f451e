import gc
import re
import signal
import weakref

import jax
import numpy as np
import pytest
from support.compilations import compilations

from shardopt.core import NonFiniteLossError
from shardopt.core._early_stopping import EarlyStopping
from shardopt.training import evaluation
from shardopt.training._fit import fit

SPEED = {"steps_per_second", "examples_per_second", "goodput"}


def plain_loop(opt, state, batches):
    """The reference: steps, and nothing else."""
    metrics = []
    for batch in batches:
        state, step_metrics = opt.step(state, batch)
        metrics.append(jax.device_get(step_metrics))
    return state, metrics


def test_it_is_the_plain_loop(opt, new_state, batches, same):
    result = fit(opt, new_state(), batches, num_steps=25, log_every=10, progress=False)
    state, metrics = plain_loop(opt, new_state(), batches[:25])
    assert same(result.state, state)
    assert (result.step, result.stopped, result.best) == (25, "completed", None)
    assert [record["step"] for record in result.history] == [10, 20, 25]
    for record in result.history:
        assert set(record) == {"step", "loss", "grad_norm", "error"} | SPEED
        for name, value in metrics[record["step"] - 1].items():
            assert record[name] == value


def test_num_steps_counts_from_the_state(opt, new_state, batches, same):
    stream = iter(batches)
    first = fit(opt, new_state(), stream, num_steps=7, progress=False)
    second = fit(opt, first.state, stream, num_steps=20, progress=False)
    assert (first.step, second.step) == (7, 20)
    assert same(second.state, fit(opt, new_state(), batches, num_steps=20, progress=False).state)


@pytest.mark.parametrize("num_steps", [0, 12])
def test_a_result_prints_a_few_lines_without_arrays(opt, new_state, batches, num_steps):
    rule = EarlyStopping("loss", patience=100)
    result = fit(
        opt, new_state(), batches, num_steps=num_steps, early_stopping=rule, progress=False
    )
    lines = repr(result).splitlines()
    assert str(result) == repr(result)
    assert lines[0] == f"FitResult: completed at step {num_steps}"
    assert max(map(len, lines)) < 160
    text = "\n".join(lines[1:])
    num_elements = sum(leaf.size for leaf in jax.tree.leaves(result.state.params))
    assert f"state: {num_elements:,} parameters" in text
    assert "goodput" in text
    has_metrics = num_steps > 0
    assert ("best: step" in text) == has_metrics
    assert ("last metrics: step 12  loss" in text) == has_metrics


@pytest.mark.parametrize("num_steps", [0, 3, 5])
def test_without_steps_left_fit_changes_nothing(opt, new_state, batches, num_steps):
    state = fit(opt, new_state(), batches, num_steps=5, progress=False).state
    result = fit(opt, state, batches, num_steps=num_steps, evaluate=pytest.fail, progress=False)
    assert (result.step, result.stopped, result.history) == (5, "completed", [])
    assert int(result.state.step) == 5


@pytest.mark.parametrize("count", [0, 12, 20])
def test_a_run_ends_when_its_batches_are_exhausted(opt, new_state, batches, memory, count):
    checkpoints = memory(5)
    logged = []

    def log(step, metrics):
        return logged.append(step)

    result = fit(
        opt,
        new_state(),
        batches[:count],
        num_steps=30,
        checkpoints=checkpoints,
        log=log,
        log_every=20,
        progress=False,
    )
    assert (result.step, result.stopped) == (count, "exhausted")
    assert max(checkpoints.disk) == count
    assert logged == ([count] if count else [])


def test_steps_do_not_compile_again(opt, new_state, batches):
    fit(opt, new_state(), batches, num_steps=5, progress=False)
    state = new_state()
    with compilations() as compiled:
        fit(opt, state, batches, num_steps=30, log_every=3, progress=False)
    assert compiled == []
    with compilations() as compiled:  # the detector itself
        jax.jit(lambda x: x + 1)(np.ones(3))
    assert len(compiled) == 1


def test_speed_counts_steps_and_examples(opt, new_state, batches):
    history = fit(opt, new_state(), batches, num_steps=40, log_every=10, progress=False).history
    for record in history:
        assert record["examples_per_second"] == pytest.approx(8 * record["steps_per_second"])
        assert record["steps_per_second"] > 0


def test_evaluation_with_each_checkpoint_and_at_the_end(
    opt, new_state, batches, memory, metrics_at
):
    checkpoints = memory(10)
    seen = []

    def evaluate(state):
        seen.append(int(state.step))
        return {"twice": 2 * state.step, "half": np.float32(0.5)}

    result = fit(
        opt,
        new_state(),
        batches,
        num_steps=25,
        evaluate=evaluate,
        checkpoints=checkpoints,
        progress=False,
    )
    assert seen == [10, 20, 25]
    assert metrics_at(result.history, "twice") == {10: 20, 20: 40, 25: 50}
    assert {step: metrics["twice"] for step, (_, _, metrics) in checkpoints.disk.items()} == {
        10: 20,
        20: 40,
        25: 50,
    }


def test_evaluations_come_at_their_interval(opt, new_state, batches, memory, metrics_at):
    def evaluate(state):
        return {"at": int(state.step)}

    checkpoints = memory(10)
    logged = []
    result = fit(
        opt,
        new_state(),
        batches,
        num_steps=20,
        evaluate=(evaluate, 8),
        checkpoints=checkpoints,
        log=lambda step, metrics: logged.append((step, set(metrics) - SPEED)),
        progress=False,
    )
    assert metrics_at(result.history, "at") == {8: 8, 16: 16, 20: 20}
    training = {"loss", "grad_norm", "error"}
    assert logged == [
        (8, training | {"at"}),
        (10, training),
        (16, training | {"at"}),
        (20, training | {"at"}),
    ]
    assert "at" not in checkpoints.disk[10][2]
    assert checkpoints.disk[20][2]["at"] == 20
    assert [record["step"] for record in result.history] == [8, 10, 16, 20]


def test_evaluation_helper_is_the_mean_over_examples(opt, new_state, batches):
    state = new_state()
    uneven = [batches[0], jax.tree.map(lambda rows: rows[:2], batches[1])]
    metrics = evaluation(opt, uneven)(state)
    y = np.concatenate([batch["y"] for batch in uneven])
    assert metrics == pytest.approx(
        {"val_loss": (y**2).mean(), "val_error": np.abs(y).mean()}, rel=1e-6
    )
    assert y.shape == (10,)
    # nothing was donated
    fit(opt, state, batches, num_steps=2, evaluate=evaluation(opt, uneven), progress=False)


def test_evaluation_helper_refuses_what_ends(opt, new_state, batches):
    message = (
        "evaluation: batches must be iterable more than once, got an iterator (list_iterator).\n"
        "Fix: pass list(itertools.islice(batches, n))."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        evaluation(opt, iter(batches))
    with pytest.raises(
        ValueError, match=r"^evaluation: there are no examples in batches\.\nFix: pass at least one"
    ):
        evaluation(opt, [])(new_state())


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        (
            0.5,
            TypeError,
            (
                'fit: evaluate must return a dict of numbers, got float.\nFix: return {"val_loss":'
                " ...}."
            ),
        ),
        (
            {"a": 1, "b": np.ones(3), "c": "x"},
            TypeError,
            (
                "fit: evaluate must return a dict of numbers.\n  'b': array([1., 1., 1.])\n  'c':"
                " 'x'\nFix: reduce each to one number."
            ),
        ),
        (
            {"a": 1, "b": 1j, "c": None, "d": [1, 2]},
            TypeError,
            (
                "fit: evaluate must return a dict of numbers.\n  'b': 1j\n  'c': None\n  'd': [1, 2]"
                "\nFix: reduce each to one number."
            ),
        ),
        (
            {"loss": 1.0},
            ValueError,
            (
                "fit: evaluate returned 'loss', which training reports too.\nFix: give it another"
                " name, such as 'val_loss'."
            ),
        ),
    ],
)
def test_strange_results_of_an_evaluation_are_refused(
    opt, new_state, batches, returned, kind, message
):
    with pytest.raises(kind) as caught:
        fit(opt, new_state(), batches, num_steps=2, evaluate=lambda state: returned, progress=False)
    assert str(caught.value) == message


def test_metrics_must_be_scalars(opt, new_state, batches):
    def step(state, batch):
        state, metrics = opt.step(state, batch)
        return state, metrics | {"rows": np.ones(3), "text": "x"}

    with pytest.raises(ValueError, match="metrics must") as caught:
        fit(opt._replace(step=step), new_state(), batches, num_steps=9, progress=False)
    assert (
        str(caught.value)
        == "fit: metrics must be scalars.\n  metrics['rows']: shape (3,)\n  metrics['text']: str\n"
        "Fix: reduce it to one number in the aux dict of loss_fn."
    )


class TroubleError(Exception):
    pass


@pytest.mark.parametrize("failing_part", ["log", "evaluate", "batches", "step"])
def test_exceptions_pass_through_after_cleanup(opt, new_state, batches, memory, failing_part):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    checkpoints = memory(5)
    closed = []

    def fail(*_):
        raise TroubleError

    def failing_batches():
        yield from batches[:12]
        fail()

    class Log:
        def __call__(self, step, metrics):
            if failing_part == "log" and step > 10:
                fail()

        def close(self):
            closed.append(True)

    def step(state, batch):
        return opt.step(state, batch) if int(state.step) < 12 else fail()

    with pytest.raises(TroubleError):
        fit(
            opt._replace(step=step) if failing_part == "step" else opt,
            new_state(),
            failing_batches() if failing_part == "batches" else batches,
            num_steps=30,
            evaluate=(fail, 12) if failing_part == "evaluate" else None,
            checkpoints=checkpoints,
            log=Log(),
            log_every=4,
            progress=False,
        )
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert set(checkpoints.disk) == {5, 10}
    assert checkpoints.pending == {}
    assert closed == [True]


def test_the_state_is_used_up(opt, new_state, batches):
    state = new_state()
    fit(opt, state, batches, num_steps=2, progress=False)
    message = (
        "fit: the state was already used: a step takes over the memory of the state it is given.\n"
        "Fix: pass the state that the last step or fit returned, or a new one."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(opt, state, batches, num_steps=2, progress=False)


def test_the_state_is_freed_with_the_result(opt, new_state, batches, memory):
    """It takes no garbage collector, which does not run because the memory of a device is full."""
    checkpoints = memory(5)
    gc.disable()
    try:
        result = fit(
            opt, new_state(), batches, num_steps=6, checkpoints=checkpoints, progress=False
        )
        leaf = weakref.ref(result.state.step)
        checkpoints.pending.clear()
        del result
        assert leaf() is None
    finally:
        gc.enable()


def test_non_finite_error_is_what_users_can_catch():
    assert issubclass(NonFiniteLossError, FloatingPointError)
