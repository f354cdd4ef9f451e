"""`fit` records profiles of the steps that are asked for, each step annotated, by argument or by
signal.
"""

import gzip
import json
import os
import signal

import pytest

import shardopt as so
from shardopt.training import _profile as profile
from shardopt.training._fit import fit


def annotated_steps(folder):
    """Return the numbers of the steps that each profile of a folder has annotations for."""
    steps_by_profile = []
    for path in sorted(folder.glob("plugins/profile/*/*.trace.json.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        steps = {
            int(e["args"]["step_num"])
            for e in events
            if e.get("name") == profile.STEP and "args" in e
        }
        steps_by_profile.append(sorted(steps))
    return steps_by_profile


@pytest.mark.slow
def test_the_steps_are_annotated_and_the_run_is_the_same(
    opt, new_state, batches, same, tmp_path, capfd
):
    with so.Checkpoints(tmp_path, every=4, keep=1) as checkpoints:
        options = {"checkpoints": checkpoints, "progress": False, "profile": (2, 3)}
        result = fit(opt, new_state(), batches, num_steps=8, **options)
    assert same(result.state, fit(opt, new_state(), batches, num_steps=8, progress=False).state)
    assert annotated_steps(tmp_path / "profile") == [[2, 3, 4]]
    assert f"A profile is in {tmp_path / 'profile'}" in capfd.readouterr().err


def test_a_signal_records_the_next_steps(opt, new_state, batches, tmp_path, monkeypatch):
    """A run that ends before the profile does writes what there is.

    Afterwards the old handler is back.
    """
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGUSR1)

    def stream():
        for i, batch in enumerate(batches):
            if i == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield batch

    fit(opt, new_state(), stream(), num_steps=6, progress=False)
    assert annotated_steps(tmp_path / "profile") == [[3, 4, 5]]
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            5,
            (
                "fit: profile must be (first step, number of steps), got 5.\nFix: pass"
                " profile=(10, 5)."
            ),
        ),
        ((-1, 2), "fit: profile[0] must be at least 0, got -1."),
        ((0, 0), "fit: profile[1] must be at least 1, got 0."),
    ],
)
def test_a_wrong_argument_is_refused(opt, new_state, batches, value, message):
    with pytest.raises((TypeError, ValueError)) as error:
        fit(opt, new_state(), batches, num_steps=1, profile=value)
    assert str(error.value) == message
