"""`AsyncOptimizer`, from the description of its runs: what `async_sgd` and `async_local_sgd` have in common."""

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
from shardopt.parameter_server.run import AsyncResult, Availability, BatchesOf, Checkpoints, Job, RunSpec
from shardopt.parameter_server.server import Server
from shardopt.parameter_server.simulation import check_availability
from shardopt.parameter_server.threads import run_on_threads
from shardopt.parameter_server.worker import key_data


class RunFn(NamedTuple):
    """Train until the server has made `num_updates` updates: the `run` of an `AsyncOptimizer`.

    On Ray, training goes on when a worker is killed: the clock forgets it, and a push arrives whole or not at all;
    `metrics["killed"]` names who was, and `metrics["hung"]` whom of these the run itself ended, being without progress for
    `hang_timeout` seconds. A killed server is started again from the newest of `checkpoints`, the
    workers go on there, and `metrics["lost_updates"]` says how many updates were lost. One of several servers that is
    killed comes back by itself with its part, and no update is lost; `metrics["killed_servers"]` names it. Loss, data and optimizer
    cross by pickling: what is defined in a module must be importable on the workers.

    Args:
      params: the parameters to begin with. Leaves that are not floating are not trained.
      batches_of: `batches_of(worker)` returns an iterable of the worker's batches, pytrees with leaves [rows, ...];
        it is called in the worker's thread, again each time that the worker joins, and what the worker had pushed is drawn
        and left out: each batch is used once, however often the worker dies. A worker without batches leaves.
      num_updates: versions of the parameters; with max_staleness=0 whole clocks.
      rng: a random key, for losses that take one.
      availability: which workers are there only at times, `{worker: [(from, to), ...]}` in versions: at `to` a
        worker dies with the step that it is at.
      log_path: a file that gets the log, also of a run that fails.
      checkpoints: a `so.Checkpoints`, which gets the server (parameters, optimizer, clocks, log) every so many
        updates and at the end. A run that finds checkpoints there goes on from the newest: each worker at its clock
        and in its batches, the steps in flight done again, with a fresh state of islands and error feedback;
        `metrics["resumed_from"]` says from where. With max_staleness=0 the outcome is that of an unbroken run, bit for
        bit, unless islands or a reducer remembered something; otherwise its log explains it. Workers that are not there
        any more leave, new ones join.
      early_stopping: a `so.EarlyStopping`, which watches the evaluations and ends the run ("early").
      evaluate: `evaluate(params) -> metrics`; its results are `metrics["evaluations"]`, with the means over
        updates of what `history` has since the one before.
      evaluate_every: updates between evaluations; the workers go on meanwhile.
      progress: show a table of the workers on a terminal, or a line every ten seconds elsewhere, on standard error.

    Returns:
      An `AsyncResult`. Without workers the run ends ("exhausted").

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, a parameter of `async_sgd` is a random key, or the checkpoints are of a run
        with other settings.
      NonFiniteUpdateError: if an update is not finite, unless such are skipped; it names worker, step and leaves.
      ConnectionError: if no Ray answers at the address.
      WorkersLostError: on Ray, if all workers were killed and none is started again.
      ServerLostError: on Ray, if the server was killed and there is no checkpoint.
      Exception: what a worker raises ends the run, and reaches the caller with its traceback.
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
        checkpoints: Checkpoints | None = None,
        early_stopping: EarlyStopping | None = None,
        evaluate: EvaluateParams | None = None,
        evaluate_every: int = 100,
        progress: bool = False,
    ) -> AsyncResult:
        """Train."""
        spec, who = self.spec, self.spec.who
        spec.check_params(who, params)
        check_count(who, "num_updates", num_updates, least=0)
        periods = _periods(who, availability, spec.num_workers)
        callbacks = Callbacks(
            who,
            checkpoints=checkpoints,
            early_stopping=early_stopping,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            progress=progress,
        )
        job = Job(params, batches_of, key_data(who, rng), num_updates, periods, log_path)
        return (
            run_on_ray(spec, job, callbacks)
            if spec.backend == "ray"
            else run_on_threads(spec, self.server, job, callbacks)
        )


class ReplayFn(NamedTuple):
    """Do a run again, on one thread, bit for bit; see `parameter_server.replay`."""

    spec: RunSpec

    def __call__(self, log: Log, params: PyTree, batches_of: BatchesOf) -> PyTree:
        """Return the parameters that the run ended with."""
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
      max_staleness: the bound in clocks, None without.
      rule: the staleness rule, None for none.
      backend: what carries pulls and pushes.
    """

    run: RunFn
    replay: ReplayFn
    workers: tuple[Mesh, ...]
    wrapped: optax.GradientTransformation
    max_staleness: int | None
    rule: Rule | None
    backend: str


def make_run(spec: RunSpec) -> RunFn:
    """Return the `run` of an optimizer, whose programs stay compiled from call to call."""
    return RunFn(spec, spec.make_server(donate=True))


def _periods(who: str, availability: Availability | None, num_workers: int) -> Availability:
    """Return when each worker is there, in versions."""
    always = [(0, math.inf)]
    if availability is None:
        return dict.fromkeys(range(num_workers), always)
    if not isinstance(availability, Mapping):
        what = f"availability must be a dict {{worker: [(from, to), ...]}}, got {type(availability).__name__}."
        raise TypeError(format_error(who, what))
    if unknown := [worker for worker in availability if not is_integer(worker) or not 0 <= worker < num_workers]:
        raise ValueError(format_error(who, f"availability names workers that are not there: {unknown}."))
    for worker, periods in availability.items():
        check_availability(who, f"worker {worker}", periods)
    return {worker: availability.get(worker, always) for worker in range(num_workers)}


def check_backend(who: str, backend: str, address: str | None, max_restarts: int, hang_timeout: float | None) -> None:
    """Refuse an unknown backend, and options of Ray that are of the wrong kind, or without Ray."""
    if backend not in ("threads", "ray"):
        what = f"backend must be 'threads' or 'ray', got {backend!r}."
        raise ValueError(format_error(who, what, fix='use backend="threads" for workers in this process.'))
    if address is not None and not isinstance(address, str):
        raise TypeError(f"{who}: address must be a string or None, got {type(address).__name__}.")
    check_count(who, "max_restarts", max_restarts, least=0)
    if hang_timeout is not None:
        check_number(who, "hang_timeout", hang_timeout, positive=True)
    if backend != "ray" and (address is not None or max_restarts or hang_timeout is not None):
        what = f"address, max_restarts and hang_timeout are for backend='ray', got backend={backend!r}."
        raise ValueError(format_error(who, what, fix='use backend="ray", or leave them out.'))
