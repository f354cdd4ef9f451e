"""A process that is forked while we handle signals has the handlers that stood before."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.flags import QUICK_TO_COMPILE
from support.paths import ROOT

from shardopt.runtime._processes import handled_signals, signal_bytes

# jax warns of every fork
pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore:os.fork")]


def handlers_in_a_fork(numbers):
    """Return the text of each handler that a forked child has, and its exit code."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, "\n".join(str(signal.getsignal(number)) for number in numbers).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        texts = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    return texts


def ours(number, frame):
    raise AssertionError("a forked child got our handler")


def before(number, frame):
    """The handler of the user."""


@pytest.fixture(autouse=True)
def _handlers():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    previous = {number: signal.getsignal(number) for number in numbers}
    yield
    assert {number: signal.getsignal(number) for number in numbers} == previous


# a fork of a process as large as that of a test takes a quarter of a second
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, before])
def test_a_fork_has_the_handlers_that_stood_before(handler):
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    previous = [signal.signal(number, handler) for number in numbers]
    try:
        with handled_signals(numbers, ours):
            assert handlers_in_a_fork(numbers) == [str(handler)] * 3
            # the parent goes on with its own
            assert all(signal.getsignal(number) is ours for number in numbers)
        assert handlers_in_a_fork(numbers) == [str(handler)] * 3
    finally:
        for number, previous_handler in zip(numbers, previous, strict=True):
            signal.signal(number, previous_handler)


def test_a_fork_within_two_contexts_has_the_outermost_handlers():
    outermost = str(signal.getsignal(signal.SIGTERM))
    with (
        handled_signals([signal.SIGTERM], before),
        handled_signals([signal.SIGTERM, signal.SIGUSR1], ours),
    ):
        texts = handlers_in_a_fork([signal.SIGTERM, signal.SIGUSR1])
    assert texts == [outermost, str(signal.getsignal(signal.SIGUSR1))]


def test_a_fork_from_a_thread_has_the_handlers_that_stood_before():
    texts = []
    expected = str(signal.getsignal(signal.SIGTERM))
    with handled_signals([signal.SIGTERM], ours):
        thread = threading.Thread(target=lambda: texts.extend(handlers_in_a_fork([signal.SIGTERM])))
        thread.start()
        thread.join()
    assert texts == [expected]


def test_a_fork_that_leaves_the_context_keeps_a_handler_that_it_set():
    reading, writing = os.pipe()
    child = 0
    with handled_signals([signal.SIGTERM], ours):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, before)
    if child == 0:
        os.write(writing, str(signal.getsignal(signal.SIGTERM) is before).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "True"
    os.waitpid(child, 0)


def test_a_fork_has_the_descriptor_for_signals_that_stood_before():
    with signal_bytes():
        child = os.fork()
        if child == 0:
            os._exit(signal.set_wakeup_fd(-1) == -1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_fork_that_ends_its_context_does_not_end_that_of_its_parent():
    bytes_read = []
    child = 0
    with signal_bytes() as next_signal:
        thread = threading.Thread(target=lambda: bytes_read.append(next_signal()))
        thread.start()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            assert bytes_read == []
    if child == 0:
        os._exit(0)
    thread.join()
    assert bytes_read == [0]


def test_terminate_ends_a_worker_that_started_meanwhile():
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    with handled_signals([signal.SIGTERM], lambda *_: None):
        worker.start()
        worker.terminate()
        worker.join(60)
    assert worker.exitcode == -signal.SIGTERM


FIT = """
import multiprocessing, os, signal, sys, time
import jax.numpy as jnp, numpy as np, optax, shardopt as so

workers = []


def batches():
    while True:
        if len(workers) < 3:
            workers.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)))
            workers[-1].start()
        yield np.ones(4, np.float32)


opt = so.ddp(optax.sgd(0.1), so.make_mesh(), lambda params, batch: ((batch * params["w"] - 3) ** 2).mean())
result = so.fit(opt, opt.init({"w": jnp.zeros(())}), batches(), num_steps=5, progress=False)
for worker in workers:
    worker.terminate()
for worker in workers:
    worker.join(60)
print(result.stopped, [worker.exitcode for worker in workers])
"""


def test_terminate_ends_the_workers_of_a_loader_that_started_while_fit_draws():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(QUICK_TO_COMPILE)}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert process.stdout == "completed [-15, -15, -15]\n"


REPORTS = """
import atexit, os, signal, sys
from pathlib import Path
from shardopt.runtime import _progress as progress

progress.open_stacks(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    os.kill(os.getpid(), progress.STACKS_SIGNAL)
    os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1]), os.path.getsize(sys.argv[1]))
os.kill(os.getpid(), progress.STACKS_SIGNAL)
print(os.path.getsize(sys.argv[1]) > 0)
"""


def test_a_fork_does_not_write_its_stacks_to_the_file_of_its_parent(tmp_path):
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPORTS, str(tmp_path / "stacks")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert process.stdout == f"{int(signal.SIGUSR2)} 0\nTrue\n"


def test_a_fork_that_ends_does_not_say_that_its_parent_ended():
    from shardopt.runtime._progress import _send_bye

    class Watch:
        def send_bytes(self, message):
            raise AssertionError("a message was sent")

    child = os.fork()
    if child == 0:
        try:
            _send_bye(Watch(), 0, os.getppid())
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
