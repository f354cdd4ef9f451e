"""`AsyncOptimizer`, the result of `async_sgd` and `async_local_sgd`, made from the description of its runs."""

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shardopt.core.arguments import check_count, check_number, is_integer
from shardopt.core.early_stopping import EarlyStopping
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.parameter_server.callbacks import Callbacks, EvaluateParams
from shardopt.parameter_server.log import Log
from shardopt.parameter_server.ray import run_on_ray
from shardopt.parameter_server.replay import check_log, replay_events
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.run import AsyncResult, Availability, BatchesOf, CheckpointStore, Job, RunSpec
from shardopt.parameter_server.server import Server
from shardopt.parameter_server.simulation import check_availability
from shardopt.parameter_server.threads import run_on_threads
from shardopt.parameter_server.worker import key_data


class RunFn(NamedTuple):
    """Train until the server has made `num_updates` updates: the `run` of an `AsyncOptimizer`.

    Args:
      params: the initial parameters. Leaves that are not floating are not trained.
      batches_of: `batches_of(worker)` returns an iterable of the worker's batches, pytrees with leaves [rows, ...]. It is
        called in the worker's thread, at each join. Batches that the worker has already pushed are drawn and skipped, so
        each batch is used once, however often the worker dies. A worker without batches leaves.
      num_updates: the number of versions of the parameters; with max_staleness=0 the number of clocks.
      rng: a random key, for losses that take one.
      availability: the periods of workers that are not always present, `{worker: [(from, to), ...]}` in versions. At
        `to` the worker dies, and its step in flight is lost.
      log_path: a file for the log, which is also written if the run fails.
      checkpoints: a `so.Checkpoints`, which saves the server (parameters, optimizer, clocks, log) every so many updates
        and at the end. If its folder has checkpoints, the run continues from the newest; see below.
      early_stopping: a `so.EarlyStopping`, which watches the evaluations and ends the run ("early").
      evaluate: `evaluate(params) -> metrics`. Its results are in `metrics["evaluations"]`, together with the means of
        `history` over the updates since the previous evaluation.
      evaluate_every: updates between evaluations; the workers continue during an evaluation.
      progress: show a table of the workers on a terminal, or a line every ten seconds elsewhere, on standard error.

    Returns:
      An `AsyncResult`. When no worker is left the run ends ("exhausted").

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, a parameter of `async_sgd` is a random key, or the checkpoints are of a run
        with other settings.
      NonFiniteUpdateError: if an update is not finite and `nonfinite` is "raise"; it names worker, step and leaves.
      ConnectionError: if no Ray answers at the address.
      WorkersLostError: on Ray, if all workers were killed and none is restarted.
      ServerLostError: on Ray, if the server was killed and there is no checkpoint.
      Exception: any error of a worker ends the run, and is raised with its traceback.

    **Checkpoints**: a run that continues from a checkpoint restores the clock of each worker and its position in its
    batches. Steps that were in flight are repeated. Islands begin with a fresh state, and reducers with empty error
    feedback. Workers that are not part of the new run leave, and new workers join. `metrics["resumed_from"]` is the
    version of the checkpoint. With max_staleness=0 the result equals an uninterrupted run bit for bit, unless islands or
    error feedback had a state. Otherwise the result equals a replay of its log.

    **Ray**: the run survives killed processes.

    - A killed worker is removed from the clock; a push arrives completely or not at all. `metrics["killed"]` names the
      killed workers. `metrics["hung"]` names the workers among them that the run itself killed, after `hang_timeout` seconds
      without progress.
    - A killed server restarts from the newest of `checkpoints`, and the workers continue with it. `metrics["lost_updates"]`
      is the number of lost updates.
    - If one of several servers is killed, it restarts with its range, and no update is lost. `metrics["killed_servers"]`
      names it.

    Loss, data and optimizer are pickled: a function that is defined in a module must be importable on the workers.
    """

    spec: RunSpec
    server: Server

    def __call__(
        self,
        params: PyTree,
        batches_of: BatchesOf,
        *,
        num_updates: int,
        rng: jax.Array | None = None,
        availability: Availability | None = None,
        log_path: str | os.PathLike[str] | None = None,
        checkpoints: CheckpointStore | None = None,
        early_stopping: EarlyStopping | None = None,
        evaluate: EvaluateParams | None = None,
        evaluate_every: int = 100,
        progress: bool = False,
    ) -> AsyncResult:
        """Train; see `RunFn`."""
        spec, caller = self.spec, self.spec.caller
        spec.check_params(caller, params)
        check_count(caller, "num_updates", num_updates, minimum=0)
        periods = _periods(caller, availability, spec.num_workers)
        callbacks = Callbacks(
            caller,
            checkpoints=checkpoints,
            early_stopping=early_stopping,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            progress=progress,
        )
        job = Job(params, batches_of, key_data(caller, rng), num_updates, periods, log_path)
        return (
            run_on_ray(spec, job, callbacks)
            if spec.backend == "ray"
            else run_on_threads(spec, self.server, job, callbacks)
        )


class ReplayFn(NamedTuple):
    """Repeat a run from its log, on one thread, bit for bit; see `parameter_server.replay`."""

    spec: RunSpec

    def __call__(self, log: Log, params: PyTree, batches_of: BatchesOf) -> PyTree:
        """Return the final parameters of the run."""
        check_log(log)
        key = np.asarray(log.header["rng"], np.uint32)
        return replay_events(log, self.spec.make_server(donate=False), self.spec.make_compute(batches_of, key), params)


class AsyncOptimizer(NamedTuple):
    """An optax optimizer that trains without barriers.

    Attributes:
      run: `run(params, batches_of, *, num_updates, ...) -> AsyncResult`; see `RunFn`.
      replay: `replay(log, params, batches_of) -> params`; see `parameter_server.replay`.
      workers: the mesh of each worker.
      wrapped: the optax transformation that the server applies.
      max_staleness: the bound in clocks; None for no bound.
      rule: the staleness rule; None for none.
      backend: "threads" or "ray".
    """

    run: RunFn
    replay: ReplayFn
    workers: tuple[Mesh, ...]
    wrapped: optax.GradientTransformation
    max_staleness: int | None
    rule: Rule | None
    backend: str


def make_run(spec: RunSpec) -> RunFn:
    """Return the `run` of an optimizer; its programs stay compiled from call to call."""
    return RunFn(spec, spec.make_server(donate=True))


def _periods(caller: str, availability: Availability | None, num_workers: int) -> Availability:
    """Return the periods in which each worker is present, in versions."""
    always = [(0, math.inf)]
    if availability is None:
        return dict.fromkeys(range(num_workers), always)
    if not isinstance(availability, Mapping):
        problem = f"availability must be a dict {{worker: [(from, to), ...]}}, got {type(availability).__name__}."
        raise TypeError(format_error(caller, problem))
    if unknown := [worker for worker in availability if not is_integer(worker) or not 0 <= worker < num_workers]:
        raise ValueError(format_error(caller, f"availability names workers that are not there: {unknown}."))
    for worker, periods in availability.items():
        check_availability(caller, f"worker {worker}", periods)
    return {worker: availability.get(worker, always) for worker in range(num_workers)}


def check_backend(
    caller: str, backend: str, address: str | None, max_restarts: int, hang_timeout: float | None
) -> None:
    """Refuse an unknown backend, options of Ray of the wrong kind, and options of Ray with another backend."""
    if backend not in ("threads", "ray"):
        problem = f"backend must be 'threads' or 'ray', got {backend!r}."
        raise ValueError(format_error(caller, problem, fix='use backend="threads" for workers in this process.'))
    if address is not None and not isinstance(address, str):
        raise TypeError(f"{caller}: address must be a string or None, got {type(address).__name__}.")
    check_count(caller, "max_restarts", max_restarts, minimum=0)
    if hang_timeout is not None:
        check_number(caller, "hang_timeout", hang_timeout, positive=True)
    if backend != "ray" and (address is not None or max_restarts or hang_timeout is not None):
        problem = f"address, max_restarts and hang_timeout are for backend='ray', got backend={backend!r}."
        raise ValueError(format_error(caller, problem, fix='use backend="ray", or leave them out.'))
