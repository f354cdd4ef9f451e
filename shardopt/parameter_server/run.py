"""A run: its description, the server at work with its log, its result, and its snapshots.

Whatever drives a run (threads, Ray, a simulation) drives a `Run`; it is the one thing here that changes.
"""

import base64
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import CheckpointError, format_error
from shardopt.core.types import PyTree, TrainState
from shardopt.parameter_server.apply import Mathematics
from shardopt.parameter_server.clock import PersistentMap, make_clock
from shardopt.parameter_server.log import Event, Header, Log, Positions
from shardopt.parameter_server.server import Server, ServerState
from shardopt.parameter_server.updates import Update, check_params, digest
from shardopt.parameter_server.views import Status, WorkerStats, summarize

BatchesOf = Callable[[int], Iterable[PyTree]]
"""`batches_of(worker)`, the batches of a worker."""

Availability = Mapping[int, Sequence[tuple[float, float]]]
"""worker -> periods `(from, to)` in versions when it is there."""


class Compute(NamedTuple):
    """What workers do apart from talking to the server.

    Attributes:
      begin: `begin(worker, position)`, at each join: its batches go on after so many rounds.
      next_batch: `next_batch(worker) -> batch`, or None where there are no more.
      update: `update(worker, params, batch, clock) -> Update`, finished, on the device of the server.
      on_server: `on_server(tree) -> tree`, moved to the device of the server: the first of the first worker.
      ahead: `ahead(worker, batch)`: do what of a round needs nothing that is pulled for it, while that and the push before
        it travel. None where all does.
    """

    begin: Callable[[int, int], None]
    next_batch: Callable[[int], PyTree | None]
    update: Callable[[int, PyTree, PyTree, int], Update | None]
    on_server: Callable[[PyTree], PyTree]
    ahead: Callable[[int, PyTree], None] | None = None


class MakeServer(Protocol):
    """Makes the server of a run."""

    def __call__(self, *, donate: bool, mathematics: Mathematics | None = None) -> Server:
        """Return a new server; see `make_server`."""
        ...


class MakeCompute(Protocol):
    """Makes the workers of a run."""

    def __call__(self, batches_of: BatchesOf, key: np.ndarray, worker: int | None = None) -> Compute:
        """Return all workers in this process, or one that has a process to itself."""
        ...


class RunSpec(NamedTuple):
    """What a run is made of, apart from its data: threads, Ray, replays and simulations start from it.

    Attributes:
      who: the function that the user called, for messages.
      num_workers: how many.
      make_server: `make_server(donate=...) -> Server`.
      make_compute: `make_compute(batches_of, key, worker=None) -> Compute`.
      header: what the log keeps of the workers, apart from the random key.
      backend: "threads" or "ray". On Ray the functions above cross to other processes by pickling.
      devices: on Ray, how many devices the process of each worker has.
      address: of the Ray cluster; None for a local one.
      max_restarts: on Ray, how often each worker that was killed is started again.
      check_params: `check_params(who, params)` refuses parameters that cannot be trained so.
      servers: over how many servers the parameters are sharded.
      hosts: on Ray, how many processes each worker has, each with `devices`.
      hang_timeout: on Ray, after how many seconds without progress a worker is killed; None for never.
    """

    who: str
    num_workers: int
    make_server: MakeServer
    make_compute: MakeCompute
    header: Mapping[str, Any] = {}
    backend: str = "threads"
    devices: Sequence[int] = ()
    address: str | None = None
    max_restarts: int = 0
    check_params: Callable[[str, PyTree], None] = check_params
    servers: int = 1
    hosts: int = 1
    hang_timeout: float | None = None

    def settings(self, key: np.ndarray) -> Header:
        """Return what the log of a run with this random key data keeps of its workers."""
        return {"rng": key.tolist(), **self.header}


class Job(NamedTuple):
    """What a call of a run asks for.

    Attributes:
      params: the parameters to begin with.
      batches_of: the data.
      key: the data of the random key.
      num_updates: the version to stop at.
      availability: when each worker is there.
      log_path: a file that gets the log, or None.
    """

    params: PyTree
    batches_of: BatchesOf
    key: np.ndarray
    num_updates: int
    availability: Availability
    log_path: str | os.PathLike[str] | None


class AsyncResult(NamedTuple):
    """How an asynchronous run ended.

    Attributes:
      params: the parameters on the server; None from a simulation of time only.
      log: the event log, for `parameter_server.replay` and `Log.save`.
      metrics: what `parameter_server.summarize(log)` says of the run: rates, histograms of staleness (clocks) and
        delay (versions), seconds that each worker waited; "stopped", which is "completed" (num_updates reached),
        "exhausted" (no worker is left, or the data is at its end), "early" (by early stopping) or "until" (of a
        simulation); "push_bytes", of the gradients that were pushed since the run last began, as they were encoded;
        with a reducer that has error feedback, "unsent" {worker: what its memory holds} and "lost_memory" {worker:
        [what it held each time that the worker left or was resumed]}, in norms of the gradient that it pushed last;
        and "history", the loss and aux metrics of every update as arrays [updates].
    """

    params: PyTree
    log: Log
    metrics: dict[str, Any]


_IN_FLIGHT = 128
"""More updates than are ever on their way through the device at once."""


class Run:
    """A server, its state, and its log. Not thread-safe: whoever shares it holds a lock.

    Args:
      server: a new one.
      params: the parameters to begin with.
      header: what the log keeps of the workers.
      now: `now() -> seconds` since the run began.
    """

    def __init__(self, server: Server, params: PyTree, header: Header, now: Callable[[], float]):
        self.server, self.now = server, now
        self.state: ServerState = server.init(params)
        settings = {
            "max_staleness": server.max_staleness,
            "rule": {"name": server.rule.name, "config": dict(server.rule.config)},
            "nonfinite": server.nonfinite,
        }
        settings |= {"servers": server.servers} if server.servers > 1 else {}
        initial = None if params is None else digest(self.params)
        self.log = Log({**settings, **header, "initial": initial, "final": None})
        self.positions, self.stats = Positions(), WorkerStats()
        self.push_bytes = 0
        self.unsent: dict[int, jax.Array | float] = {}  # what the error feedback of each worker holds
        self.lost_memory: dict[int, list[float]] = {}
        self._history: list[Mapping[str, np.ndarray]] = []  # numbers, once they are old enough to be known
        self._recent: list[Mapping[str, jax.Array]] = []

    @property
    def params(self) -> PyTree:
        """The parameters as users know them, also where several servers share them."""
        return self.server.whole(self.state.params)

    def join(self, worker: int) -> Event:
        """Let a worker in."""
        return self._record(*self.server.join(self.state, worker))

    def may_pull(self, worker: int) -> bool:
        """Say whether a worker may start its next step now."""
        return self.server.may_pull(self.state, worker)

    def pull(self, worker: int, asked: float) -> Event:
        """Begin a step that the worker asked for at this time; the parameters are `state.params`."""
        return self._record(*self.server.pull(self.state, worker), asked)

    def push(self, worker: int, update: Update | None, pulled_version: int) -> Event:
        """Take the result of a step."""
        event = self._record(*self.server.push(self.state, worker, update, pulled_version))
        if update is not None:
            self.push_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(update.grads))
            if update.unsent is not None:
                self.unsent[worker] = update.unsent
        return event

    def leave(self, worker: int, asked: float | None = None) -> Event:
        """Let a worker go; `asked` is since when it has been waiting for a step, if it has."""
        self._drop_memory(worker)
        return self._record(*self.server.leave(self.state, worker), asked)

    def resume(self, worker: int) -> Event:
        """Let a worker go on after `restore_run`."""
        self._drop_memory(worker)
        return self._record(*self.server.resume(self.state, worker))

    def status(self, num_updates: int) -> Status:
        """Return who is doing what."""
        now = self.now()
        workers = self.stats.workers(now, lambda worker: not self.may_pull(worker))
        return Status(now, self.state.version, num_updates, workers)

    def history(self, since: int = 0) -> list[Mapping[str, jax.Array | np.ndarray]]:
        """Return the metrics of each update from version `since` on; the latest may still be in flight."""
        return [*self._history[since:], *self._recent[max(0, since - len(self._history)) :]]

    def finish(self, stopped: str, **more: object) -> AsyncResult:
        """Return the result, once nobody works any more, with `more` metrics."""
        params = self.params
        if params is not None:
            params = jax.block_until_ready(params)
            self.log.header["final"] = digest(params)
        metrics = {**summarize(self.log), "stopped": stopped, "push_bytes": self.push_bytes}
        metrics |= {"history": _as_arrays(self.history()), **more}
        if self.server.reducer is not None:
            metrics["unsent"] = {worker: float(value) for worker, value in sorted(self.unsent.items())}
            metrics["lost_memory"] = dict(sorted(self.lost_memory.items()))
        return AsyncResult(params, self.log, metrics)

    def restore(
        self, state: ServerState, log: Log, history: Sequence[Mapping[str, np.ndarray]], unsent: Mapping[int, float]
    ) -> None:
        """Go on from where an earlier run was; its times are counted on from."""
        self.unsent, self.lost_memory = dict(unsent), {}
        began, clock = log[len(log) - 1].time if len(log) else 0.0, self.now
        start = clock()
        self.now = lambda: began + clock() - start
        self.state, self.log, self.positions, self.stats = state, log, Positions(log), WorkerStats(log)
        self._history, self._recent = list(history), []

    def _drop_memory(self, worker: int) -> None:
        """Whoever joins or goes on begins without error feedback."""
        if worker in self.unsent:
            self.lost_memory.setdefault(worker, []).append(float(self.unsent.pop(worker)))

    def _record(self, state: ServerState, event: Event, asked: float | None = None) -> Event:
        if state.version > self.state.version and state.metrics:
            self._recent.append(state.metrics)
            if len(self._recent) == 2 * _IN_FLIGHT:  # waits for nothing that is still in flight
                self._history += jax.device_get(self._recent[:_IN_FLIGHT])
                del self._recent[:_IN_FLIGHT]
        now = self.now()
        event = event._replace(time=now, waited=0.0 if asked is None else now - asked)
        self.state = state
        self.log.append(event)
        self.positions.record(event)
        self.stats.record(event)
        return event


def _as_arrays(history: Sequence[Mapping[str, jax.Array | np.ndarray]]) -> dict[str, np.ndarray]:
    rows = jax.device_get(history)
    return {name: np.asarray([row[name] for row in rows]) for name in (rows[0] if rows else ())}


class Checkpoints(Protocol):
    """What a run asks of `shardopt.Checkpoints`, which stands on a floor above."""

    directory: Path
    every: int
    resume: bool

    def save(self, state: PyTree, *, step: int, metrics: dict[str, Any], extra: dict[str, Any]) -> None:
        """Write in the background."""
        ...

    def restore(self, target: PyTree, *, step: int | None = None) -> tuple[PyTree, dict[str, Any]]:
        """Return a state and what was saved beside it."""
        ...

    def latest(self) -> int | None:
        """Return the newest step."""
        ...

    def wait(self) -> None:
        """Wait until what was saved is committed."""
        ...


class Snapshot(NamedTuple):
    """A run right after an update: what `restore_run` goes on from.

    Attributes:
      state: `step` is the version, `opt_state` has the states of the optimizer and of the rule.
      about: clocks, log and history, as JSON.
    """

    state: TrainState
    about: dict[str, Any]


def snapshot(run: Run) -> Snapshot:
    """Copy a run right after an update, when no push waits for others.

    The optimizer's state is copied, because the next update takes over its memory; parameters are not.
    """
    state, clock = run.state, run.state.clock
    if state.waiting:
        raise AssertionError("a snapshot is taken right after an update, when no push waits")
    params, optimizer, rule = run.server.copy(state)
    copied = {"optimizer": optimizer, "rule": rule}
    train_state = TrainState(np.int32(state.version), params, copied, np.zeros(2, np.uint32))
    about = {
        "header": run.log.header,
        "steps": sorted(clock.steps.items()),
        "fastest": clock.fastest,
        "slowest": clock.slowest,
        "unsent": sorted((worker, float(value)) for worker, value in run.unsent.items()),
        "arrays": _pack(run),
    }
    return Snapshot(train_state, about)


def restore_run(who: str, run: Run, found: Snapshot) -> None:
    """Let a run, which is new, go on from a snapshot."""
    state, about = found
    saved, mine = about["header"], run.log.header
    _check_settings(who, saved, mine)
    if "devices" in saved:
        saved = {**saved, "devices": max(saved["devices"], mine["devices"], key=len)}
    steps: PersistentMap[int] = PersistentMap()
    for worker, at in about["steps"]:
        steps = steps.put(worker, at)
    clock = make_clock(run.server.max_staleness)._replace(
        slowest=about["slowest"], fastest=about["fastest"], counts=dict(Counter(steps.values())), steps=steps
    )
    log, history = _unpack(about["arrays"], saved)
    optimizer, rule = state.opt_state["optimizer"], state.opt_state["rule"]
    restored = run.server.adopt(ServerState(state.params, optimizer, rule, int(state.step), clock))
    run.restore(restored, log, history, dict(about.get("unsent", ())))


def load_snapshot(who: str, checkpoints: Checkpoints, server: Server, params: PyTree, step: int) -> Snapshot:
    """Read a snapshot, onto the device of the parameters."""

    def first(params: PyTree) -> TrainState:
        begun = server.init(params)
        states = {"optimizer": begun.opt_state, "rule": begun.rule_state}
        return TrainState(jnp.int32(0), begun.params, states, jnp.zeros(2, jnp.uint32))

    state = jax.eval_shape(first, params)
    (device,) = jax.tree.leaves(params)[0].devices()
    here = jax.sharding.SingleDeviceSharding(device)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), state)
    found, extra = checkpoints.restore(target, step=step)
    if "server" not in extra:
        what = f"the checkpoints in {checkpoints.directory} are not of an asynchronous run."
        raise CheckpointError(format_error(who, what, fix="choose another folder."))
    return Snapshot(found, extra["server"])


def _check_settings(who: str, saved: Header, mine: Header) -> None:
    names = [name for name in {**saved, **mine} if name not in ("initial", "final", "devices")]
    others = [
        f"{name}: {saved.get(name)} in the checkpoint, {mine.get(name)} now"
        for name in names
        if saved.get(name) != mine.get(name)
    ]
    devices = zip(saved.get("devices") or [], mine.get("devices") or [], strict=False)
    others += [f"devices of worker {i}: {a} then, {b} now" for i, (a, b) in enumerate(devices) if a != b]
    if others:
        what = "the checkpoint is of a run with other settings."
        raise ValueError(format_error(who, what, others, "use the same settings, or another folder."))


def _pack(run: Run) -> str:
    """Return log and history as text: 15 to 20 bytes an event."""
    columns: dict[str, Any] = {  # a file of numpy knows no bfloat16
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
    log = Log.from_columns(header, {name[4:]: value for name, value in arrays.items() if name.startswith("log/")})
    history = {name[8:]: value for name, value in arrays.items() if name.startswith("history/")}
    length = len(next(iter(history.values()), ()))
    return log, [{name: value[i] for name, value in history.items()} for i in range(length)]
