"""A disk fills up under a run, at random places. The error says so, no earlier checkpoint is lost,
and the run goes on when there is room.

Two disks are filled. One is a limit on the size of files, which works everywhere: those tests are
never skipped, and meet the same code. The other is a tmpfs of 3 MiB, in a mount namespace of its
own so that nothing is left over. It takes CAP_SYS_ADMIN, or the right to make user namespaces. It
adds the kernel's own ENOSPC under orbax, and how much room is given back. Without it ENOSPC comes
from /dev/full: here for the lock, in test_loggers.py for metrics."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from support.paths import ROOT

from shardopt.checkpoint._checkpoints import Checkpoints

pytestmark = pytest.mark.slow  # processes on disks of their own

WORKER = Path(__file__).with_name("worker_full_disk.py")
MOUNT = 'mount -t tmpfs -o size=3m none "$0" && exec "$@"'
FORBIDDEN = (
    "unshare failed",
    "Operation not permitted",
    "ermission denied",
    "No such file or directory: 'unshare'",
)
SAID = {"tmpfs": "No space left on device", "limit": "File too large"}


def on_a_small_disk(folder):
    """Return the words before a command that give it a small file system at the folder.

    Skip where that is forbidden.
    """
    refused = []
    for unshare in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        words = [*unshare, "sh", "-c", MOUNT, str(folder)]
        try:
            tried = subprocess.run([*words, "true"], capture_output=True, text=True)
        except FileNotFoundError as error:
            refused.append(str(error))
            continue
        if not tried.returncode:
            return words
        refused.append(f"{' '.join(unshare)}: {tried.stderr.strip()}")
    # Any other failure, of mount or of the command, fails the test: only a ban by the system is a
    # reason to skip.
    assert all(any(word in refusal for word in FORBIDDEN) for refusal in refused), refused
    return pytest.skip(
        f"this system forbids mounts ({'; '.join(refused)}); the tests on the file size limit ran"
        " instead"
    )


@pytest.mark.parametrize("repeats", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("disk", ["tmpfs", "limit"])
def test_a_disk_that_fills_up_under_a_run_loses_no_checkpoint(disk, repeats, tmp_path):
    words = on_a_small_disk(tmp_path) if disk == "tmpfs" else []
    command = [*words, sys.executable, str(WORKER), disk, str(tmp_path), str(repeats)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == repeats
    for outcome in outcomes:
        run = tmp_path / "run"
        saved = re.match(
            rf"CheckpointError: Checkpoints: step (\d+) could not be written to {run} \(",
            outcome["error"],
        )
        logged = (
            outcome["error"]
            == f"OSError: [Errno 28] No space left on device: '{run}/metrics.jsonl'"
        )
        assert saved or logged, outcome
        if saved:
            assert SAID[disk] in outcome["error"]
            assert outcome["error"].endswith(
                "\nFix: make room, then save again; checkpoints that were committed before are"
                " untouched."
            )
        last_good = int(saved[1]) - 5 if saved else outcome["at"] // 5 * 5
        assert outcome["whole"][-1] == outcome["restored"] == last_good, outcome
        assert outcome["unfinished"] == [], outcome  # what could not be finished was deleted
        assert all(taken <= 64 * 1024 for taken in outcome["gave_back"]), outcome
        assert (outcome["completed"], outcome["same"]) == (30, True)
        # a program that took a second to compile is stored too
        names = [name for name in outcome["names"] if name != "compiled"]
        assert names == [".lock", "25", "30", "goodput.json", "metrics.jsonl"]
        assert outcome["logged"] == [10, 20, 30]


def test_a_folder_is_taken_and_tidied_where_there_is_no_room_for_a_name(tmp_path, monkeypatch):
    """The test needs no disk of its own: the name of the new writer meets the kernel's ENOSPC."""
    (tmp_path / ".saving-3").mkdir()
    (tmp_path / ".saving-3" / "data").write_bytes(bytes(100))
    write = os.pwrite
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(
            os, "pwrite", lambda descriptor, data, at: write(full.fileno(), data, at)
        )
        with pytest.raises(OSError, match="No space left on device"):
            os.pwrite(0, b"name", 0)
        with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
            assert [path.name for path in tmp_path.iterdir()] == [".lock"]
            assert (tmp_path / ".lock").read_bytes() == b""
            checkpoints.save({"w": jnp.ones(9)}, step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "4"]


def test_a_full_disk_does_not_keep_the_next_job_from_making_room(tmp_path):
    """The files of a killed job fill the disk to the last byte.

    Whoever takes the folder deletes it first.
    """
    words = on_a_small_disk(tmp_path)
    program = (
        "import pathlib, sys, jax.numpy as jnp; from shardopt.checkpoint._checkpoints import"
        f" Checkpoints\nfolder = pathlib.Path({str(tmp_path)!r}, 'run'); (folder /"
        " '.saving-3').mkdir(parents=True)\n(folder / '.lock').touch()\nfile = (folder /"
        " '.saving-3' / 'data').open('wb', buffering=0)\ntry:\n    while True:"
        " file.write(bytes(100))\nexcept OSError as error: print(error)\nfile.close()  # whose"
        " room is kept while anybody has it open\nwith Checkpoints(folder, every=1, keep=1) as"
        " checkpoints:\n    checkpoints.save({'w': jnp.ones(9)}, step=4)\nprint(sorted(path.name"
        " for path in folder.iterdir()))\n"
    )
    command = [*words, sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "[Errno 28] No space left on device\n['.lock', '4', 'compiled']\n", (
        done.stderr
    )
