"""From a server and its workers to `AsyncOptimizer`: what `async_sgd` and `async_local_sgd` have in common."""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from shardopt.core.arguments import check_count, is_integer
from shardopt.core.early_stopping import EarlyStopping
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.parameter_server.callbacks import Callbacks
from shardopt.parameter_server.coordinator import Coordinator
from shardopt.parameter_server.log import Log
from shardopt.parameter_server.replay import replay_events
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.run import AsyncResult, Run, snapshot
from shardopt.parameter_server.server import Server
from shardopt.parameter_server.simulation import check_availability
from shardopt.parameter_server.threads import run_threads
from shardopt.parameter_server.updates import check_params
from shardopt.parameter_server.views import show_workers
from shardopt.parameter_server.worker import Compute, Streams, key_data


class AsyncOptimizer(NamedTuple):
    """An optax optimizer that trains without barriers.

    Attributes:
      run: `run(params, batches_of, *, num_updates, rng=None, availability=None, log_path=None, checkpoints=None,
        early_stopping=None, evaluate=None, evaluate_every=100, progress=False) -> AsyncResult`; see `async_sgd`.
      replay: `replay(log, params, batches_of) -> params`: does a run of this optimizer again from its log, on one
        thread, bit for bit; see `parameter_server.replay`.
      workers: the mesh of each worker.
      wrapped: the optax transformation that the server applies.
      max_staleness: the bound in clocks, None without.
      rule: the staleness rule, None for none.
      backend: what carries pulls and pushes.
    """

    run: Callable[..., AsyncResult]
    replay: Callable[..., PyTree]
    workers: tuple[Any, ...]
    wrapped: optax.GradientTransformation
    max_staleness: int | None
    rule: Rule | None
    backend: str


class RunSpec(NamedTuple):
    """What a run is made of, apart from its data.

    Attributes:
      who: the function that the user called, for messages.
      num_workers: how many.
      make_server: `make_server(donate) -> Server`.
      make_compute: `make_compute(batches_of, key) -> Compute` of all workers.
      ray: where to run on Ray; None for threads.
    """

    who: str
    num_workers: int
    make_server: Callable[[bool], Server]
    make_compute: Callable[[Callable[[int], Iterable[Any]], Any], Compute]
    ray: "OnRay | None" = None


class OnRay(NamedTuple):
    """How a run is spread over processes.

    Attributes:
      address: of the cluster; None for a local one.
      devices: how many each worker's process has.
      make_compute: `make_compute(batches_of, key, worker) -> Compute` of one worker, in its process.
      header: `header(key)`, what the log keeps of the workers.
      max_restarts: how often each worker that was killed is started again.
    """

    address: str | None
    devices: Sequence[int]
    make_compute: Callable[..., Compute]
    header: Callable[[Any], dict[str, Any]]
    max_restarts: int


def make_run(job: RunSpec) -> Callable[..., AsyncResult]:
    """Return the `run` of an optimizer."""
    who, server = job.who, job.make_server(True)

    def run(
        params: PyTree,
        batches_of: Callable[[int], Iterable[Any]],
        *,
        num_updates: int,
        rng: jax.Array | None = None,
        availability: Mapping[int, Sequence[tuple[int, float]]] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        checkpoints: Any = None,
        early_stopping: EarlyStopping | None = None,
        evaluate: Callable[[PyTree], Mapping[str, Any]] | None = None,
        evaluate_every: int = 100,
        progress: bool = False,
    ) -> AsyncResult:
        """Train until the server has made `num_updates` updates; see `async_sgd`."""
        check_params(who, params)
        check_count(who, "num_updates", num_updates, least=0)
        periods = check_periods(who, availability, job.num_workers)
        callbacks = Callbacks(
            who,
            checkpoints=checkpoints,
            early_stopping=early_stopping,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            progress=progress,
        )
        key = key_data(who, rng)
        if job.ray is not None:
            return run_on_ray(job, params, batches_of, key, num_updates, periods, callbacks, log_path)
        compute = job.make_compute(batches_of, key)
        began = time.perf_counter()
        params = compute.on_server(params)
        running = Run(server, params, compute.header, lambda: time.perf_counter() - began)
        callbacks.begin(running, params)
        if log_path is not None:
            running.log.save(log_path)  # or a path that cannot be written would be noticed when all is done
        try:
            coordinator = Coordinator(running, num_updates, periods, callbacks.policy.wanted, callbacks.policy.keep)
            with show_workers(who, shown=callbacks.progress) as callbacks.show:
                run_threads(who, coordinator, compute, callbacks)
            result = running.finish(coordinator.why(), **callbacks.metrics())
            callbacks.finish(None if checkpoints is None else snapshot(running))
            return result
        finally:
            if log_path is not None:
                running.log.save(log_path)

    return run


def run_on_ray(
    job: RunSpec,
    params: PyTree,
    batches_of: Any,
    key: Any,
    num_updates: int,
    periods: Any,
    callbacks: Callbacks,
    log_path: Any,
) -> AsyncResult:
    """Run on Ray, and leave nothing running."""
    from shardopt.parameter_server.ray import RayDriver, Spec, cluster

    on = job.ray
    assert on is not None
    Streams(job.who, batches_of)  # checks it
    spec = Spec(job.who, on.devices, job.make_server, on.make_compute, on.header(key), periods, on.max_restarts)
    with cluster(job.who, on.address, job.num_workers) as ray:
        params = jax.device_put(params)
        found = callbacks.latest(job.make_server(False), params)
        callbacks.resumed_from = callbacks.saved = None if found is None else int(found.state.step)
        driver = RayDriver(ray, spec, params, batches_of, key, num_updates, callbacks)
        log = None
        try:
            with show_workers(job.who, shown=callbacks.progress) as callbacks.show:
                result = driver.run(found)
            log = result.log
            return result
        finally:
            log = driver.log() if log is None else log
            driver.close()
            if log_path is not None and log is not None:
                log.save(log_path)


def make_replay(job: RunSpec) -> Callable[..., PyTree]:
    """Return the `replay` of an optimizer."""

    def replay(log: Log, params: PyTree, batches_of: Callable[[int], Iterable[Any]]) -> PyTree:
        """Do a run of this optimizer again, bit for bit; see `parameter_server.replay`."""
        if not isinstance(log, Log):
            what = f"log must be a parameter_server.Log, got {type(log).__name__}."
            raise TypeError(format_error("replay", what, fix="pass result.log, or parameter_server.Log.load(path)."))
        if log.header.get("initial") is None:
            raise ValueError(format_error("replay", "this is the log of a simulation of time only."))
        key = np.asarray(log.header["rng"], np.uint32)
        return replay_events(log, job.make_server(False), job.make_compute(batches_of, key), params)

    return replay


def check_periods(who: str, availability: Any, num_workers: int) -> dict[int, Sequence[tuple[int, float]]]:
    """Return when each worker is there, in versions.

    Raises:
      TypeError: if `availability` is neither None nor a dict of periods.
      ValueError: if it names unknown workers, or times do not rise.
    """
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


def check_backend(who: str, backend: Any, address: Any, max_restarts: Any) -> None:
    """Refuse an unknown backend, and options of Ray that are of the wrong kind, or without Ray.

    Raises:
      TypeError: if one is of the wrong kind.
      ValueError: if the backend is unknown, `max_restarts` is negative, or one is given for another backend.
    """
    if backend not in ("threads", "ray"):
        what = f"backend must be 'threads' or 'ray', got {backend!r}."
        raise ValueError(format_error(who, what, fix='use backend="threads" for workers in this process.'))
    if address is not None and not isinstance(address, str):
        raise TypeError(f"{who}: address must be a string or None, got {type(address).__name__}.")
    check_count(who, "max_restarts", max_restarts, least=0)
    if backend != "ray" and (address is not None or max_restarts):
        what = f"address and max_restarts are for backend='ray', got backend={backend!r}."
        raise ValueError(format_error(who, what, fix='use backend="ray", or leave them out.'))
