"""Asynchronous SGD: workers push gradients, the server applies the optimizer."""

from collections import defaultdict
from collections.abc import Sequence

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shardopt.core.arguments import check_count, is_integer
from shardopt.core.block_model import LossFn
from shardopt.core.errors import format_error
from shardopt.mesh import data_axes, make_mesh
from shardopt.parameter_server.clock import check_max_staleness
from shardopt.parameter_server.optimizer import AsyncOptimizer, ReplayFn, check_backend, make_run
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.sparse import check_sparse
from shardopt.parameter_server.worker import meshes_here, sgd_spec
from shardopt.reducers import Reducer

WHO = "async_sgd"

Workers = int | Sequence[int | jax.Device | Sequence[jax.Device] | Mesh]
"""How many, or for each a device, a sequence of devices or a mesh; on Ray its number of devices."""


def async_sgd(
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    workers: Workers,
    servers: int = 1,
    max_staleness: int | None = 0,
    rule: Rule | None = None,
    reducer: Reducer | None = None,
    sparse: Sequence[str] = (),
    backend: str = "threads",
    nonfinite: str = "raise",
    address: str | None = None,
    max_restarts: int = 0,
    hang_timeout: float | None = None,
) -> AsyncOptimizer:
    """Train with workers that wait for one another only as far as a bound says.

    Each worker pulls the parameters w, computes the gradient g of a batch of its own, and pushes it; the server does
    w <- w + tx.update(rule(g)) with each push as it comes. A worker may be at most `max_staleness` steps ahead of the
    slowest when it begins one; see `parameter_server.make_server` for the exact meaning.

    **Equivalence**: with max_staleness=0, where the pushes of a clock are averaged and applied once, equal to `ddp` on
    the union of the workers' batches, up to summation order. The loss must then be proved a (weighted) mean over rows, as for
    `ddp`; any other is refused, because workers see no rows of one another. With a larger bound the loss is that of each
    worker's own batch, all of it, however many devices the worker has. Such a run equals its own event log, replayed, bit for
    bit. Losses with `rng` draw what device w of `ddp` draws at step c, for worker w at its step c.

    **Placement**: the server keeps parameters and optimizer state, replicated, on the first device of worker 0 (on Ray
    in host memory); each worker has parameters and gradient, replicated, on each of its devices. Rules that compensate
    for delay keep the parameters that each worker pulled. With n servers each has an equal range of every leaf, 1/n of
    the bytes: server i on the first device of worker i, or of another in turn; on Ray each is a process of its own.

    **Several servers**: one clock orders the pushes for all, so a push is applied by all servers or by none, and a pull
    is one version of all. For an optimizer that works element by element, the same bits as one server. Others are
    refused, but for clipping by the global norm, `so.transforms.clip_by_global_norm(c, "servers", split=True)`: first
    each server sums the squares of its part, then all take the sum of these in the order of their numbers. That is
    equal to one server up to summation order, and to its own log replayed, bit for bit.

    **Communication** for each push: the parameters one way, the gradients the other. A worker with several devices
    all-reduces its gradients among these.

    Args:
      tx: any optax transformation that asks for no more than gradient, parameters and the loss `value`.
      loss_fn: as for `ddp`. Leaves that are not floating are not trained.
      workers: how many, sharing this process's devices one each; or for each a device, a sequence of devices or a
        mesh, over which its batch is split. On Ray how many, or for each its number of devices (GPUs if there are any).
      servers: n, over how many servers parameters and optimizer state are sharded.
      max_staleness: in steps; None for no bound.
      rule: what to do about late gradients, from `parameter_server.rules`.
      reducer: how gradients are encoded on their way; see `so.reducers.compressor`. `error_feedback` is kept by the
        worker, and lost when it leaves, is killed or resumed: `metrics["lost_memory"]` says how much it held.
      sparse: regexes of key paths of leaves [rows, ...] such as embedding tables: only the rows whose gradient is not
        zero travel and are updated. For SGD without momentum that is the same as dense, up to summation order; other
        optimizers become lazy: in other rows moments and weights do not decay, while counts go on. What cannot be shown
        to act on each row by itself is refused at the first push (trust ratios, adaptive and block-wise clips, factors
        of the number of rows); a clip by the global norm of the gradients is let through. Other leaves may have any
        optimizer, through `optax.multi_transform`. The rule must have no state. Pulls are dense.
      backend: "threads"; or "ray", server and workers as processes; see `parameter_server.RunFn`.
      nonfinite: what to do about gradients that are not finite: "raise", which ends the run, or "skip" them.
      address: of the Ray cluster, such as "10.0.0.1:6379"; by default a local Ray starts, and ends with the run.
      max_restarts: on Ray, how often each worker that was killed is started again, to join where the slowest is.
      hang_timeout: on Ray, after how many seconds without progress a worker is taken to hang: it is named in the log, killed,
        and started again. Longer than a step; ten times as long for the first, which compiles. None for never.

    Returns:
      An `AsyncOptimizer`; its `run(params, batches_of, *, num_updates, ...)` trains.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, there are no workers, the backend or the policy is unknown, or the
        reducer cannot be encoded by one sender or comes with `sparse`, or several servers with either. From `run`, if
        several servers cannot share the optimizer.

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
    check_backend(WHO, backend, address, max_restarts, hang_timeout)
    check_servers(WHO, servers, {"reducer": reducer is not None, "sparse": bool(sparse)})
    on_ray = backend == "ray"
    where = process_sizes(WHO, workers) if on_ray else worker_meshes(WHO, workers)
    spec = sgd_spec(
        WHO,
        tx,
        loss_fn,
        where,
        max_staleness=max_staleness,
        rule=rule,
        nonfinite=nonfinite,
        reducer=reducer,
        sparse=check_sparse(WHO, sparse),
        servers=servers,
        devices=[] if on_ray or servers == 1 else [mesh.devices.flat[0] for mesh in meshes_here(where)],
    )
    if on_ray:
        restarts = int(max_restarts)
        spec = spec._replace(
            backend="ray", devices=where, address=address, max_restarts=restarts, hang_timeout=hang_timeout
        )
    meshes = tuple(meshes_here(where))
    return AsyncOptimizer(make_run(spec), ReplayFn(spec), meshes, tx, max_staleness, rule, backend)


def check_servers(who: str, servers: int, others: dict[str, bool]) -> None:
    """Refuse several servers beside arguments, by name, that they cannot be combined with if they are given."""
    check_count(who, "servers", servers, least=1)
    if servers > 1 and (given := [name for name, is_given in others.items() if is_given]):
        what = (
            f"servers={servers} and {given[0]} cannot be combined: each server gets a range of every leaf of each push."
        )
        raise ValueError(format_error(who, what, fix=f"leave out servers or {given[0]}."))


def worker_meshes(who: str, workers: Workers) -> list[Mesh]:
    """Return the mesh of each worker. A number of workers share the devices of this process, one each, round robin."""
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
    check_not_shared(who, meshes)
    return meshes


def _mesh(who: str, number: int, worker: object, fix: str) -> Mesh:
    if not isinstance(worker, Mesh):
        devices = list(worker) if isinstance(worker, Sequence | np.ndarray) else [worker]
        if not devices or not all(isinstance(device, jax.Device) for device in devices):
            what = f"worker {number} must be a device, a sequence of devices or a mesh, got {worker!r}."
            raise TypeError(format_error(who, what, fix=fix))
        return make_mesh(data=len(devices), devices=devices)
    sizes = worker.shape.items()
    if idle := [f"{axis} (size {size})" for axis, size in sizes if size > 1 and axis not in data_axes(worker)]:
        what = f"the mesh of worker {number} has axes that nothing is split over: {', '.join(idle)}."
        fix = "an async_sgd worker splits its batch: use so.make_mesh(data=...)."
        raise ValueError(format_error(who, what, fix=fix))
    return worker


def check_not_shared(who: str, meshes: Sequence[Mesh], noun: str = "worker") -> None:
    """Refuse shared devices: two programs with collectives can each wait for a device that the other has."""
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
        what = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun} with several devices must have them for itself."
        raise ValueError(format_error(who, what, shared, f"give each its own, or one device to several {noun}s."))


def process_sizes(who: str, workers: Workers) -> list[int]:
    """Return how many devices each worker has in a process of its own."""
    if is_integer(workers):
        check_count(who, "workers", workers, least=1)
        return [1] * int(workers)
    if isinstance(workers, str | bytes) or not isinstance(workers, Sequence) or not all(map(is_integer, workers)):
        what = f"on Ray workers must be an integer or for each its number of devices, got {workers!r}."
        raise TypeError(format_error(who, what, fix="pass workers=4, or workers=[2, 2] for two devices each."))
    if not workers:
        raise ValueError(format_error(who, "workers must be at least 1, got none.", fix="pass workers=4."))
    sizes = [int(size) for size in workers if is_integer(size)]
    for number, size in enumerate(sizes):
        check_count(who, f"workers[{number}]", size, least=1)
    return sizes
