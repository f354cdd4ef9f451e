"""Where each worker computes: a mesh a worker, of one device or several."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shardopt.core.arguments import check_count, is_integer
from shardopt.core.errors import format_error
from shardopt.core.types import LossFn
from shardopt.mesh import data_axes, make_mesh
from shardopt.parameter_server.arguments import check_max_staleness
from shardopt.parameter_server.optimizer import AsyncOptimizer, OnRay, RunSpec, check_backend, make_replay, make_run
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.server import make_server
from shardopt.parameter_server.sparse import check_sparse
from shardopt.parameter_server.worker import Compute, check_codec, make_compressor, make_compute, make_gradients
from shardopt.reducers import Compressor, Reducer

Workers = int | Sequence[Any]
"""How many, or for each a device, a sequence of devices or a mesh."""


def worker_meshes(who: str, workers: Any) -> list[Mesh]:
    """Return a mesh a worker. A number of workers share out the devices of this process, one each, round robin.

    Raises:
      TypeError: if `workers` is neither a number nor a sequence of devices, sequences of devices and meshes.
      ValueError: if there are none, a mesh splits something else than the batch, or workers with several devices
        share one.
    """
    if is_integer(workers):
        check_count(who, "workers", workers, least=1)
        devices = jax.local_devices()
        return [make_mesh(data=1, devices=[devices[i % len(devices)]]) for i in range(workers)]
    fix = "pass how many, or for each worker a device, a list of devices or a mesh."
    if isinstance(workers, str | bytes | Mesh) or not isinstance(workers, Sequence | np.ndarray):
        what = f"workers must be an integer or a sequence, got {type(workers).__name__}."
        raise TypeError(format_error(who, what, fix=fix))
    if not len(workers):
        raise ValueError(format_error(who, "workers must be at least 1, got none.", fix=fix))
    meshes = [_mesh(who, number, worker, fix) for number, worker in enumerate(workers)]
    check_shared(who, meshes)
    return meshes


def check_shared(who: str, meshes: Sequence[Mesh], noun: str = "worker") -> None:
    """Refuse shared devices: two programs with collectives can each wait for a device that the other has.

    Raises:
      ValueError: if a worker with several devices shares one.
    """
    owners: dict[Any, list[int]] = {}
    for number, mesh in enumerate(meshes):
        for device in mesh.devices.flat:
            owners.setdefault(device, []).append(number)
    shared = [
        f"{device.platform}:{device.id}: {noun}s {', '.join(map(str, numbers))}"
        for device, numbers in owners.items()
        if len(numbers) > 1 and any(meshes[number].size > 1 for number in numbers)
    ]
    if shared:
        what = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun} with several devices must have them for itself."
        raise ValueError(format_error(who, what, shared, f"give each its own, or one device to several {noun}s."))


def _mesh(who: str, number: int, worker: Any, fix: str) -> Mesh:
    if isinstance(worker, jax.Device):
        return make_mesh(data=1, devices=[worker])
    if not isinstance(worker, Mesh):
        devices = list(worker) if isinstance(worker, Sequence | np.ndarray) else [worker]
        if not devices or not all(isinstance(device, jax.Device) for device in devices):
            what = f"worker {number} must be a device, a sequence of devices or a mesh, got {worker!r}."
            raise TypeError(format_error(who, what, fix=fix))
        return make_mesh(data=len(devices), devices=devices)
    idle = [
        f"{axis} (size {size})" for axis, size in worker.shape.items() if size > 1 and axis not in data_axes(worker)
    ]
    if idle:
        what = f"the mesh of worker {number} has axes that nothing is split over: {', '.join(idle)}."
        raise ValueError(
            format_error(who, what, fix="an async_sgd worker splits its batch: use so.make_mesh(data=...).")
        )
    return worker


def process_meshes(who: str, workers: Any) -> tuple[list[int], list[Mesh]]:
    """Return the devices of each worker in a process of its own, and meshes like theirs in this process, for replays.

    Raises:
      TypeError: if `workers` is neither a number nor a sequence of numbers.
      ValueError: if there are none, or a number is below 1.
    """
    sizes = [1] * workers if is_integer(workers) and workers > 0 else workers
    if is_integer(sizes):
        check_count(who, "workers", workers, least=1)
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence) or not all(is_integer(one) for one in sizes):
        what = f"on Ray workers must be an integer or for each its number of devices, got {workers!r}."
        raise TypeError(format_error(who, what, fix="pass workers=4, or workers=[2, 2] for two devices each."))
    if not sizes:
        raise ValueError(format_error(who, "workers must be at least 1, got none.", fix="pass workers=4."))
    for number, size in enumerate(sizes):
        check_count(who, f"workers[{number}]", size, least=1)
    devices = jax.local_devices()
    meshes = [make_mesh(data=min(size, len(devices)), devices=devices[:size]) for size in sizes]
    return [int(size) for size in sizes], meshes


# Asynchronous SGD: workers push gradients, the server applies the optimizer.


WHO = "async_sgd"


def async_sgd(
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    workers: Workers,
    max_staleness: int | None = 0,
    rule: Rule | None = None,
    reducer: Reducer | None = None,
    sparse: Sequence[str] = (),
    backend: str = "threads",
    nonfinite: str = "raise",
    address: str | None = None,
    max_restarts: int = 0,
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
      reducer: how gradients are encoded on their way, from `so.reducers`; see `so.reducers.compressor`. With
        `error_feedback` what a push does not say is kept by the worker and goes with its next ones. This memory is lost
        when the worker leaves or is killed, and when a run is resumed: `metrics["lost_memory"]` says how much it held.
        It counts in gradients that are not yet divided by the weight of their loss. Pulls are as they are.
      sparse: regexes of key paths of leaves [rows, ...] such as embedding tables: of their gradients only the rows that
        are not zero travel, and only these rows of parameter and optimizer state are updated; with max_staleness=0
        those that any worker touched. For SGD without momentum that is the same as dense, up to summation order. Other
        optimizers become lazy: in rows that no push touches, moments do not decay and weights are not decayed, while
        counts (bias correction, schedules) go on for all. State must have the shape of its parameter, and the rule
        none. Pulls are dense.
      backend: "threads", workers in this process; or "ray", the server and each worker a process of its own on Ray,
        each worker with a JAX runtime of its own. Then `workers` is how many, with one device each, or for each the
        number of its devices (GPUs where the cluster has any, else CPUs), over which its batch is split; the server
        keeps parameters and optimizer state in the memory of its host. Needs `pip install 'shardopt[ray]'`.
      address: of the Ray cluster to join, such as "10.0.0.1:6379"; by default a local Ray starts, and ends with the run.
      max_restarts: on Ray, how often each worker that was killed is started again, to join where the slowest is.
      nonfinite: what to do about gradients that are not finite: "raise", which ends the run, or "skip" them, which the
        log and `metrics["refused"]` tell.

    Returns:
      An `AsyncOptimizer`. Its `run(params, batches_of, *, num_updates, ...) -> AsyncResult` trains until the server
      has made `num_updates` updates, with max_staleness=0 whole clocks. `batches_of(worker)` returns an iterable of
      the worker's batches, pytrees with leaves [rows, ...]; it is called in the worker's thread, again each time that
      the worker joins. A worker without batches leaves; without workers the run ends ("exhausted"). `availability` says
      which workers are there only at times, `{worker: [(from, to), ...]}` in versions: at `to` it dies with the step
      that it is at. `rng` is a random key. `log_path` is a file that gets the log, also of a run that fails.

      `checkpoints`, a `so.Checkpoints`, gets the server (parameters, optimizer, clocks, log) every so many updates and
      at the end. A run that finds checkpoints there goes on from the newest: each worker at its clock and behind the
      batches of the steps that it had pushed, the steps under way done again; `metrics["resumed_from"]` says from
      where. With max_staleness=0 the outcome is that of an unbroken run, bit for bit, unless a reducer remembers what
      it did not send, which is lost; otherwise its log explains it.
      Workers that are not there any more leave, new ones join. `evaluate(params) -> metrics` is called every
      `evaluate_every` updates while the workers go on, its results are `metrics["evaluations"]` with the means of the
      training metrics since the one before. `early_stopping`, a `so.EarlyStopping`, watches these and ends the run
      ("early"). `progress=True` shows a live table of the workers on a terminal, who computes and who waits, and a line
      every ten seconds elsewhere, on standard error.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `max_staleness` is negative, there are no workers, the backend or the policy is unknown, or the
        reducer cannot be encoded by one sender or comes with `sparse`.
      ConnectionError: from `run`, if no Ray answers at `address`.

    On Ray, training goes on when a worker is killed: the clock forgets it, and a push arrives whole or not at all;
    `metrics["killed"]` names who was. When all are killed and none is started again the run raises `WorkersLostError`.
    When the server is killed it is started again from the newest of `checkpoints`, the workers go on there, and
    `metrics["lost_updates"]` says how many updates were lost; without checkpoints it raises `ServerLostError`. Loss,
    data and optimizer cross by pickling: what is defined in a module must be importable on the workers.

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
    check_backend(WHO, backend, address, max_restarts)
    if backend == "ray":
        sizes, meshes = process_meshes(WHO, workers)
    else:
        meshes = worker_meshes(WHO, workers)
        sizes = [mesh.size for mesh in meshes]
    make_gradients(WHO, tx, loss_fn, meshes[0], None)  # checks the optimizer and the loss
    sparse = check_sparse(WHO, sparse)
    code = check_codec(WHO, reducer, sparse)

    def server(donate: bool) -> Any:
        return make_server(
            tx, max_staleness=max_staleness, rule=rule, nonfinite=nonfinite, donate=donate, reducer=reducer
        )

    def compute(batches_of: Callable[[int], Iterable[Any]], key: Any) -> Compute:
        return make_compute(WHO, tx, loss_fn, meshes, batches_of, key, sparse, code)

    on_ray = None
    if backend == "ray":
        more = make_compressor(code).header | ({"sparse": list(sparse)} if sparse else {})
        header = lambda key: {"rng": key.tolist(), "devices": sizes, **more}  # noqa: E731
        on_ray = OnRay(address, sizes, partial(_in_process, tx, loss_fn, sparse, code), header, int(max_restarts))
    job = RunSpec(WHO, len(meshes), server, compute, on_ray)
    return AsyncOptimizer(make_run(job), make_replay(job), tuple(meshes), tx, max_staleness, rule, backend)


def _in_process(
    tx: Any, loss_fn: Any, sparse: Sequence[str], code: Compressor | None, batches_of: Any, key: Any, worker: int
) -> Compute:
    """Return the one worker of a process, on all its devices."""
    mesh = make_mesh(data=-1, devices=jax.local_devices())
    return make_compute(WHO, tx, loss_fn, {worker: mesh}, batches_of, key, sparse, code)
