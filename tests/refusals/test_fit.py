"""Bad arguments are refused before anything runs."""

import jax
import numpy as np
import optax
import pytest

from shardopt.training import EarlyStopping
from shardopt.training._fit import fit

pytestmark = pytest.mark.fast

GOOD = {
    "num_steps": 3,
    "evaluate": None,
    "early_stopping": None,
    "checkpoints": None,
    "log": None,
    "log_every": 10,
    "progress": True,
}
ITERABLE = (
    "Fix: pass a grain dataset, an iterator or a list; for one batch over and over"
    " itertools.repeat(batch)."
)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"num_steps": -1}, ValueError, "fit: num_steps must be at least 0, got -1."),
        ({"num_steps": 3.0}, TypeError, "fit: num_steps must be an integer, got 3.0 (float)."),
        ({"num_steps": True}, TypeError, "fit: num_steps must be an integer, got True (bool)."),
        ({"log_every": 0}, ValueError, "fit: log_every must be at least 1, got 0."),
        ({"log_every": None}, TypeError, "fit: log_every must be an integer, got None (NoneType)."),
        ({"evaluate": (print, 0)}, ValueError, "fit: evaluate[1] must be at least 1, got 0."),
        (
            {"evaluate": (None, 5)},
            TypeError,
            (
                "fit: evaluate must be a callable (state) -> dict of numbers, or a pair of it and"
                " the steps between evaluations, got NoneType.\nFix: pass"
                " so.training.evaluation(opt, batches) or your own function."
            ),
        ),
        (
            {"evaluate": {"val_loss": 1}},
            TypeError,
            (
                "fit: evaluate must be a callable (state) -> dict of numbers, or a pair of it and"
                " the steps between evaluations, got dict.\nFix: pass"
                " so.training.evaluation(opt, batches) or your own function."
            ),
        ),
        (
            {"early_stopping": ("loss", 3)},
            TypeError,
            (
                "fit: early_stopping must be a so.training.EarlyStopping, got tuple.\n"
                'Fix: pass so.training.EarlyStopping("val_loss", patience=5).'
            ),
        ),
        (
            {"checkpoints": "runs/a"},
            TypeError,
            (
                "fit: checkpoints must be a so.Checkpoints, got str without directory, every,"
                " resume, due, due_in_memory, memory_every, save, wait, latest, restore.\nFix: pass"
                " so.Checkpoints('runs/a', every=100, keep=3)."
            ),
        ),
        (
            {"log": "runs/a"},
            TypeError,
            (
                "fit: log must be callables (step, metrics) -> None, got str.\nFix: pass"
                " so.training.jsonl(path) or a function of your"
                " own."
            ),
        ),
        ({"progress": 1}, TypeError, "fit: progress must be True or False, got 1."),
        (
            {"batches": 7},
            TypeError,
            f"fit: batches must be an iterable of batches, got int.\n{ITERABLE}",
        ),
        (
            {"batches": {"x": 1}},
            TypeError,
            f"fit: batches must be an iterable of batches, got dict.\n{ITERABLE}",
        ),
        (
            {"batches": np.ones(3)},
            TypeError,
            f"fit: batches must be an iterable of batches, got ndarray.\n{ITERABLE}",
        ),
        (
            {"batches": None},
            TypeError,
            f"fit: batches must be an iterable of batches, got NoneType.\n{ITERABLE}",
        ),
        (
            {"opt": optax.adam(1e-3)},
            TypeError,
            (
                "fit: opt must be a so.ShardedOptimizer, got GradientTransformationExtraArgs.\n"
                "Fix: pass what so.ddp, so.zero or so.fsdp returns."
            ),
        ),
        (
            {"state": {"w": 1}},
            TypeError,
            "fit: state must be a so.TrainState, got dict.\nFix: pass opt.init(params).",
        ),
    ],
)
def test_wrong_arguments_are_refused(opt, new_state, wrong, kind, message):
    arguments = {"opt": opt, "state": new_state(), "batches": []} | GOOD | wrong
    with pytest.raises(kind) as caught:
        fit(arguments.pop("opt"), arguments.pop("state"), arguments.pop("batches"), **arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps": -1},
        {"num_steps": "3"},
        {"evaluate": 3},
        {"early_stopping": 3},
        {"checkpoints": 3},
        {"batches": {}},
    ],
)
def test_fit_refuses_before_anything_runs(opt, new_state, wrong):
    state = new_state()
    drawn = []
    batches = (drawn.append(True) for _ in range(5))
    arguments = {
        "batches": batches,
        "num_steps": 3,
        "log": lambda *_: pytest.fail("it ran"),
    } | wrong
    with pytest.raises((TypeError, ValueError)):
        fit(opt, state, arguments.pop("batches"), **arguments)
    assert drawn == []
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_arguments_of_all_kinds_are_accepted(opt, new_state, memory):
    options = {
        "num_steps": np.int64(3),
        "evaluate": (print, 2),
        "early_stopping": EarlyStopping("loss", patience=1),
        "log": [print, print],
    }
    for batches in ([], iter([]), range(0), (x for x in [])):
        result = fit(opt, new_state(), batches, **GOOD | options | {"checkpoints": memory(5)})
        assert result.stopped == "exhausted"
