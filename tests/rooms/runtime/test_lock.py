"""The lock of a folder: one holder, known for certain, let go of when it dies, whatever it had
forked.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from shardopt.core import CheckpointError
from shardopt.runtime import _files as lock

pytestmark = pytest.mark.fast

HOLDER = """
import os, sys, time
from pathlib import Path
from shardopt.core import CheckpointError
from shardopt.runtime import _files as lock

mine = lock.acquire_lock("holder", Path(sys.argv[1]))
if os.fork() == 0:
    if sys.argv[2] == "fork":
        copied = mine.descriptor
        try:
            lock.holds_lock(mine)
        except CheckpointError as error:
            lock.release_lock(mine)  # has no effect on that of the other
            print(os.getpid(), copied, str(error).replace(chr(10), "|"), flush=True)
    else:
        print(os.getpid(), os.getppid(), lock.acquire_lock("child", Path(sys.argv[1]) / "other").pid, flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def holder(tmp_path):
    """Return a function that starts a process that takes the folder and forks.

    The function returns the process and the message of the fork.
    """
    processes = []
    forks = []

    def start(mode):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""}
        # jax warns of every fork
        command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path), mode]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
        said = processes[-1].stdout.readline().rstrip("\n")
        forks.append(int(said.split()[0]))
        return processes[-1], said

    yield start
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def refusal_of(folder):
    with pytest.raises(CheckpointError) as caught:
        lock.acquire_lock("test", folder)
    return str(caught.value)


def test_a_fork_has_no_part_in_the_lock_and_does_not_outlive_its_holder(holder, tmp_path):
    process, said = holder("fork")
    fork, _, *words = said.split(" ")
    assert (
        " ".join(words)
        == f"holder: {tmp_path} is written to by process {process.pid}, and this one, {fork}, is a"
        " fork of it.|Fix: write in the process that began to."
    )
    assert refusal_of(tmp_path).startswith(
        f"test: {tmp_path} is already being written to by process {process.pid} on "
    )
    process.kill()
    process.wait()
    os.kill(int(fork), 0)  # it lives
    lock.release_lock(lock.acquire_lock("test", tmp_path))


@pytest.mark.slow  # test_a_fork_has_no_part_in_the_lock_and_does_not_outlive_its_holder
def test_a_fork_may_take_a_lock_of_its_own(holder, tmp_path):
    (tmp_path / "other").mkdir()
    process, said = holder("own")
    fork, parent, pid = said.split()
    assert (int(parent), pid) == (process.pid, fork)
    refused = refusal_of(tmp_path / "other")
    assert refused.startswith(
        f"test: {tmp_path}/other is already being written to by process {fork} on "
    )


def test_who_is_handed_the_descriptor_keeps_the_lock_until_it_is_let_go_of(tmp_path):
    mine = lock.acquire_lock("test", tmp_path)
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(child, pass_fds=(mine.descriptor,)) as process:
        try:
            os.close(mine.descriptor)  # as if this process had died
            mine.descriptor = None
            lock._held_locks.discard(mine)
            assert refusal_of(tmp_path).endswith(
                "It cannot be seen from here: it runs in another container, or it has ended and"
                f" what it started still runs.\nFix: stop what has {tmp_path}/.lock open (fuser"
                " names it), or use another directory."
            )
        finally:
            process.kill()
    later = lock.acquire_lock("test", tmp_path)
    with subprocess.Popen(child, pass_fds=(later.descriptor,)) as process:
        try:
            lock.release_lock(later)
            lock.release_lock(lock.acquire_lock("test", tmp_path))
        finally:
            process.kill()


def test_this_very_process_is_told_by_what_it_holds_not_by_its_number(tmp_path):
    """In containers host name and number are often the same: pid 1."""
    mine = lock.acquire_lock("test", tmp_path)
    assert refusal_of(tmp_path).startswith(
        f"test: {tmp_path} is already being written to by this very process, since "
    )
    lock.release_lock(mine)
    host = socket.gethostname()
    held = (
        "import fcntl, sys; fcntl.flock(file := open(sys.argv[1], 'r+'), fcntl.LOCK_EX);"
        " print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", held, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        for pid, seen in (
            (os.getpid(), False),
            (process.pid, True),
            (2**22 + 1, False),
            ("unknown", True),
        ):
            (tmp_path / ".lock").write_text(json.dumps({"host": host, "pid": pid, "since": "noon"}))
            first = (
                f"test: {tmp_path} is already being written to by process {pid} on {host}, since"
                " noon."
            )
            said = refusal_of(tmp_path)
            assert said.startswith(first)
            assert ("It cannot be seen from here" in said) is not seen


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_a_lock_whose_file_is_gone_is_not_held(number, tmp_path, monkeypatch):
    mine = lock.acquire_lock("test", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            os,
            "fstat",
            lambda descriptor: (_ for _ in ()).throw(OSError(number, os.strerror(number))),
        )
        assert not lock.holds_lock(mine)
    assert lock.holds_lock(mine)
    (tmp_path / ".lock").unlink()
    assert not lock.holds_lock(mine)
    lock.release_lock(mine)
    lock.release_lock(mine)
    assert not lock.holds_lock(mine)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_an_error_that_says_nothing_of_the_file_is_not_taken_for_a_deletion(
    number, tmp_path, monkeypatch
):
    mine = lock.acquire_lock("test", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            os,
            "fstat",
            lambda descriptor: (_ for _ in ()).throw(OSError(number, os.strerror(number))),
        )
        with pytest.raises(OSError, match=os.strerror(number)):
            lock.holds_lock(mine)
        with pytest.raises(OSError, match=os.strerror(number)):
            lock.acquire_lock("test", tmp_path / "..")  # it releases its own lock
    lock.release_lock(mine)
    lock.release_lock(lock.acquire_lock("test", tmp_path / ".."))
    (tmp_path / ".." / ".lock").unlink()


def test_on_a_full_disk_a_folder_can_be_taken(tmp_path, monkeypatch):
    """Whoever takes it may be about to make room. /dev/full gives the kernel's own error."""
    write = os.pwrite
    with Path("/dev/full").open("wb") as full:
        monkeypatch.setattr(
            os, "pwrite", lambda descriptor, data, at: write(full.fileno(), data, 0)
        )
        mine = lock.acquire_lock("test", tmp_path)
    assert (tmp_path / ".lock").read_bytes() == b""
    assert lock.holds_lock(mine)
    lock.release_lock(mine)


def test_a_name_that_cannot_be_written_for_another_reason_is_an_error(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            lock.acquire_lock("test", tmp_path)
    lock.release_lock(lock.acquire_lock("test", tmp_path))
