"""`AsyncOptimizer`, the result of `async_sgd` and `async_local_sgd`, made from the description of
its runs.
"""

import os
from collections import Counter
from dataclasses import dataclass

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.core import (
    PyTree,
    calling,
    check_count,
    check_number,
    format_error,
    type_error,
    value_error,
)
from shardopt.core._early_stopping import EarlyStopping
from shardopt.core._extras import is_installed
from shardopt.parameter_server._callbacks import Callbacks, EvaluateParams
from shardopt.parameter_server._log import Log
from shardopt.parameter_server._run import (
    AsyncJob,
    AsyncResult,
    BatchesOf,
    RunSpec,
    WorkerCompute,
    check_settings,
)
from shardopt.parameter_server._server import ParameterServer
from shardopt.parameter_server._threads import run_on_threads
from shardopt.parameter_server._updates import digest
from shardopt.parameter_server._worker import key_data
from shardopt.parameter_server.rules import StalenessRule


@dataclass(frozen=True)
class AsyncOptimizer:
    """An optax optimizer that trains without barriers.

    Attributes:
      spec: the description of its runs.
      server: the server of runs on threads, whose programs stay compiled from run to run.
      workers: the mesh of each worker.
      wrapped: the optax transformation that the server applies.
      max_staleness: the bound in clocks; None for no bound.
      rule: the staleness rule; None for none.
    """

    spec: RunSpec
    server: ParameterServer
    workers: tuple[Mesh, ...]
    wrapped: optax.GradientTransformation
    max_staleness: int | None
    rule: StalenessRule | None

    @property
    def backend(self) -> str:
        """The backend, "threads" or "ray"."""
        return self.spec.backend

    def run(
        self,
        params: PyTree,
        batches_of: BatchesOf,
        *,
        num_updates: int,
        rng: jax.Array | None = None,
        log_path: str | os.PathLike[str] | None = None,
        checkpoints: Checkpoints | None = None,
        early_stopping: EarlyStopping | None = None,
        evaluate: EvaluateParams | None = None,
        evaluate_every: int = 100,
        progress: bool = False,
    ) -> AsyncResult:
        """Train until the server has made `num_updates` updates.

        Args:
          params: the initial parameters. Leaves that are not floating are not trained.
          batches_of: `batches_of(worker)` returns an iterable of the worker's batches, pytrees with
            leaves [rows, ...]. It is called in the worker's thread, at each join. Batches that the
            worker has already pushed are drawn and skipped, so each batch is used once, however
            often the worker dies. A worker without batches leaves.
          num_updates: the number of versions of the parameters; with max_staleness=0 the number of
            clocks.
          rng: a random key, for losses that take one.
          log_path: a file for the log, which is also written if the run fails.
          checkpoints: a `so.Checkpoints`, which saves the server (parameters, optimizer, clocks,
            log) every so many updates and at the end. If its folder has checkpoints, the run
            continues from the newest; see below.
          early_stopping: a `so.training.EarlyStopping`, which watches the evaluations and ends the
            run ("early").
          evaluate: `evaluate(params) -> metrics`. Its results are in `metrics["evaluations"]`,
            together with the means of `history` over the updates since the previous evaluation.
          evaluate_every: updates between evaluations; the workers continue during an evaluation.
          progress: print a line about the workers every ten seconds, on standard error.

        Returns:
          An `AsyncResult`. When no worker is left the run ends ("exhausted").

        Raises:
          TypeError: if an argument is of the wrong kind.
          ValueError: if a number is out of range, a parameter of `async_sgd` is a random key, or
            the checkpoints are of a run with other settings.
          NonFiniteUpdateError: if an update is not finite and `nonfinite` is "raise"; it names
            worker, step and leaves.
          ConnectionError: if no Ray answers at the address.
          WorkersLostError: on Ray, if all workers were killed and none is restarted.
          ServerLostError: on Ray, if the server was killed and there is no checkpoint.
          Exception: any error of a worker ends the run, and is raised with its traceback.

        **Checkpoints**: a run that continues from a checkpoint restores the clock of each worker
        and its position in its batches. Steps that were in flight are repeated. Islands begin with
        a fresh state, and reducers with empty error feedback. Workers that are not part of the new
        run leave, and new workers join. `metrics["resumed_from"]` is the version of the checkpoint.
        With max_staleness=0 the result equals an uninterrupted run bit for bit, unless islands or
        error feedback had a state. Otherwise the result equals a replay of its log.

        **Ray**: the run survives killed processes.

        - A killed worker is removed from the clock; a push arrives completely or not at all.
          `metrics["killed"]` names the killed workers. `metrics["hung"]` names the workers among
          them that the run itself killed, after `hang_timeout` seconds without progress.
        - A killed server restarts from the newest of `checkpoints`, and the workers continue with
          it. `metrics["lost_updates"]` is the number of lost updates that this process or a worker
          had heard of; each worker may have had one more on its way. So it is with a server whose
          host is cut off.

        Loss, data and optimizer are pickled: a function that is defined in a module must be
        importable on the workers.
        """
        spec = self.spec
        with calling(spec.caller):
            spec.check_params(params)
            check_count("num_updates", num_updates, minimum=0)
            callbacks = Callbacks(
                spec.caller,
                checkpoints=checkpoints,
                early_stopping=early_stopping,
                evaluate=evaluate,
                evaluate_every=evaluate_every,
                progress=progress,
            )
            workers = range(spec.num_workers)
            job = AsyncJob(params, batches_of, key_data(rng), num_updates, workers, log_path)
        if spec.backend == "threads":
            return run_on_threads(spec, self.server, job, callbacks)
        if not is_installed("ray"):
            problem = "backend 'ray' needs Ray, which is not installed."
            fix = "pip install 'shardopt[ray]', or use backend=\"threads\"."
            raise ImportError(format_error(spec.caller, problem, fix=fix))
        from shardopt.parameter_server._ray import run_on_ray

        return run_on_ray(spec, job, callbacks)

    @calling("replay")
    def replay(self, log: Log, params: PyTree, batches_of: BatchesOf) -> PyTree:
        """Return the final parameters of a run, by repeating the events of its log in order.

        Each pull takes a batch, each push computes its gradient from the parameters of its pull,
        and each event goes to the same pure server. The replay checks that the server makes the
        same events as the log, and that the checksums of the parameters before and after the run
        are the same.

        Args:
          log: the log of a run of this optimizer, or `Log.load(path)`. Or of `simulate` with
            workers of one device.
          params: the initial parameters of the run.
          batches_of: the data of the run: `batches_of(worker)` returns the same batches again; it
            is called at each join.

        Returns:
          The parameters.

        Raises:
          TypeError: if `log` is not a `Log`.
          ValueError: if the run had other settings, other parameters or more workers, or the
            batches end too soon. If an event of the server differs from the log, or the result from
            the result of the run.

        **Equivalence**: bit for bit, if the loss is deterministic and the devices are of the same
        kind as in the run.
        """
        check_log(log, self.spec.num_workers)
        key = np.asarray(log.header["rng"], np.uint32)
        server = self.spec.make_server(donate=False)
        check_settings("replay", "log", log.header, {**server.settings, **self.spec.settings(key)})
        return replay_events(log, server, self.spec.make_compute(batches_of, key), params)


def check_backend(
    backend: str, address: str | None, max_restarts: int, hang_timeout: float | None
) -> None:
    """Refuse an unknown backend, options of Ray of the wrong kind, and options of Ray with another
    backend.
    """
    if backend not in ("threads", "ray"):
        problem = f"backend must be 'threads' or 'ray', got {backend!r}."
        raise value_error(problem, fix='use backend="threads" for workers in this process.')
    if address is not None and not isinstance(address, str):
        raise type_error(f"address must be a string or None, got {type(address).__name__}.")
    check_count("max_restarts", max_restarts, minimum=0)
    if hang_timeout is not None:
        check_number("hang_timeout", hang_timeout, positive=True)
    if backend != "ray" and (address is not None or max_restarts or hang_timeout is not None):
        problem = (
            "address, max_restarts and hang_timeout are for backend='ray', got"
            f" backend={backend!r}."
        )
        raise value_error(problem, fix='use backend="ray", or leave them out.')


def check_log(log: Log, num_workers: int) -> None:
    """Refuse an argument that is not a `Log`, the log of a simulation without parameters, and the log
    of more workers than there are.
    """
    if not isinstance(log, Log):
        problem = f"log must be a parameter_server.Log, got {type(log).__name__}."
        raise type_error(problem, fix="pass result.log, or parameter_server.Log.load(path).")
    if log.header.get("initial") is None:
        fix = "give simulate an optimizer, a loss, parameters and data."
        raise value_error("this is the log of a simulation of time only.", fix=fix)
    needed = 1 + max((event.worker for event in log), default=0)
    if needed > num_workers:
        problem = f"the run had {needed} workers, and this optimizer has {num_workers}."
        raise value_error(problem, fix="make it for the workers of the run.")


def replay_events(
    log: Log, server: ParameterServer, compute: WorkerCompute, params: PyTree
) -> PyTree:
    """Return the parameters after the events of a log, computed on one thread.

    For the checks see `AsyncOptimizer.replay`.
    """
    header = log.header
    state = server.init(jax.device_put(params, compute.device))
    if digest(state.params) != header["initial"]:
        fix = "pass the same values in the same dtypes, or make them the same way."
        raise value_error("the parameters are not those that the run began with.", fix=fix)

    positions: Counter[int] = Counter()
    steps: dict[int, tuple[PyTree, PyTree]] = {}
    for number, recorded in enumerate(log):
        worker = recorded.worker
        positions[worker] += recorded.ends_round
        if recorded.kind in ("join", "resume"):
            compute.begin(worker, positions[worker])
            steps.pop(worker, None)
            state, event = (server.join if recorded.kind == "join" else server.resume)(
                state, worker
            )
        elif recorded.kind == "pull":
            steps[worker] = (state.params, _next(compute, worker, recorded.clock))
            state, event = server.pull(state, worker)
        elif recorded.kind == "leave":
            state, event = server.leave(state, worker)
        else:
            update = compute.update(worker, *steps.pop(worker), recorded.clock)
            state, event = server.push(state, worker, update, recorded.pulled)
        if event != recorded.without_times():
            problem = (
                f"event {number} of the log is {recorded.without_times()}, and the server comes to"
                f" {event}."
            )
            fix = "the log is damaged, or its data or loss is not that of the run."
            raise value_error(problem, fix=fix)
    if header["final"] is not None and digest(state.params) != header["final"]:
        problem = (
            "the parameters at the end are not those of the run, although they were the same at the"
            " start."
        )
        fix = (
            "pass the data, loss and optimizer of the run; devices of another kind round"
            " differently."
        )
        raise value_error(problem, fix=fix)
    return state.params


def _next(compute: WorkerCompute, worker: int, clock: int) -> PyTree:
    batch = compute.next_batch(worker)
    if batch is None:
        problem = f"batches_of({worker}) ended before step {clock} of worker {worker}."
        raise value_error(problem, fix="pass the data of the run.")
    return batch
