"""Whatever kills a writer, and whenever: whole checkpoints are left, and the next writer takes
over.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.paths import ROOT

import shardopt as so
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._read import restore

pytestmark = pytest.mark.slow  # processes that are killed


def launch(how, folder):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, str(Path(__file__).with_name("doomed.py")), how, str(folder)]
    return subprocess.Popen(
        command, **pipes, text=True, env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""}
    )


@pytest.fixture(scope="module")
def remains(tmp_path_factory):
    """Return how each writer ended: (folder, exit code, output), all run side by side."""
    folders = {
        how: tmp_path_factory.mktemp(how)
        for how in ("writing", "manifest", "publish", "rotating", "replacing")
    }
    folders["full"] = tmp_path_factory.mktemp("full")
    running = {how: launch(how, folder) for how, folder in folders.items()}
    outputs = {how: process.communicate(timeout=120) for how, process in running.items()}
    return {
        how: (folders[how], process.returncode, *outputs[how]) for how, process in running.items()
    }


@pytest.fixture
def read():
    """Return a function that restores the array of the writers, and returns its factor."""
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"a": jax.ShapeDtypeStruct((500_000,), jnp.float32, sharding=on)}

    def factor(folder, step=None):
        restored = np.asarray(restore(folder, target, step=step)["a"])
        np.testing.assert_array_equal(restored, np.arange(500_000, dtype=np.float32) * restored[1])
        return restored[1]

    return factor


def names(folder):
    names = {path.name for path in folder.iterdir()}
    return sorted(names - {"compiled"})  # programs for the next start


@pytest.mark.parametrize(
    ("how", "leftovers"),
    [
        ("writing", None),  # at some moment of the write: it may even have ended
        ("manifest", [".lock", ".saving-2", "1"]),
        ("publish", [".lock", ".saving-2", "1"]),
        ("rotating", [".deleting-1", ".lock", "2"]),
    ],
)
def test_a_killed_writer_leaves_whole_checkpoints(how, leftovers, remains, read):
    folder, code, _, errors = remains[how]
    assert code == -signal.SIGKILL, errors
    if leftovers is not None:
        assert names(folder) == leftovers
    newest = {"writing": (1, 2), "rotating": (2,)}.get(how, (1,))
    assert read(folder) in newest
    with Checkpoints(folder, every=1, keep=2) as checkpoints:
        steps = checkpoints.steps()
        assert steps[-1] in newest
        checkpoints.save({"a": jnp.arange(500_000.0) * 9}, step=9)
    assert names(folder) == [".lock", str(steps[-1]), "9"]
    assert read(folder) == 9
    assert read(folder, steps[-1]) == steps[-1]


def test_a_writer_killed_while_it_replaces_a_step_loses_nothing(remains, read):
    folder, code, _, errors = remains["replacing"]
    assert code == -signal.SIGKILL, errors
    assert names(folder) == [".lock", ".replaced-1", ".saving-1"]
    with Checkpoints(folder, every=1, keep=2) as checkpoints:
        assert checkpoints.steps() == [1]
    assert read(folder) == 1


def test_a_full_disk_is_named_and_leaves_older_checkpoints(remains, read):
    folder, code, output, errors = remains["full"]
    assert code == 0, errors
    first, last = output.strip().split("\n")
    assert re.fullmatch(
        rf"Checkpoints: step 2 could not be written to {folder} \(.*File too large.*\)\.", first
    )
    assert (
        last
        == "Fix: make room, then save again; checkpoints that were committed before are untouched."
    )
    assert names(folder) == [".lock", "1", "3"]
    assert (read(folder, 1), read(folder)) == (1, 3)


def test_a_second_writer_is_refused_until_the_first_is_dead(tmp_path, complaint_of, read):
    holder = launch("holding", tmp_path)
    try:
        pid = int(holder.stdout.readline())
        refused = (
            rf"Checkpoints: {tmp_path} is already being written to by process {pid} on"
            rf" {os.uname().nodename}, "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\nFix: stop that job, or use another"
            r" directory\."
        )
        message = complaint_of(
            lambda: Checkpoints(tmp_path, every=1, keep=1), so.errors.CheckpointInUseError
        )
        assert re.fullmatch(refused, message)
        message = complaint_of(
            lambda: so.save(tmp_path, {"a": jnp.ones(2)}, step=5), so.errors.CheckpointInUseError
        )
        assert re.fullmatch(refused.replace("Checkpoints", "save"), message)
        assert read(tmp_path) == 1  # who only reads is never refused
    finally:
        holder.kill()
        holder.communicate()
    with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
        assert checkpoints.steps() == [1]


def test_a_writer_in_the_same_process_is_refused_until_the_first_is_closed(tmp_path, complaint_of):
    first = Checkpoints(tmp_path, every=1, keep=1)
    assert re.fullmatch(
        rf"Checkpoints: {tmp_path} is already being written to by this very process, since [\d:"
        r" -]+\.\n"
        r"Fix: close\(\) the other Checkpoints first, or use another directory\.",
        complaint_of(
            lambda: Checkpoints(tmp_path, every=1, keep=1), so.errors.CheckpointInUseError
        ),
    )
    first.close()
    Checkpoints(tmp_path, every=1, keep=1)  # never closed, only forgotten: gone with the object
    Checkpoints(tmp_path, every=1, keep=1).close()


def test_a_file_system_without_locks_is_said_to_have_none(tmp_path, monkeypatch):
    import errno
    import fcntl

    def unsupported(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    text = (
        f"Checkpoints: the file system of {tmp_path} has no locks, so a second job writing there"
        " goes unnoticed."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        Checkpoints(tmp_path, every=1, keep=1).close()
