"""Asynchronous SGD: workers push gradients, the server applies the optimizer."""

from collections import defaultdict
from collections.abc import Sequence

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shardopt.core import calling, check_count, is_integer, type_error, value_error
from shardopt.core._block_model import LossFn
from shardopt.mesh import data_axes, make_mesh
from shardopt.parameter_server._clock import check_max_staleness
from shardopt.parameter_server._optimizer import AsyncOptimizer, check_backend
from shardopt.parameter_server._server import ServerSettings
from shardopt.parameter_server._worker import local_meshes, sgd_spec
from shardopt.parameter_server.rules import StalenessRule
from shardopt.reducers import Reducer

CALLER = "async_sgd"

Workers = int | Sequence[int | jax.Device | Sequence[jax.Device] | Mesh]
"""The number of workers, or for each worker a device, a sequence of devices or a mesh; on Ray its
number of devices.
"""


@calling(CALLER)
def async_sgd(
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    workers: Workers,
    max_staleness: int | None = 0,
    rule: StalenessRule | None = None,
    reducer: Reducer | None = None,
    backend: str = "threads",
    nonfinite: str = "raise",
    address: str | None = None,
    max_restarts: int = 0,
    hang_timeout: float | None = None,
) -> AsyncOptimizer:
    """Train with workers that wait for each other only as much as a staleness bound requires.

    Each worker pulls the parameters w, computes the gradient g of its own batch, and pushes g. The
    server does w <- w + tx.update(rule(g)) with each push when it arrives. A worker may begin a
    step only if it is at most `max_staleness` steps ahead of the slowest; see
    `parameter_server.make_server` for the exact meaning.

    Args:
      tx: any optax transformation that needs no more than gradient, parameters and the loss
        `value`.
      loss_fn: as for `ddp`. Leaves that are not floating are not trained.
      workers: the number of workers, which share this process's devices in turn. Or for each worker
        a device, a sequence of devices or a mesh, over which its batch is split. On Ray the number
        of workers, or for each worker its number of devices (GPUs if the cluster has any).
      max_staleness: the bound in steps; None for no bound.
      rule: the treatment of late gradients, from `parameter_server.rules`.
      reducer: the encoding of gradients on their way to the server; see `so.reducers.compressor`.
        Each worker has its own `error_feedback`, which is lost when the worker leaves, is killed or
        is resumed: see `metrics["lost_memory"]`.
      backend: "threads"; or "ray", with server and workers as processes; see
        `parameter_server.AsyncOptimizer`.
      nonfinite: the treatment of gradients that are not finite: "raise", which ends the run, or
        "skip".
      address: the address of the Ray cluster, such as "10.0.0.1:6379"; by default a local Ray
        starts, and ends with the run.
      max_restarts: on Ray, how often each killed worker is restarted; it joins at the clock of the
        slowest.
      hang_timeout: on Ray, a worker without progress for so many seconds is named in the log,
        killed and restarted. Choose it longer than a step. It is ten times as long for the first
        step, which compiles. None for never.

    Returns:
      An `AsyncOptimizer`; its `run(params, batches_of, *, num_updates, ...)` trains.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, there are no workers, the backend or `nonfinite` is
        unknown, or one sender cannot encode the reducer.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> batch = {"x": np.ones((2, 4), np.float32), "y": np.ones(2, np.float32)}
      >>> opt = so.async_sgd(optax.sgd(0.02), loss_fn, workers=4, max_staleness=2)
      >>> result = opt.run({"w": jnp.zeros(4)}, lambda worker: iter([batch] * 50), num_updates=100)
      >>> result.metrics["stopped"], max(result.metrics["staleness"]) <= 2, round(float(result.params["w"].sum()), 3)
      ('completed', True, 1.0)

    **Equivalence**: with max_staleness=0 the pushes of a clock are averaged and applied once. The
    result is equal to `ddp` on the union of the workers' batches, up to summation order. The loss
    must then be proved a (weighted) mean over rows, as for `ddp`; other losses are refused, because
    a worker does not see the rows of other workers. With a larger bound the loss is the loss of
    each worker's own batch, over all devices of the worker. Such a run is equal to the replay of
    its event log, bit for bit. With `rng`, worker w draws at its step c the same numbers as device
    w of `ddp` at step c.

    **Placement**: the server keeps parameters and optimizer state, replicated, on the first device
    of worker 0 (on Ray in host memory). Each worker has parameters and gradient, replicated, on
    each of its devices. Rules that correct for delay keep the parameters that each worker has
    pulled.

    **Communication** for each push: the parameters to the worker, and the gradients to the server.
    A worker with several devices all-reduces its gradients over its devices.

    References:
      Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
      2013; Dean et al., "Large Scale Distributed Deep Networks", 2012.
    """
    check_max_staleness(max_staleness)
    check_backend(backend, address, max_restarts, hang_timeout)
    on_ray = backend == "ray"
    worker_devices = process_sizes(workers) if on_ray else worker_meshes(workers)
    meshes = tuple(local_meshes(worker_devices))
    settings = ServerSettings(max_staleness, rule, nonfinite, reducer)
    spec = sgd_spec(CALLER, tx, loss_fn, worker_devices, settings)
    ray_options = {
        "address": address,
        "max_restarts": int(max_restarts),
        "hang_timeout": hang_timeout,
    }
    spec = spec._replace(backend=backend, devices=worker_devices if on_ray else (), **ray_options)
    return AsyncOptimizer(spec, spec.make_server(donate=True), meshes, tx, max_staleness, rule)


def worker_meshes(workers: Workers) -> list[Mesh]:
    """Return the mesh of each worker.

    If `workers` is a number, they get the devices of this process in turn.
    """
    if is_integer(workers):
        check_count("workers", workers, minimum=1)
        devices = jax.local_devices()
        return [make_mesh(data=1, devices=[devices[i % len(devices)]]) for i in range(workers)]
    fix = "pass how many, or for each worker a device, a list of devices or a mesh."
    if isinstance(workers, str | bytes | Mesh) or not isinstance(workers, Sequence | np.ndarray):
        problem = f"workers must be an integer or a sequence, got {type(workers).__name__}."
        raise type_error(problem, fix=fix)
    if not len(workers):
        raise value_error("workers must be at least 1, got none.", fix=fix)
    meshes = [_mesh(number, worker, fix) for number, worker in enumerate(workers)]
    check_not_shared(meshes)
    return meshes


def _mesh(number: int, worker: object, fix: str) -> Mesh:
    if not isinstance(worker, Mesh):
        devices = list(worker) if isinstance(worker, Sequence | np.ndarray) else [worker]
        if not devices or not all(isinstance(device, jax.Device) for device in devices):
            problem = (
                f"worker {number} must be a device, a sequence of devices or a mesh, got"
                f" {worker!r}."
            )
            raise type_error(problem, fix=fix)
        return make_mesh(data=len(devices), devices=devices)
    sizes = worker.shape.items()
    unused = [
        f"{axis} (size {size})"
        for axis, size in sizes
        if size > 1 and axis not in data_axes(worker)
    ]
    if unused:
        problem = (
            f"the mesh of worker {number} has axes that nothing is split over: {', '.join(unused)}."
        )
        fix = "an async_sgd worker splits its batch: use so.make_mesh(data=...)."
        raise value_error(problem, fix=fix)
    return worker


def check_not_shared(meshes: Sequence[Mesh], noun: str = "worker") -> None:
    """Refuse shared devices: of two programs with collectives, each can wait for a device that the
    other one has.
    """
    owners = defaultdict(list)
    for number, mesh in enumerate(meshes):
        for device in mesh.devices.flat:
            owners[device].append(number)
    shared = [
        f"{device.platform}:{device.id}: {noun}s {', '.join(map(str, numbers))}"
        for device, numbers in owners.items()
        if len(numbers) > 1 and any(meshes[number].size > 1 for number in numbers)
    ]
    if shared:
        problem = (
            f"{'an' if noun[0] in 'aeiou' else 'a'} {noun} with several devices must have them for"
            " itself."
        )
        raise value_error(problem, shared, f"give each its own, or one device to several {noun}s.")


def process_sizes(workers: Workers) -> list[int]:
    """Return the number of devices of each worker's process."""
    if is_integer(workers):
        check_count("workers", workers, minimum=1)
        return [1] * int(workers)
    if (
        isinstance(workers, str | bytes)
        or not isinstance(workers, Sequence)
        or not all(map(is_integer, workers))
    ):
        problem = (
            f"on Ray workers must be an integer or for each its number of devices, got {workers!r}."
        )
        raise type_error(problem, fix="pass workers=4, or workers=[2, 2] for two devices each.")
    if not workers:
        raise value_error("workers must be at least 1, got none.", fix="pass workers=4.")
    sizes = [int(size) for size in workers if is_integer(size)]
    for number, size in enumerate(sizes):
        check_count(f"workers[{number}]", size, minimum=1)
    return sizes
