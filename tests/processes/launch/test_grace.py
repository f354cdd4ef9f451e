"""After a signal the launcher waits for the processes as long as it states, then it kills them."""

import signal
import sys

import pytest

from shardopt.runtime import _launch
from shardopt.runtime._launch import launch

HEAD = """
import os, pathlib, signal, sys, time
rank, count = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
folder = pathlib.Path(sys.argv[1])

def stop_the_job(number):
    # the last one sends the signal when all are ready for it
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < count:
        time.sleep(0.01)
    if rank == 0:
        os.kill(int(os.environ["SHARDOPT_LAUNCHED"]), number)

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def saving(seconds, code):
    def save(*_):
        time.sleep(seconds)
        (folder / f"saved-{rank}").touch()
        sys.exit(code)
    signal.signal(signal.SIGTERM, save)
"""
WAIT = "\nwhile True: time.sleep(0.05)\n"


@pytest.fixture
def run(tmp_path):
    """Return a function that launches a script, and returns the exit code, the messages and the
    ranks that saved.
    """

    def run(script, processes, grace):
        messages = []
        code = launch(
            lambda attempt: [sys.executable, "-c", HEAD + script + WAIT, str(tmp_path)],
            processes=processes,
            log_dir=tmp_path / "logs",
            grace=grace,
            say=messages.append,
        )
        saved = sorted(int(path.name[6:]) for path in tmp_path.glob("saved-*"))
        return code, messages, saved

    return run


@pytest.mark.parametrize(
    ("script", "processes", "grace", "names"),
    [
        ("deaf(); stop_the_job(signal.SIGTERM)", 2, 0.2, "processes 0 and 1 did not end"),
        ("deaf(); stop_the_job(signal.SIGINT)", 2, 0.2, "processes 0 and 1 did not end"),
        # some have to end within it
        ("if rank == 1: deaf()\nstop_the_job(signal.SIGTERM)", 4, 1.0, "process 1 did not end"),
        ("saving(60 * (rank > 1), 0); stop_the_job(signal.SIGTERM)", 4, 1.0, "processes 2 and 3"),
    ],
)
def test_processes_that_run_on_are_named_and_killed(run, script, processes, grace, names):
    code, messages, _ = run(script, processes, grace=grace)
    assert code in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    assert messages[0].startswith(f"launch: {names}")
    assert messages[0].endswith("killed (--grace).")


@pytest.mark.parametrize(
    ("seconds", "code"),
    [
        ("0.1", "0"),
        ("1.0 * rank", "0"),
        pytest.param("1.0 * rank", "143 if rank == 0 else 0", marks=pytest.mark.slow),
    ],
)
def test_processes_that_save_have_the_whole_grace(run, seconds, code, monkeypatch):
    """However little time processes get after a failure."""
    monkeypatch.setattr(_launch, "_GRACE", 0.2)
    script = f"saving({seconds}, {code}); stop_the_job(signal.SIGTERM)"
    exit_code, messages, saved = run(script, 2, grace=60.0)
    assert saved == [0, 1]
    assert exit_code == (0 if code == "0" else 143)
    assert not any("--grace" in message for message in messages)


def test_a_grace_below_zero_is_refused(run):
    with pytest.raises(ValueError, match="--grace must be finite, at least 0; got -1"):
        run("", 2, grace=-1.0)
