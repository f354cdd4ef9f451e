"""This process as one of a job: joining the others, saying who failed first, ending, and its memory."""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import jax

from shardopt.runtime import progress
from shardopt.runtime.compiled import share_compiled_programs

PR_SET_PDEATHSIG = 1  # prctl(2)

_CLUSTER_VARIABLES = (
    "SLURM_JOB_ID",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_COMM_WORLD_SIZE",
    "JAX_COORDINATOR_ADDRESS",
    "JOB_COMPLETION_INDEX",
    "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "CLOUD_TPU_TASK_ID",
)
_PLACE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""All that is to be known; `shardopt launch` sets it, and any other launcher can."""
_PATIENCE = 20.0
"""Seconds for which the address of process 0 is tried; jax then goes on trying, and says that it cannot be reached."""
_PIPE = "SHARDOPT_FAILURES"
"""The descriptor of the pipe of `failures`, in the environment of each process."""


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join this process to the others of the job; call it before anything touches a device.

    With no arguments the place of this process is read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID where all three are set, as `shardopt launch` does; else the cluster is detected from the environment
    (SLURM, Open MPI, indexed jobs of Kubernetes, Cloud TPU). On a single machine outside any launcher it does nothing.
    On CPU, collectives between processes use gloo.

    Under `shardopt launch` an error that nobody catches ends this process at once, not after the others, who may be
    waiting for it; and where the launcher dies, so does this process. SIGTERM ends it, until `fit` listens for it: jax's own
    notice of preemption, which would swallow it, is switched off there.

    Args:
      coordinator_address: `"host:port"` of process 0.
      num_processes: how many processes the job has.
      process_id: this process's number, from 0.

    Raises:
      ValueError: if only some of the three arguments are given.
      RuntimeError: if devices were already used in this process.
    """
    given = (coordinator_address, num_processes, process_id)
    if any(value is not None for value in given) and any(value is None for value in given):
        raise ValueError(
            "initialize: coordinator_address, num_processes and process_id go together, got "
            f"{coordinator_address!r}, {num_processes!r}, {process_id!r}.\n"
            "Fix: give all three, or none where SLURM, Open MPI, Kubernetes or Cloud TPU started the job."
        )
    if coordinator_address is None and all(name in os.environ for name in _PLACE):
        address, count, rank = (os.environ[name] for name in _PLACE)
        coordinator_address, num_processes, process_id = address, int(count), int(rank)
    if coordinator_address is None and not any(name in os.environ for name in _CLUSTER_VARIABLES):
        return
    if "SHARDOPT_LAUNCHED" in os.environ:
        _follow_launcher()
        share_compiled_programs()
    if "JAX_PROCESS_ID" in os.environ:
        progress.start_reports(int(os.environ["JAX_PROCESS_ID"]))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with progress.waiting("join"):
        if coordinator_address is not None and process_id:
            _wait_until_heard(coordinator_address)
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    if "SHARDOPT_LAUNCHED" in os.environ and threading.current_thread() is threading.main_thread():
        # jax has caught SIGTERM in C++, unknown to Python: what Python knows of is put back.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def _wait_until_heard(address: str) -> None:
    """Wait, for a while, until process 0 listens: gRPC tries again only a second after it found nobody."""
    host, _, port = address.rpartition(":")
    latest = time.monotonic() + _PATIENCE
    while time.monotonic() < latest:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
            return
        except (OSError, ValueError):  # jax says what is wrong with an address
            time.sleep(0.01)


def _follow_launcher() -> None:
    """End this process at once when it fails, and when its launcher dies."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        say_failed()
        sys.__excepthook__(kind, error, trace)
        end_at_once(1)

    sys.excepthook = hook
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(int(os.environ["SHARDOPT_LAUNCHED"]), 0)  # it may have died while this process was importing
    except ProcessLookupError:
        sys.exit("initialize: the launcher of this process has died.")
    except PermissionError:  # it lives, and is another user's
        pass


def num_processes() -> int:
    """Return how many processes the job has, as `initialize` left it; no backend is started."""
    from jax._src.distributed import global_state  # jax.process_count() would start one

    return global_state.num_processes or 1


def end_at_once(code: int) -> None:
    """End this process if it is one of several, without the handlers that wait for the others; else return.

    jax waits at exit until all processes of the job have come so far. A process that failed alone would wait for
    minutes, and the others for it.
    """
    if jax.distributed.is_initialized():
        say_failed()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Failures:
    """The launcher's end of a pipe that all processes inherit, on which each says that it fails.

    The others miss a process when the kernel closes its connections, which is before the kernel reports its end; on a
    busy machine one of them can have failed and ended in between. So it says itself that it fails, before they can.

    Attributes:
      environment: what tells a process where to say that it fails.
      descriptor: what it inherits for that.
    """

    def __init__(self, reading: int, writing: int):
        self._reading, self.descriptor = reading, writing
        self.environment = {_PIPE: str(writing)}

    def ranks(self) -> list[int]:
        """Return who said that it fails, in that order."""
        said = b""
        with contextlib.suppress(BlockingIOError):  # nobody says any more
            while True:
                said += os.read(self._reading, 4096)
        return [int(line) for line in said.split()]


@contextlib.contextmanager
def failures() -> Iterator[Failures]:
    """Listen to the processes of one attempt."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        yield Failures(reading, writing)
    finally:
        os.close(reading)
        os.close(writing)


def say_failed() -> None:
    """Tell the launcher that this process fails, if there is one that listens."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ[_PIPE])
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # who closed it may have opened something else there
            os.write(descriptor, f"{int(os.environ['JAX_PROCESS_ID'])}\n".encode())


def trim_malloc() -> None:
    """Return freed memory to the operating system, where the C library can (glibc).

    XLA's compiler takes hundreds of megabytes for the step of a small model, and gigabytes for that of a large one.
    glibc keeps them for the process after they are freed, beside all that training allocates from then on.

    References:
      malloc_trim(3), Linux man-pages.
    """
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], int]:
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no C library of that name, or without the function
        return ctypes.CDLL(None).malloc_trim
    return lambda _: 0
