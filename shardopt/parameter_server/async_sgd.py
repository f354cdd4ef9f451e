"""Asynchronous SGD: workers push gradients, the server applies the optimizer."""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from shardopt.core.errors import complaint
from shardopt.core.types import LossFn, PyTree
from shardopt.parameter_server.arguments import check_count, check_max_staleness, is_integer
from shardopt.parameter_server.compute import make_compute
from shardopt.parameter_server.gradients import make_gradients
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.run import AsyncResult, Run
from shardopt.parameter_server.server import make_server
from shardopt.parameter_server.simulated_worker import check_presence
from shardopt.parameter_server.trainable import check_params
from shardopt.parameter_server.transports.threads import run_threads
from shardopt.parameter_server.workers import Workers, worker_meshes

WHO = "async_sgd"


class AsyncOptimizer(NamedTuple):
    """An optax optimizer that trains without barriers.

    Attributes:
      run: `run(params, batches_of, *, num_updates, rng=None, presence=None, log_path=None) -> AsyncResult`; see
        `async_sgd`.
      workers: the mesh of each worker.
      wrapped: the optax transformation.
      max_staleness: the bound in clocks, None without.
      rule: the staleness rule, None for none.
      backend: what carries pulls and pushes.
    """

    run: Callable[..., AsyncResult]
    workers: tuple[Mesh, ...]
    wrapped: optax.GradientTransformation
    max_staleness: int | None
    rule: Rule | None
    backend: str


def async_sgd(
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    workers: Workers,
    max_staleness: int | None = 0,
    rule: Rule | None = None,
    reducer: Any = None,
    backend: str = "threads",
    nonfinite: str = "raise",
) -> AsyncOptimizer:
    """Train with workers that wait for one another only as far as a bound says.

    Each worker pulls the parameters w, computes the gradient g of a batch of its own, and pushes it; the server does
    w <- w + tx.update(rule(g)) with each push as it comes. A worker may be at most `max_staleness` steps ahead of the
    slowest when it begins one; see `parameter_server.make_server` for the exact meaning.

    **Equivalence**: with max_staleness=0, where the pushes of a clock are averaged and applied once, equal to `ddp` on
    the union of the workers' batches, up to summation order. Otherwise equal to its own event log, replayed: bit for
    bit. Losses with `rng` draw what device w of `ddp` draws at step c, for worker w at its step c.

    **Placement**: the server keeps parameters and optimizer state, whole, on the first device of worker 0; each worker
    one copy of the parameters and a gradient, whole, on each of its devices. Rules that compensate for delay keep the
    parameters that each worker pulled.

    **Communication** for each push, between the worker's devices and the server's: the parameters one way, the
    gradients the other. A worker with several devices all-reduces its gradients among these.

    Args:
      tx: any optax transformation that asks for no more than gradient, parameters and the loss `value`.
      loss_fn: as for `ddp`: `loss_fn(params, batch)`, a mean over the rows it was given or `Weighted`, maybe with an
        aux dict, maybe with a keyword `rng`; or a `BlockModel`. Leaves that are not floating are not trained.
      workers: how many, sharing out this process's devices one each; or for each a device, a sequence of devices or a
        mesh, over which its batch is split.
      max_staleness: in steps; None for no bound.
      rule: what to do about late gradients, from `parameter_server.rules`.
      reducer: how gradients are encoded on their way; not available yet, must be None.
      backend: "threads", workers in this process.
      nonfinite: what to do about gradients that are not finite: "raise", which ends the run, or "skip" them, which the
        log and `metrics["refused"]` tell.

    Returns:
      An `AsyncOptimizer`. Its `run(params, batches_of, *, num_updates, ...) -> AsyncResult` trains until the server
      has made `num_updates` updates, with max_staleness=0 whole clocks. `batches_of(worker)` returns an iterable of
      the worker's batches, pytrees with leaves [rows, ...]; it is called in the worker's thread, anew each time that
      the worker joins. A worker without batches leaves; without workers the run ends ("exhausted"). `presence` says
      which workers are there only at times, `{worker: [(from, to), ...]}` in versions: at `to` it dies with the step
      that it is at. `rng` is a random key. `log_path` is a file that gets the log, also of a run that fails.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `max_staleness` is negative, there are no workers, or the backend, the policy or a reducer is not
        available.

    What a worker raises ends the run: it reaches the caller of `run` with its traceback, and all other threads have
    ended by then. `NonFiniteUpdateError` names worker, step and leaves.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> batch = {"x": np.ones((2, 4), np.float32), "y": np.ones(2, np.float32)}
      >>> opt = so.async_sgd(optax.sgd(0.02), loss_fn, workers=4, max_staleness=2)
      >>> result = opt.run({"w": jnp.zeros(4)}, lambda worker: iter([batch] * 50), num_updates=100)
      >>> result.metrics["stopped"], max(result.metrics["staleness"]) <= 2, round(float(result.params["w"].sum()), 3)
      ('completed', True, 1.0)

    References:
      Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013; Dean et al.,
      "Large Scale Distributed Deep Networks", 2012.
    """
    check_max_staleness(WHO, max_staleness)
    meshes = worker_meshes(WHO, workers)
    make_gradients(WHO, tx, loss_fn, meshes[0], None)  # checks the optimizer and the loss
    if reducer is not None:
        what = f"reducer is not available yet, got {type(reducer).__name__}."
        raise ValueError(complaint(WHO, what, fix="leave reducer=None: gradients travel as they are."))
    if backend != "threads":
        raise ValueError(complaint(WHO, f"backend must be 'threads', got {backend!r}.", fix='use backend="threads".'))
    server = make_server(tx, max_staleness=max_staleness, rule=rule, nonfinite=nonfinite, donate=True)

    def run(
        params: PyTree,
        batches_of: Callable[[int], Iterable[Any]],
        *,
        num_updates: int,
        rng: jax.Array | None = None,
        presence: Mapping[int, Sequence[tuple[int, float]]] | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> AsyncResult:
        """Train until the server has made `num_updates` updates; see `async_sgd`."""
        check_params(WHO, params)
        check_count(WHO, "num_updates", num_updates, least=0)
        periods = _presence(presence, len(meshes))
        compute = make_compute(WHO, tx, loss_fn, meshes, batches_of, rng)
        began = time.perf_counter()
        running = Run(server, compute.on_server(params), compute.header, lambda: time.perf_counter() - began)
        if log_path is not None:
            running.log.save(log_path)  # or a path that cannot be written would be noticed when all is done
        try:
            stopped = run_threads(running, compute, num_workers=len(meshes), num_updates=num_updates, presence=periods)
            return running.finish(stopped)
        finally:
            if log_path is not None:
                running.log.save(log_path)

    return AsyncOptimizer(run, tuple(meshes), tx, max_staleness, rule, backend)


def _presence(presence: Any, num_workers: int) -> dict[int, Sequence[tuple[int, float]]]:
    always = [(0, math.inf)]
    if presence is None:
        return dict.fromkeys(range(num_workers), always)
    if not isinstance(presence, Mapping):
        what = f"presence must be a dict {{worker: [(from, to), ...]}}, got {type(presence).__name__}."
        raise TypeError(complaint(WHO, what))
    if unknown := [worker for worker in presence if not is_integer(worker) or not 0 <= worker < num_workers]:
        raise ValueError(complaint(WHO, f"presence names workers that are not there: {unknown}."))
    for worker, periods in presence.items():
        check_presence(WHO, f"worker {worker}", periods)
    return {worker: presence.get(worker, always) for worker in range(num_workers)}
