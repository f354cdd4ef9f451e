"""The contestants as jobs: started by their own launchers, paused, and told how many steps to take."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

WORKER = str(Path(__file__).parent / "worker.py")


class Contestant(NamedTuple):
    """Who competes: a library, the function of its file, in how many processes, and the Python that
    has the library.
    """

    library: str
    strategy: str
    processes: int
    python: str = sys.executable

    @property
    def name(self) -> str:
        """How results call it."""
        return f"{self.library} {self.strategy}"


class Job(NamedTuple):
    """A contestant that runs: its launcher, a connection to each process, and what its first step
    told.
    """

    contestant: Contestant
    launchers: tuple[subprocess.Popen, ...]
    wires: tuple[IO[str], ...]
    first: list[dict[str, Any]]
    seconds_to_first_step: float


@contextlib.contextmanager
def running(contestant: Contestant, folder: Path, *, seconds: float = 300.0) -> Iterator[Job]:
    """Start a contestant and wait for its first step; end it with the context.

    Raises:
      RuntimeError: if it ends before, or takes longer.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        said = stack.enter_context((folder / f"{contestant.name}.log").open("w+"))
        start = time.perf_counter()
        launchers = tuple(_launch(contestant, folder, address, said))
        stack.callback(_end, launchers)
        try:
            wires = []
            for _ in range(contestant.processes):
                with _accept(server, launchers, seconds) as connection:  # the file keeps it open
                    connection.settimeout(seconds)
                    wires.append(stack.enter_context(connection.makefile("rw")))
            first = sorted((_read(wire) for wire in wires), key=lambda told: told["rank"])
        except (OSError, EOFError) as error:
            said.seek(0)
            raise RuntimeError(
                f"{contestant.name} did not take its first step.\n{said.read()[-4000:]}"
            ) from error
        yield Job(contestant, launchers, tuple(wires), first, time.perf_counter() - start)


def ask(job: Job, command: Any) -> list[dict[str, Any]]:
    """Tell every process of a job the same, and return their answers."""
    for wire in job.wires:
        wire.write(json.dumps(command) + "\n")
        wire.flush()
    return [_read(wire) for wire in job.wires]


def _launch(
    contestant: Contestant, folder: Path, address: str, said: IO[str]
) -> Iterator[subprocess.Popen]:
    count = contestant.processes
    words = [WORKER, contestant.library, contestant.strategy, str(folder)]
    environment = os.environ | {"PEERS_ADDRESS": address}
    environment.pop("XLA_FLAGS", None)

    def start(command: Sequence[str], **more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [contestant.python, *command],
            env=environment | more,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            cwd=folder,
        )

    if contestant.library == "shardopt":
        logs = f"--log-dir={folder / contestant.name}"
        yield start(["-m", "shardopt.cli", "launch", f"--processes={count}", logs, "--", *words])
    elif count == 1:
        yield start(words)
    elif contestant.library == "torch":
        port = f"--master-port={_free_port()}"
        yield start(["-m", "torch.distributed.run", f"--nproc-per-node={count}", port, *words])
    else:  # nothing launches plain jax, and MaxText and Levanter leave it to clusters
        place = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}",
            "JAX_NUM_PROCESSES": str(count),
        }
        for rank in range(count):
            yield start(words, **place, JAX_PROCESS_ID=str(rank))


def _accept(
    server: socket.socket, launchers: Sequence[subprocess.Popen], seconds: float
) -> socket.socket:
    """Wait for a process to report, as long as what should have started it lives."""
    server.settimeout(0.5)
    for _ in range(int(seconds / 0.5)):
        with contextlib.suppress(TimeoutError):
            return server.accept()[0]
        if any(launcher.poll() is not None for launcher in launchers):
            raise EOFError("a launcher has ended")
    raise TimeoutError(f"nobody reported for {seconds:g} s")


def _read(wire: IO[str]) -> dict[str, Any]:
    line = wire.readline()
    if not line:
        raise EOFError("a process has ended")
    return json.loads(line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end(launchers: Sequence[subprocess.Popen]) -> None:
    """End what was started, with its children: a launcher that gets SIGTERM ends its own."""
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    for launcher in launchers:
        try:
            launcher.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
