import json
import math
import re

import pytest

from shardopt.core._early_stopping import (
    StoppingState,
    best,
    from_json,
    out_of_patience,
    to_json,
    update,
)
from shardopt.training import EarlyStopping
from shardopt.training._fit import fit

pytestmark = pytest.mark.fast


def observe(rule, values):
    """Return the index at which the values stop the run, or None, and the last state."""
    state = StoppingState()
    for i, value in enumerate(values):
        state = update(rule, state, i, {rule.metric: value})
        if out_of_patience(rule, state):
            return i, state
    return None, state


@pytest.mark.parametrize(
    ("options", "values", "stops_at", "best_at"),
    [
        ({"patience": 1}, [3, 2, 1, 1], 3, 2),  # equal is no improvement
        ({"patience": 2}, [3, 4, 2, 3, 1, 2, 2], 6, 4),  # waiting starts again after each best
        ({"patience": 3}, [1, 2, 2], None, 0),
        ({"patience": 1, "mode": "max"}, [1, 2, 3, 2], 3, 2),
        ({"patience": 1, "mode": "max"}, [3, 2], 1, 0),
        # 2.5 is not below 3.0 - 0.5
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.5, 2.4], 2, 0),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.4, 2.0, 2.0], 4, 2),
        ({"patience": 2, "min_delta": 0.5, "mode": "max"}, [1.0, 1.5, 1.6, 2.0, 2.1], 4, 2),
        ({"patience": 2}, [math.nan, math.nan, 1], 1, None),
        ({"patience": 2}, [math.nan, 1, math.nan, 0, math.nan, math.nan], 5, 3),
        ({"patience": 2}, [math.inf, 1, 2, 2], 3, 1),
    ],
)
def test_early_stopping_follows_its_rule(options, values, stops_at, best_at):
    rule = EarlyStopping("loss", **options)
    stopped, state = observe(rule, values)
    assert (stopped, state.best_step) == (stops_at, best_at)
    assert best(rule, state) == (
        None if best_at is None else {"step": best_at, "loss": values[best_at]}
    )


def test_the_state_survives_json_and_does_not_pass_to_another_metric():
    rule = EarlyStopping("loss", patience=5)
    for _, state in (observe(rule, []), observe(rule, [3.0, 1.5, 2.0])):
        saved = json.loads(json.dumps(to_json(rule, state)))
        assert from_json(rule, saved) == state
        assert from_json(EarlyStopping("loss", patience=2, min_delta=0.1), saved) == state
        assert from_json(EarlyStopping("loss", patience=5, mode="max"), saved) is None
        assert from_json(EarlyStopping("other", patience=5), saved) is None


def test_without_the_metric_or_the_rule_nothing_is_observed():
    state = StoppingState(best=1.0, best_step=3, wait=2)
    assert update(EarlyStopping("loss", patience=1), state, 5, {"other": 0.0}) is state
    assert update(None, state, 5, {"loss": 0.0}) is state
    assert out_of_patience(None, state) is None
    assert best(None, state) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": ""}, "EarlyStopping: metric must not be empty."),
        ({"patience": 0}, "EarlyStopping: patience must be at least 1, got 0."),
        ({"patience": -3}, "EarlyStopping: patience must be at least 1, got -3."),
        ({"min_delta": -0.1}, "EarlyStopping: min_delta must be finite, at least 0; got -0.1."),
        ({"min_delta": math.nan}, "EarlyStopping: min_delta must be finite, at least 0; got nan."),
        ({"min_delta": math.inf}, "EarlyStopping: min_delta must be finite, at least 0; got inf."),
        ({"mode": "least"}, "EarlyStopping: unknown mode 'least'.\nFix: use 'min' or 'max'."),
    ],
)
def test_wrong_values_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        EarlyStopping(**{"metric": "loss", "patience": 2} | arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"metric": 1},
        {"patience": "2"},
        {"patience": 2.0},
        {"patience": True},
        {"min_delta": "0"},
        {"mode": 1},
    ],
)
def test_wrong_kinds_are_refused(arguments):
    with pytest.raises(TypeError):
        EarlyStopping(**{"metric": "loss", "patience": 2} | arguments)


def test_it_ends_a_run_on_a_training_metric(opt, new_state, batches):
    def step(state, batch):
        state, metrics = opt.step(state, batch)
        return state, metrics | {"sawtooth": -(state.step % 12)}

    result = fit(
        opt._replace(step=step),
        new_state(),
        batches,
        num_steps=40,
        early_stopping=EarlyStopping("sawtooth", patience=2),
        log_every=4,
        progress=False,
    )
    assert (result.step, result.stopped, result.best) == (16, "early", {"step": 8, "sawtooth": -8})
    assert [record["step"] for record in result.history] == [4, 8, 12, 16]


def test_it_ends_a_run_on_an_evaluation_metric(opt, new_state, batches, memory):
    checkpoints = memory(7)
    result = fit(
        opt,
        new_state(),
        batches,
        num_steps=40,
        evaluate=(lambda state: {"val": [9, 5, 1, 3, 4, 2][int(state.step) // 3 - 1]}, 3),
        early_stopping=EarlyStopping("val", patience=2),
        checkpoints=checkpoints,
        progress=False,
    )
    assert (result.step, result.stopped, result.best) == (15, "early", {"step": 9, "val": 1})
    assert sorted(checkpoints.disk) == [7, 14, 15]
    assert checkpoints.disk[15][2]["val"] == 4


@pytest.mark.parametrize(("every", "stops_after"), [(None, 2), (3, 3)])
def test_a_metric_that_is_not_there_is_found_at_the_first_report(
    opt, new_state, batches, every, stops_after
):
    """The error comes at the first report, or at the first evaluation if one is to come.

    Without either it comes at the first report.
    """
    drawn = []
    with pytest.raises(ValueError, match="watches") as caught:
        fit(
            opt,
            new_state(),
            (drawn.append(True) or batch for batch in batches),
            num_steps=40,
            evaluate=(lambda state: {"val_loss": 1.0}, every),
            early_stopping=EarlyStopping("val_los", patience=2),
            log_every=2,
            progress=False,
        )
    speed = "  examples_per_second\n"
    assert str(caught.value) == (
        "fit: early_stopping watches 'val_los', which is not among the metrics of this run:\n"
        f"  error\n{speed}  grad_norm\n  loss\n  steps_per_second\n"
        + ("  val_loss\n" if every else "")
        + "Fix: watch one of these, or return it from evaluate, every few steps."
    )
    assert len(drawn) == stops_after
