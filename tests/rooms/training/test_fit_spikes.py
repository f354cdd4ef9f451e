"""A run goes back from a spike to the last snapshot and leaves out the batches since.

A resumed run does the same.
"""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.core import NonFiniteLossError
from shardopt.training import _spikes as spikes
from shardopt.training._fit import fit

ROLLBACK = {"on_spike": "rollback", "progress": False, "log_every": 1}


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(spikes, "WINDOW", 4)
    monkeypatch.setattr(spikes, "DEVIATIONS", 500.0)


def spiked(batches, *positions, factor=1e4):
    return [{**b, "y": b["y"] * (factor if i in positions else 1)} for i, b in enumerate(batches)]


@pytest.mark.parametrize("factor", tiered([1e4, np.nan], lambda factor: factor == 1e4))
def test_the_run_goes_back_and_leaves_the_batches_out(
    opt, new_state, batches, same, tmp_path, factor, capfd
):
    """Batch 7 is a spike; it is seen while step 8 runs, so batches 5 to 8 are left out."""
    path = tmp_path / "log.jsonl"
    with so.Checkpoints(tmp_path / "run", every=5, keep=None) as checkpoints:
        result = fit(
            opt,
            new_state(),
            spiked(batches, 7, factor=factor),
            num_steps=12,
            checkpoints=checkpoints,
            log=so.training.jsonl(path),
            **ROLLBACK,
        )
    expected = fit(opt, new_state(), [*batches[:5], *batches[9:]], num_steps=12, progress=False)
    assert same(result.state, expected.state)
    assert [record["step"] for record in result.history] == [*range(1, 6), *range(6, 13)]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (event,) = [line for line in lines if "spike_step" in line]
    assert (event["step"], event["spike_step"], event["spike_batch"]) == (6, 7, 7)
    assert event["loss"] is None if np.isnan(factor) else event["loss"] > 1e6
    assert [line["step"] for line in lines if "spike_step" not in line] == [*range(1, 13)]
    assert (
        "Going back to step 5, from a spike at step 7 (batch 7, both counted from 0): loss"
        in capfd.readouterr().err
    )


class KilledError(Exception):
    pass


def killed_at(batches, count):
    yield from batches[:count]
    raise KilledError


@pytest.mark.parametrize("count", tiered([8, 9, 11, 14], lambda count: count == 11))
def test_a_resumed_run_goes_back_in_the_same_way(opt, new_state, batches, same, memory, count):
    """It is killed before the spike is seen, just after it, before the next checkpoint and after
    it.
    """
    data = spiked(batches, 7, 17)
    whole = fit(opt, new_state(), data, num_steps=18, checkpoints=memory(5), **ROLLBACK)
    first = memory(5)
    with pytest.raises(KilledError):
        fit(opt, new_state(), killed_at(data, count), num_steps=18, checkpoints=first, **ROLLBACK)
    again = memory(5, disk=first.disk, resume=True)
    resumed = fit(opt, new_state(), data, num_steps=18, checkpoints=again, **ROLLBACK)
    assert same(resumed.state, whole.state)


def test_a_spike_in_the_last_step_is_not_returned(opt, new_state, batches, same, memory):
    result = fit(
        opt, new_state(), spiked(batches, 7), num_steps=8, checkpoints=memory(5), **ROLLBACK
    )
    expected = fit(opt, new_state(), [*batches[:5], *batches[8:]], num_steps=8, progress=False)
    assert same(result.state, expected.state)


def test_the_window_goes_back_too(opt, new_state, batches, memory):
    """The values of the steps that are left out do not count, and those before the snapshot still
    do.

    Step 7 counts no more after the rollback to step 6, and step 6 does: the window of step 9 has
    both sides."""
    data, others = spiked(batches, 7), [*batches[:6], *batches[9:]]
    windows = []
    for sequence in (data, others):
        checkpoints = memory(3)
        fit(opt, new_state(), sequence, num_steps=9, checkpoints=checkpoints, **ROLLBACK)
        windows.append(
            {step: json.loads(extra)["spikes"] for step, (_, extra, _) in checkpoints.disk.items()}
        )
    assert windows[0] == windows[1]
    assert [len(window) for window in windows[0].values()] == [3, 4, 4]


def test_a_spike_just_after_a_rollback_is_found(opt, new_state, batches, same, memory):
    """An empty window would need two steps before it finds one."""
    result = fit(
        opt, new_state(), spiked(batches, 7, 9), num_steps=12, checkpoints=memory(5), **ROLLBACK
    )
    expected = fit(opt, new_state(), [*batches[:5], *batches[11:]], num_steps=12, progress=False)
    assert same(result.state, expected.state)


def test_early_stopping_goes_back_too(opt, new_state, batches, memory):
    stopping = so.training.EarlyStopping("loss", patience=9)
    options = {"checkpoints": memory(5), "early_stopping": stopping, **ROLLBACK}
    result = fit(opt, new_state(), spiked(batches, 7), num_steps=12, **options)
    assert result.best["loss"] == min(record["loss"] for record in result.history)


def test_a_run_that_cannot_go_back_ends(opt, new_state, batches, memory):
    with pytest.raises(
        NonFiniteLossError, match=r"spike at step 3 \(batch 3.*there is no snapshot yet"
    ) as error:
        fit(opt, new_state(), spiked(batches, 3), num_steps=12, checkpoints=memory(5), **ROLLBACK)
    assert (error.value.step, error.value.position) == (3, 3)
    with pytest.raises(NonFiniteLossError, match="3 rollbacks did not help"):
        fit(
            opt,
            new_state(),
            spiked(batches, *range(6, 40)),
            num_steps=12,
            checkpoints=memory(5),
            **ROLLBACK,
        )


def test_a_nonfinite_loss_still_ends_the_run_by_default(opt, new_state, batches, memory):
    with pytest.raises(NonFiniteLossError, match="the loss became nan at step 7"):
        fit(
            opt,
            new_state(),
            spiked(batches, 7, factor=np.nan),
            num_steps=12,
            checkpoints=memory(5),
            progress=False,
        )


def test_skipping_is_left_to_the_optimizer(batches, mesh_of, loss_fn):
    for tx, option in (
        (optax.apply_if_finite(optax.sgd(0.1), 2), {}),
        (so.transforms.skip_anomalies(optax.sgd(0.1)), {"on_spike": "skip"}),
    ):
        opt = so.ddp(optax.chain(tx), mesh_of(data=2), loss_fn)
        state = opt.init({"w": jnp.zeros(4), "b": jnp.zeros(())})
        data = spiked(batches, 3, factor=np.nan)
        assert fit(opt, state, data, num_steps=6, progress=False, **option).stopped == "completed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_spike": "raise"}, "on_spike must be None, 'skip' or 'rollback', got 'raise'"),
        ({"on_spike": "skip"}, "on_spike='skip' needs an optimizer that skips spikes"),
        ({"on_spike": "rollback"}, "on_spike='rollback' needs checkpoints to go back to"),
    ],
)
def test_what_cannot_be_met_is_refused(opt, new_state, batches, options, message):
    with pytest.raises(ValueError, match=message) as error:
        fit(opt, new_state(), batches, num_steps=1, **options)
    assert str(error.value).startswith("fit: ")
