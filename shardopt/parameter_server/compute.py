"""A worker's side of a run: its batches, its device, its gradient. Shared by the simulator and the transports."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from shardopt.core.errors import complaint
from shardopt.core.types import LossFn, PyTree
from shardopt.mesh import data_axes
from shardopt.parameter_server.gradients import make_gradients
from shardopt.parameter_server.updates import Update
from shardopt.parameter_server.workers import worker_meshes


class Compute(NamedTuple):
    """What workers do apart from talking to the server.

    Attributes:
      header: what the log keeps of it: `rng` and the number of `devices` of each worker.
      begin: `begin(worker)`, at each join: its batches start anew.
      next_batch: `next_batch(worker) -> batch`, or None where there are no more.
      update: `update(worker, params, batch, clock) -> Update`, finished, on the device of the server.
      on_server: `on_server(tree) -> tree`, moved to the device of the server: the first of the first worker.
    """

    header: dict[str, Any]
    begin: Callable[[int], None]
    next_batch: Callable[[int], Any]
    update: Callable[[int, PyTree, Any, int], Any]
    on_server: Callable[[PyTree], PyTree]


def make_compute(
    who: str,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    workers: Any,
    batches_of: Callable[[int], Iterable[Any]],
    rng: jax.Array | None,
) -> Compute:
    """Return the real thing.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if there are no workers, or a mesh cannot be used.
    """
    meshes = worker_meshes(who, workers)
    if not callable(batches_of):
        what = f"batches_of must be a function (worker) -> iterable of batches, got {type(batches_of).__name__}."
        raise TypeError(
            complaint(who, what, fix="to share out one stream: lambda w: itertools.islice(stream(), w, None, n).")
        )
    key = _key_data(who, rng)
    gradients = make_gradients(who, tx, loss_fn, meshes[0], key)
    home = meshes[0].devices.flat[0]
    streams: dict[int, Iterator[Any]] = {}

    def begin(worker: int) -> None:
        batches = batches_of(worker)
        if not isinstance(batches, Iterable):
            what = f"batches_of({worker}) must return an iterable of batches, got {type(batches).__name__}."
            raise TypeError(complaint(who, what))
        streams[worker] = iter(batches)

    def update(worker: int, params: PyTree, batch: Any, clock: int) -> Any:
        found = gradients(meshes[worker], params, batch, worker, clock)
        return jax.block_until_ready(moved(found, home))

    rows = [int(np.prod([mesh.shape[axis] for axis in data_axes(mesh)])) for mesh in meshes]
    header = {"rng": key.tolist(), "devices": rows}
    on_server = lambda tree: jax.device_put(tree, home)  # noqa: E731
    return Compute(header, begin, lambda worker: next(streams[worker], None), update, on_server)


def moved(update: Update, device: Any) -> Update:
    """Return an update on a device; its number of rows stays a number."""
    return jax.device_put(update._replace(rows=None), device)._replace(rows=update.rows)


def no_compute() -> Compute:
    """Return workers that compute nothing and never run out of it."""
    return Compute({}, lambda worker: None, lambda worker: (), lambda *_: None, lambda tree: tree)


def _key_data(who: str, rng: Any) -> np.ndarray:
    """Return the key data that a ring-1 strategy would draw from, were it initialised with this key."""
    typed = jax.random.key(0) if rng is None else rng
    if not isinstance(typed, jax.Array):
        what = f"rng must be a random key, got {type(rng).__name__}."
        raise TypeError(complaint(who, what, fix="pass jax.random.key(seed)."))
    if not jax.numpy.issubdtype(typed.dtype, jax.dtypes.prng_key):
        typed = jax.random.wrap_key_data(typed)
    return np.asarray(jax.random.key_data(jax.random.fold_in(typed, 0)))
