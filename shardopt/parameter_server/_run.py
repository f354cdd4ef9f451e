"""A run: its description, its server and log while it trains, its result, and its snapshots.

Threads, Ray and the simulation all drive a `AsyncRun`. It is the only mutable object in this module.
"""

import base64
import io
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.core import CheckpointError, PyTree, TrainState, format_error
from shardopt.parameter_server._apply import copy_states
from shardopt.parameter_server._clock import make_clock
from shardopt.parameter_server._log import Event, Header, Log
from shardopt.parameter_server._server import ParameterServer, ServerState
from shardopt.parameter_server._updates import Update, check_params, digest
from shardopt.parameter_server._views import Status, WorkerStats

BatchesOf = Callable[[int], Iterable[PyTree]]
"""`batches_of(worker)` returns the batches of a worker."""


class WorkerCompute(NamedTuple):
    """The work of the workers, without their communication with the server.

    Attributes:
      begin: `begin(worker, position)`, at each join: the worker's batches continue after `position`
        rounds.
      next_batch: `next_batch(worker) -> batch`, or None at the end of the data.
      update: `update(worker, params, batch, clock) -> Update`, fully computed, on the device of the
        server.
      device: the device of the server, the first device of the first worker.
    """

    begin: Callable[[int, int], None]
    next_batch: Callable[[int], PyTree | None]
    update: Callable[[int, PyTree, PyTree, int], Update | None]
    device: Any


class MakeCompute(Protocol):
    """Makes the workers of a run."""

    def __call__(
        self, batches_of: BatchesOf, key: np.ndarray, worker: int | None = None
    ) -> WorkerCompute:
        """Return all workers, in this process; or one worker, which has a process to itself."""
        ...


class RunSpec(NamedTuple):
    """The description of a run without its data: threads, Ray, replays and simulations start from
    it.

    Attributes:
      caller: the function that the user called, for messages.
      num_workers: the number of workers.
      make_server: `make_server(donate=...) -> ParameterServer`.
      make_compute: `make_compute(batches_of, key, worker=None) -> WorkerCompute`.
      header: the settings of the workers that the log records, without the random key.
      backend: "threads" or "ray". On Ray the functions above are pickled and sent to other
        processes.
      devices: on Ray, the number of devices of each worker's process.
      address: the address of the Ray cluster; None for a local one.
      max_restarts: on Ray, how often each worker that was killed is restarted.
      check_params: `check_params(params)` refuses parameters that this run cannot train.
      hang_timeout: on Ray, a worker is killed after so many seconds without progress; None for
        never.
    """

    caller: str
    num_workers: int
    make_server: Callable[..., ParameterServer]
    make_compute: MakeCompute
    header: Mapping[str, Any] = {}
    backend: str = "threads"
    devices: Sequence[int] = ()
    address: str | None = None
    max_restarts: int = 0
    check_params: Callable[[PyTree], None] = check_params
    hang_timeout: float | None = None

    @property
    def num_processes(self) -> int:
        """The number of processes on Ray, one CPU each: of the workers, and of the server."""
        return self.num_workers + 1

    def settings(self, key: np.ndarray) -> Header:
        """Return the settings of the workers that the log records, with this random key data."""
        return {"rng": key.tolist(), **self.header}


class AsyncJob(NamedTuple):
    """The arguments of one call of `AsyncOptimizer.run`.

    Attributes:
      params: the initial parameters.
      batches_of: the data.
      key: the data of the random key.
      num_updates: the version to stop at.
      workers: the numbers of the workers.
      log_path: the file to write the log to, or None.
    """

    params: PyTree
    batches_of: BatchesOf
    key: np.ndarray
    num_updates: int
    workers: Collection[int]
    log_path: str | os.PathLike[str] | None


class AsyncResult(NamedTuple):
    """The result of an asynchronous run.

    Attributes:
      params: the parameters on the server; None from a simulation of time only.
      log: the event log, for `AsyncOptimizer.replay` and `Log.save`.
      metrics: a dict of the entries below.

    The metrics are the entries of `log.summary()`: rates, histograms of staleness
    (clocks) and delay (versions), and the seconds that each worker waited. In addition:

    - "stopped": "completed" (num_updates reached), "exhausted" (no worker is left, or the data is
      at its end), "early" (early stopping) or "until" (the time limit of a simulation).
    - "push_bytes": bytes of the encoded gradients that were pushed since the run last began.
    - "history": the loss and aux metrics of every update, as arrays [updates].
    - "unsent", with error feedback: {worker: norm of its error memory}, relative to the norm of its
      last pushed gradient.
    - "lost_memory", with error feedback: {worker: [norm of the memory at each leave or resume]}, in
      the same units.
    """

    params: PyTree
    log: Log
    metrics: dict[str, Any]


class ServerLostError(RuntimeError):
    """The process of the server was killed, and there is no checkpoint to continue from."""


class WorkersLostError(RuntimeError):
    """Every worker was killed."""


_IN_FLIGHT = 128
"""A number of updates that is larger than the number that a device has in flight at once."""


class AsyncRun:
    """A server, its state, and its log. Not thread-safe: callers that share it must hold a lock.

    Args:
      server: a new server.
      params: the initial parameters.
      header: the settings of the workers that the log records.
      now: `now() -> seconds` since the run began.
    """

    def __init__(
        self, server: ParameterServer, params: PyTree, header: Header, now: Callable[[], float]
    ):
        self.server = server
        self.now = now
        self.state: ServerState = server.init(params)
        initial = None if params is None else digest(self.state.params)
        self.log = Log({**server.settings, **header, "initial": initial, "final": None})
        # worker -> rounds of its data that it has finished
        self.positions: Counter[int] = Counter()
        self.stats = WorkerStats()
        self.push_bytes = 0
        # worker -> relative norm of its error memory
        self.unsent: dict[int, jax.Array | float] = {}
        self.lost_memory: dict[int, list[float]] = {}
        # metrics of old updates, which are certainly computed
        self.old_history: list[Mapping[str, np.ndarray]] = []
        # metrics of later updates, which may be in flight
        self.recent_history: list[Mapping[str, jax.Array]] = []

    def join(self, worker: int) -> Event:
        """Let a worker join."""
        return self._record(*self.server.join(self.state, worker))

    def may_pull(self, worker: int) -> bool:
        """Return whether a worker may start its next step now."""
        return self.server.may_pull(self.state, worker)

    def pull(self, worker: int, asked_at: float) -> Event:
        """Begin a step that the worker asked for at the time `asked_at`.

        Its parameters are `state.params`.
        """
        return self._record(*self.server.pull(self.state, worker), asked_at)

    def push(self, worker: int, update: Update | None, pulled_version: int) -> Event:
        """Take the result of a step."""
        event = self._record(*self.server.push(self.state, worker, update, pulled_version))
        if update is not None:
            self.push_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(update.grads))
            if update.unsent is not None:
                self.unsent[worker] = update.unsent
        return event

    def leave(self, worker: int, asked_at: float | None = None) -> Event:
        """Let a worker leave.

        `asked_at` is the time since which it has waited for a step, None if it has not.
        """
        self._drop_memory(worker)
        return self._record(*self.server.leave(self.state, worker), asked_at)

    def resume(self, worker: int) -> Event:
        """Let a worker continue after `restore_run`."""
        self._drop_memory(worker)
        return self._record(*self.server.resume(self.state, worker))

    def status(self, num_updates: int) -> Status:
        """Return the current activity of every worker."""
        workers = self.stats.workers(lambda worker: not self.may_pull(worker))
        return Status(self.now(), self.state.version, num_updates, workers)

    def history(self, since: int = 0) -> list[Mapping[str, jax.Array | np.ndarray]]:
        """Return the metrics of each update after version `since`.

        The latest may still be in flight.
        """
        return [
            *self.old_history[since:],
            *self.recent_history[max(0, since - len(self.old_history)) :],
        ]

    def finish(self, stopped: str, **more_metrics: object) -> AsyncResult:
        """Return the result of a run whose workers have all ended."""
        params = self.state.params
        if params is not None:
            params = jax.block_until_ready(params)
            self.log.header["final"] = digest(params)
        metrics = {**self.log.summary(), "stopped": stopped, "push_bytes": self.push_bytes}
        metrics |= {"history": _as_arrays(self.history()), **more_metrics}
        if self.server.reducer is not None:
            metrics["unsent"] = {
                worker: float(value) for worker, value in sorted(self.unsent.items())
            }
            metrics["lost_memory"] = dict(sorted(self.lost_memory.items()))
        return AsyncResult(params, self.log, metrics)

    def _drop_memory(self, worker: int) -> None:
        """Record the error memory of a worker as lost: the worker joins or resumes with an empty
        one.
        """
        if worker in self.unsent:
            self.lost_memory.setdefault(worker, []).append(float(self.unsent.pop(worker)))

    def _record(self, state: ServerState, event: Event, asked_at: float | None = None) -> Event:
        if state.version > self.state.version and state.metrics:
            self.recent_history.append(state.metrics)
            # so that `device_get` does not wait for updates in flight
            if len(self.recent_history) == 2 * _IN_FLIGHT:
                self.old_history += jax.device_get(self.recent_history[:_IN_FLIGHT])
                del self.recent_history[:_IN_FLIGHT]
        now = self.now()
        event = event._replace(time=now, waited=0.0 if asked_at is None else now - asked_at)
        self.state = state
        self.log.append(event)
        self.positions[event.worker] += event.ends_round
        self.stats.record(event)
        return event


def _as_arrays(history: Sequence[Mapping[str, jax.Array | np.ndarray]]) -> dict[str, np.ndarray]:
    rows = jax.device_get(history)
    return {name: np.asarray([row[name] for row in rows]) for name in (rows[0] if rows else ())}


class RunSnapshot(NamedTuple):
    """A copy of a run right after an update, from which `restore_run` continues.

    Attributes:
      state: the server's arrays: `step` is the version, `opt_state` has the states of the optimizer
        and of the rule.
      record: clocks, log and history, as JSON.
    """

    state: TrainState
    record: dict[str, Any]


def take_snapshot(run: AsyncRun) -> RunSnapshot:
    """Copy a run right after an update, when no push waits for others.

    The optimizer's state is copied, because the next update takes over its memory. The parameters
    are not copied.
    """
    state = run.state
    clock = run.state.clock
    if state.waiting:
        raise AssertionError("a snapshot is taken right after an update, when no push waits")
    # Updates donate the states, and never the parameters, see `Mathematics.donate`.
    params, optimizer, rule = copy_states(state[:3])
    states = {"optimizer": optimizer, "rule": rule}
    train_state = TrainState(np.int32(state.version), params, states, np.zeros(2, np.uint32))
    record = {
        "header": run.log.header,
        "steps": sorted(clock.steps.items()),
        "fastest": clock.fastest,
        "slowest": clock.slowest,
        "unsent": sorted((worker, float(value)) for worker, value in run.unsent.items()),
        "arrays": _pack(run),
    }
    return RunSnapshot(train_state, record)


def restore_run(caller: str, run: AsyncRun, snapshot: RunSnapshot) -> None:
    """Continue from a snapshot with a new run."""
    state, record = snapshot
    saved = record["header"]
    current = run.log.header
    check_settings(caller, "checkpoint", saved, current)
    if "devices" in saved:
        saved = {**saved, "devices": max(saved["devices"], current["devices"], key=len)}
    clock = make_clock(run.server.max_staleness)._replace(
        slowest=record["slowest"], fastest=record["fastest"], steps=dict(record["steps"])
    )
    log, history = _unpack(record["arrays"], saved)
    optimizer = state.opt_state["optimizer"]
    rule = state.opt_state["rule"]
    run.state = ServerState(state.params, optimizer, rule, int(state.step), clock)
    run.log = log
    run.stats = WorkerStats(log)
    run.unsent = dict(record.get("unsent", ()))
    run.lost_memory = {}
    run.positions = Counter(event.worker for event in log if event.ends_round)
    run.old_history = list(history)
    run.recent_history = []
    last_time = log[len(log) - 1].time if len(log) else 0.0
    now = run.now
    start = now()
    # The log goes on where it ended: time that nobody trained is no time of the run.
    run.now = lambda: last_time + now() - start


def load_snapshot(
    caller: str, checkpoints: Checkpoints, server: ParameterServer, params: PyTree, step: int
) -> RunSnapshot:
    """Read a snapshot from a checkpoint, onto the device of the parameters."""

    def initial_state(params: PyTree) -> TrainState:
        server_state = server.init(params)
        states = {"optimizer": server_state.opt_state, "rule": server_state.rule_state}
        return TrainState(jnp.int32(0), server_state.params, states, jnp.zeros(2, jnp.uint32))

    abstract_state = jax.eval_shape(initial_state, params)
    (device,) = jax.tree.leaves(params)[0].devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract_state
    )
    state, extra = checkpoints.restore(target, step=step)
    if "server" not in extra:
        problem = f"the checkpoints in {checkpoints.directory} are not of an asynchronous run."
        raise CheckpointError(format_error(caller, problem, fix="choose another folder."))
    return RunSnapshot(state, extra["server"])


def check_settings(caller: str, source: str, saved: Header, current: Header) -> None:
    """Refuse settings other than the saved settings of a checkpoint or a log."""
    names = [name for name in {**saved, **current} if name not in ("initial", "final", "devices")]
    differences = [
        f"{name}: {saved.get(name)} in the {source}, {current.get(name)} now"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    devices = zip(saved.get("devices") or [], current.get("devices") or [], strict=False)
    differences += [
        f"devices of worker {i}: {a} then, {b} now" for i, (a, b) in enumerate(devices) if a != b
    ]
    if differences:
        problem = f"the {source} is of a run with other settings."
        raise ValueError(
            format_error(caller, problem, differences, f"use the settings of the {source}.")
        )


def _pack(run: AsyncRun) -> str:
    """Return the log and the history as text: 15 to 20 bytes per event."""
    columns: dict[str, Any] = {  # numpy's file format has no bfloat16
        f"history/{name}": column.astype(np.float32) if column.dtype.kind == "V" else column
        for name, column in _as_arrays(run.history()).items()
    }
    columns |= {f"log/{name}": value for name, value in run.log.columns().items()}
    file = io.BytesIO()
    np.savez_compressed(file, **columns)
    return base64.b64encode(file.getvalue()).decode()


def _unpack(text: str, header: Header) -> tuple[Log, list[Mapping[str, np.ndarray]]]:
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as file:
        arrays = dict(file)
    log = Log.from_columns(
        header, {name[4:]: value for name, value in arrays.items() if name.startswith("log/")}
    )
    history = {name[8:]: value for name, value in arrays.items() if name.startswith("history/")}
    length = len(next(iter(history.values()), ()))
    return log, [{name: value[i] for name, value in history.items()} for i in range(length)]
