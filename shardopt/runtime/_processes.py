"""This process as one of a job: join the others, report a failure, end at once, return freed
memory.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import platform
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np

from shardopt.core import calling
from shardopt.core._place import settle
from shardopt.runtime import _progress as progress
from shardopt.runtime._agreement import tell_end

PR_SET_PDEATHSIG = 1  # prctl(2)

_CONNECT_SECONDS = 20.0
"""Seconds for which the address of process 0 is tried. Then jax tries it, and raises if it cannot
be reached.
"""
_PIPE_VARIABLE = "SHARDOPT_FAILURES"
"""The environment variable with the descriptor of the pipe of `failures`."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    alone: bool = False,
) -> None:
    """Join this process to the other processes of the job; call it before any code uses a device.

    Args:
      coordinator_address: `"host:port"` of process 0.
      num_processes: how many processes the job has.
      process_id: the number of this process, from 0.
      alone: whether this process trains by itself, although a launcher started several. Otherwise
        `make_mesh`, strategies and `fit` refuse a process that did not join the others.

    Raises:
      TypeError: if `alone` is not True or False.
      ValueError: if only some of the three arguments are passed, or one of them and `alone`. If a
        launcher states several processes, but not where this one finds them.
      RuntimeError: if devices were already used in this process.

    Without arguments, the place of this process comes from the first of these that states it:

    - JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which `shardopt launch` sets;
    - Ray Train, in a worker of it: rank and number from `ray.train.get_context()`, the address from
      the first worker;
    - torchrun: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. With several processes on a machine,
      each gets the GPU with the number LOCAL_RANK;
    - Open MPI, other MPIs if mpi4py is installed, SLURM, indexed jobs of Kubernetes, Cloud TPU.

    On a single machine without a launcher it does nothing, and in a process that has joined
    already. On CPU, collectives between processes use gloo.

    Under `shardopt launch`:

    - An uncaught error ends this process at once. It does not wait for the other processes, which
      may be waiting for it.
    - If the launcher dies, this process dies too.
    - jax listens at 127.0.0.1, or with --hosts at this host's address in the network of the others.
    - SIGTERM ends this process, until `fit` handles the signal. jax's own preemption notice, which
      would ignore SIGTERM, is switched off.
    """
    from shardopt.runtime import _connection  # a program of one process can do without

    with calling("initialize"):
        connection = _connection.passed_connection(
            coordinator_address, num_processes, process_id, alone
        )
        # Ray's JaxTrainer has joined processes with GPUs and TPUs
        is_settled = alone or jax.distributed.is_initialized()
        if connection is None and not is_settled:
            connection = _connection.stated_connection()
    if connection is None:
        if is_settled:
            settle()
        return
    connection = _connection.at_listen_address(connection)
    is_launched = "SHARDOPT_LAUNCHED" in os.environ
    if is_launched:
        _follow_launcher()
        share_compiled_programs()
    if "JAX_PROCESS_ID" in os.environ:
        progress.start_reports(int(os.environ["JAX_PROCESS_ID"]))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with progress.waiting("join"):
        if connection.address is not None and connection.rank:
            _wait_for_address(connection.address)
        jax.distributed.initialize(*connection[:3], **(connection.options or {}))
    settle()
    tell_end()
    if os.environ.get(progress.HANG_TIMEOUT):  # the launchers of several hosts cannot watch
        from shardopt.runtime._watchdog import watchdog

        watchdog(float(os.environ[progress.HANG_TIMEOUT]))
    if is_launched and threading.current_thread() is threading.main_thread():
        # jax has installed a handler for SIGTERM in C++ that Python does not know: restore Python's
        # handler.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def _wait_for_address(address: str) -> None:
    """Wait a limited time until process 0 listens: gRPC retries only a second after a failed
    connection.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < deadline:
        try:
            target = host.strip("[]"), int(port)
            socket.create_connection(target, timeout=_CONNECT_SECONDS).close()
            return
        except (OSError, ValueError):  # jax reports an invalid address
            time.sleep(0.01)
    text = (
        f"nothing has listened at {address}, the address of process 0, for {_CONNECT_SECONDS:g} s"
    )
    print(f"initialize: {text}; jax tries for 300 s more.", file=sys.stderr)


def _follow_launcher() -> None:
    """Make this process end at once when it fails, and when its launcher dies."""

    def hook(
        error_type: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != pid:  # a fork, whose error is its own
            previous_hook(error_type, error, traceback)
            return
        report_failure()
        sys.__excepthook__(error_type, error, traceback)
        end_at_once(getattr(error, "exit_code", 1))

    pid = os.getpid()
    previous_hook = sys.excepthook
    sys.excepthook = hook
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        # the launcher may have died while this process was importing
        os.kill(int(os.environ["SHARDOPT_LAUNCHED"]), 0)
    except ProcessLookupError:
        sys.exit("initialize: the launcher of this process has died.")
    except PermissionError:  # the launcher lives, and belongs to another user
        pass


@contextlib.contextmanager
def handled_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals while the context lasts.

    Python allows it in the main thread only; in others this does nothing. A process that is forked
    meanwhile, such as a worker of a loader, gets the previous handlers back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers: _Handlers = {}
    _replaced_handlers.append(previous_handlers)
    try:
        for number in numbers:
            previous_handlers[number] = signal.getsignal(number)
            signal.signal(number, handler)
        yield
    finally:
        _restore(previous_handlers)
        _replaced_handlers[:] = [
            replaced for replaced in _replaced_handlers if replaced is not previous_handlers
        ]


@contextlib.contextmanager
def signal_bytes() -> Iterator[Callable[[], int]]:
    """Yield a function that waits for a signal that Python handles, and returns its number.

    It returns while the main thread runs no Python, unlike a handler. A thread calls it until it
    returns 0, at the end of the context. Only the main thread can use the context.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _replaced_descriptors.append(previous)

    def wait() -> int:
        byte = os.read(reading, 1)
        if byte == b"\0":
            os.close(reading)
        elif previous != -1:  # such as the loop of asyncio in a notebook
            with contextlib.suppress(OSError):
                os.write(previous, byte)
        return byte[0]

    try:
        yield wait
    finally:
        if _replaced_descriptors:  # else this is a fork, and the pipe belongs to its parent
            signal.set_wakeup_fd(_replaced_descriptors.pop())
            os.write(writing, b"\0")
        os.close(writing)


_replaced_descriptors: list[int] = []
"""The descriptors that `signal_bytes` has replaced and must restore, the innermost last."""

_Handlers = dict[int, Any]
_replaced_handlers: list[_Handlers] = []
"""The handlers that `handled_signals` has replaced and must restore, the innermost last."""


def _restore(handlers: _Handlers) -> None:
    for number, handler in handlers.items():
        # None means a handler that was not installed from Python, so Python cannot restore it.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    handlers.clear()


_mask_before_fork = threading.local()


def _before_fork() -> None:
    """Block the signals that we handle: one that a child gets before it restores the handlers would
    be lost.
    """
    numbers = {number for handlers in _replaced_handlers for number in handlers}
    _mask_before_fork.value = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before_fork.value)


def _after_fork_in_child() -> None:
    """Restore all handlers, since `handled_signals` will not, and then let signals in."""
    while _replaced_handlers:
        _restore(_replaced_handlers.pop())
    while _replaced_descriptors:
        signal.set_wakeup_fd(_replaced_descriptors.pop())
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before_fork.value)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


def num_processes() -> int:
    """Return how many processes the job has; unlike `jax.process_count()`, it starts no backend."""
    from jax._src.distributed import global_state  # jax.process_count() would start a backend

    return global_state.num_processes or 1


def end_at_once(code: int) -> None:
    """End this process if it is one of several, without the exit handlers that wait for the others.

    Else return.

    At exit jax waits until all processes of the job have reached their exit. A process that failed
    would wait minutes for the others, and they for it.
    """
    if jax.distributed.is_initialized():
        report_failure()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@functools.cache
def use_exit_codes() -> None:
    """Let this process end with the `exit_code` of an error that is not caught, if the error has
    one.

    Python ends with code 1 after any uncaught error. So the handlers of `atexit` run here, and then
    the process ends.
    """
    previous_hook = sys.excepthook

    def hook(
        error_type: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous_hook(error_type, error, traceback)
        if hasattr(error, "exit_code"):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(getattr(error, "exit_code", 1))

    sys.excepthook = hook


class FailurePipe:
    """The launcher's end of a pipe that all processes inherit, through which a process reports that
    it fails.

    When a process fails, the kernel closes its connections before it reports the exit. So on a busy
    machine another process can notice, fail and end before the launcher learns of the first one. A
    process therefore reports its failure itself first.

    Args:
      reading: the descriptor that the launcher reads from.
      writing: the descriptor that the processes write to.

    Attributes:
      environment: the environment variable through which a process finds the pipe.
      descriptor: the descriptor that a process inherits.
    """

    def __init__(self, reading: int, writing: int):
        self._reading = reading
        self.descriptor = writing
        self.environment = {_PIPE_VARIABLE: str(writing)}

    def ranks(self) -> list[int]:
        """Return the ranks that reported a failure since the last call, in order."""
        received = b""
        with contextlib.suppress(BlockingIOError):  # the pipe is empty
            while True:
                received += os.read(self._reading, 4096)
        return [int(line) for line in received.split()]


@contextlib.contextmanager
def failures() -> Iterator[FailurePipe]:
    """Open the pipe for the processes of a job; close it at the end."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        yield FailurePipe(reading, writing)
    finally:
        os.close(reading)
        os.close(writing)


def report_failure() -> None:
    """Tell the launcher that this process fails, if a launcher listens."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ[_PIPE_VARIABLE])
        # the number may belong to another file by now
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.write(descriptor, f"{int(os.environ['JAX_PROCESS_ID'])}\n".encode())


def trim_malloc() -> None:
    """Return freed memory to the operating system, if the C library supports it (glibc).

    XLA's compiler uses hundreds of megabytes for the step of a small model, and gigabytes for the
    step of a large model. After they are freed, glibc keeps them for the process, in addition to
    all later allocations of training.

    References:
      malloc_trim(3), Linux man-pages.
    """
    # another C library lacks this function
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def gather_to_host(leaf: jax.Array | np.ndarray) -> np.ndarray:
    """Return a whole leaf as numpy, gathered from all processes that hold a part of it."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(jax.device_get(leaf))


def share_compiled_programs() -> None:
    """Let all processes of this machine find the programs that process 0 compiled, if the devices
    are CPUs.

    With several processes, only the first writes jax's cache. But the key of the cache has a
    fingerprint of the topology, which on CPU differs between processes (jax 0.10.2). So the others
    find nothing and compile again at each start. This replaces the fingerprint by the values that a
    program depends on: the kinds of the devices, and the processor. A program for one device is
    loaded on the device of each process, as jax does on GPUs. On TPU its key has the number of the
    device, and nobody has tried to load it elsewhere; so jax's key stays.
    """
    from jax._src import cache_key

    hash_topology = cache_key._hash_accelerator_config
    if getattr(hash_topology, "is_shared", False):
        return

    def hash_devices(key_hash: Any, devices: np.ndarray) -> None:
        if all(device.platform == "cpu" for device in devices.flat):
            key_hash.update(
                "\n".join([*(device.device_kind for device in devices.flat), _processor()]).encode()
            )
        else:
            hash_topology(key_hash, devices)

    hash_options = cache_key._hash_serialized_compile_options

    def hash_without_device(key_hash: Any, options: Any, **arguments: Any) -> None:
        # the programs of one device have the number of the device of their process in the key
        devices = options.device_assignment
        is_single = (
            devices is not None and devices.replica_count() * devices.computation_count() == 1
        )
        if is_single and jax.default_backend() == "cpu":
            arguments["strip_device_assignment"] = True
        hash_options(key_hash, options, **arguments)

    setattr(hash_devices, "is_shared", True)  # noqa: B010, which types do not know
    cache_key._hash_accelerator_config = hash_devices
    cache_key._hash_serialized_compile_options = hash_without_device


def _processor() -> str:
    """Return the name and the instruction sets of this machine's processor, if the system reports
    them.
    """
    try:
        first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = re.findall("^(?:model name|flags|Features).*", first_core, re.MULTILINE)
    return "\n".join(lines) or platform.processor()
