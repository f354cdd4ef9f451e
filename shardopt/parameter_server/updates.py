"""What a worker pushes, and what the server checks before it takes it."""

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import format_error, plural
from shardopt.core.types import (
    Metric,
    PyTree,
    TrainState,
    Weighted,
    abstract,
    is_array_like,
    leaves_with_paths,
    wide_dtype,
)
from shardopt.parameter_server.sparse import is_rows, values_of

WHO = "parameter_server"
NO_WEIGHT = "loss: its weight is 0"


class Update(NamedTuple):
    """One push: the gradient of a loss that was not yet divided by its weight.

    With T_i, W_i the total and weight of the loss on the n_i rows of push i, both per row, several pushes are averaged
    as sum n_i grad T_i / sum n_i W_i: the gradient on the union of their rows. A plain mean loss has W_i = 1.

    Attributes:
      grads: grad T, like the parameters, None for leaves that are not trained; `SparseRows` for leaves of which only
        some rows are not zero.
      loss: T and W.
      metrics: the aux metrics of the loss, each as its kind: `Weighted`, `Sum`, `Max`, `Min`.
      rows: n, how many rows it was computed from.
      is_finite: bool [2 + trained leaves]: is the weight not 0, is the loss finite, is each leaf of `grads`? None if
        that is not known yet.
      unsent: what the worker's error memory holds after a push that a reducer has encoded, `grads` being its message:
        its norm over that of the gradient; None without a reducer.
    """

    grads: PyTree
    loss: Weighted
    metrics: Mapping[str, Metric]
    rows: int | None
    is_finite: jax.Array | None = None
    unsent: jax.Array | None = None


class NonFiniteUpdateError(FloatingPointError):
    """A worker pushed NaN or infinity.

    Attributes:
      worker: which worker.
      clock: at which of its steps, counted from 0.
    """

    def __init__(self, message: str, *, worker: int, clock: int):
        super().__init__(message)
        self.worker, self.clock = worker, clock

    def __reduce__(self):
        """Cross from one process to another with all attributes."""
        return partial(NonFiniteUpdateError, worker=self.worker, clock=self.clock), (str(self),)


def make_update(
    grads: PyTree, *, loss: float | jax.Array = 0.0, weight: float | jax.Array = 1.0, rows: int = 1
) -> Update:
    """Make an update by hand, from a gradient; workers make theirs from a loss function.

    Args:
      grads: the gradient, like the parameters, None for leaves that are not trained.
      loss: the loss that goes with it, for the record.
      weight: what `grads` and `loss` are to be divided by.
      rows: how much it counts beside other updates of the same clock.

    Returns:
      An `Update`.

    Example:
      >>> import jax.numpy as jnp
      >>> make_update({"w": jnp.ones(2)}, loss=0.5).rows
      1
    """
    total = jnp.asarray(loss, wide_dtype(jnp.asarray(loss).dtype))
    return Update(grads, Weighted(total, jnp.asarray(weight, total.dtype)), {}, rows)


def finiteness(update: Update) -> jax.Array:
    """Return the bool vector of `Update.is_finite`; traceable."""
    checks = [update.loss.weight != 0, jnp.isfinite(update.loss.total) & jnp.isfinite(update.loss.weight)]
    return jnp.stack(checks + [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(values_of(update.grads))])


_jitted_finiteness = jax.jit(finiteness)


def faults(update: Update, part: PyTree) -> list[str]:
    """Return what of an update cannot be used: the loss and leaves that are not finite, or a weight of 0.

    `part` are the trained parameters, for names. `is_finite` of an encoded gradient is that of the decoded one.
    """
    is_finite = np.asarray(
        _jitted_finiteness(update._replace(rows=None)) if update.is_finite is None else update.is_finite
    )
    if is_finite.all():
        return []
    names = ["loss", *(path for path, _ in leaves_with_paths(part))]
    found = [] if is_finite[0] else [NO_WEIGHT]
    return found + [f"{name}: not finite" for name, good in zip(names, is_finite[1:], strict=True) if not good]


def check_update(update: Update | None, params: PyTree, worker: int, message: PyTree = None) -> Update:
    """Return an update, or refuse one that is not like the parameters, or if they are encoded like `message`."""
    if not isinstance(update, Update):
        what = f"worker {worker} must push an Update, got {type(update).__name__}."
        raise TypeError(format_error(WHO, what, fix="make one with parameter_server.make_update(grads)."))
    if message is not None:
        if jax.tree.map(_kind, update.grads) != jax.tree.map(_kind, message) or update.is_finite is None:
            what = f"the push of worker {worker} is not encoded as the server reads it."
            raise ValueError(format_error(WHO, what, fix="push what the compressor of the same reducer writes."))
        return update
    pushed, wanted = update, trained(params)
    if any(is_rows(leaf) for leaf in jax.tree.leaves(update.grads, is_leaf=is_rows)):
        update = update._replace(grads=_dense_shapes(update.grads, wanted, worker))
    if jax.tree.structure(update.grads) != jax.tree.structure(wanted):
        have, want = ({path for path, _ in leaves_with_paths(tree)} for tree in (update.grads, wanted))
        offenders = [f"{path}: pushed, but not a trained parameter" for path in sorted(have - want)]
        offenders += [f"{path}: missing" for path in sorted(want - have)]
        what = f"the push of worker {worker} has another structure than the trained parameters."
        raise ValueError(format_error(WHO, what, offenders, "push the gradient of the parameters that were pulled."))
    pairs = zip(leaves_with_paths(update.grads), jax.tree.leaves(wanted), strict=True)
    bad = [
        f"{path}: {_kind(grad)}, the parameter is {_kind(leaf)}"
        for (path, grad), leaf in pairs
        if (grad.shape, grad.dtype) != (leaf.shape, leaf.dtype)
    ]
    if bad:
        what = f"{plural(len(bad), 'leaf')} of the push of worker {worker} do{'es' if len(bad) == 1 else ''} not fit."
        raise ValueError(format_error(WHO, what, bad, "push gradients of the parameters' own shapes and dtypes."))
    return pushed


def _dense_shapes(grads: PyTree, wanted: PyTree, worker: int) -> PyTree:
    """Return the gradient with abstract dense leaves for the sparse ones, whose rows are checked here."""
    sizes = {path: leaf.shape[0] for path, leaf in leaves_with_paths(wanted) if leaf.ndim}
    paths = [path for path, _ in leaves_with_paths(values_of(grads))]
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_rows)
    for number, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if not is_rows(leaf) or path not in sizes:
            continue
        indices, size = np.asarray(leaf.indices), sizes[path]
        good = indices.dtype.kind in "iu" and indices.shape == leaf.values.shape[:1]
        if not good or (indices.size and not (indices.min() >= 0 and indices.max() < size)):
            what = f"the sparse push of worker {worker} does not fit."
            has = f"{path}: indices {_kind(indices)}, values {_kind(leaf.values)}, the parameter has {size} rows"
            raise ValueError(format_error(WHO, what, [has], "push an index from 0 to rows - 1 for each row of values."))
        leaves[number] = jax.ShapeDtypeStruct((size, *leaf.values.shape[1:]), leaf.values.dtype)
    return treedef.unflatten(leaves)


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def trained(params: PyTree) -> PyTree:
    """Return the parameters with None in place of the leaves that are not trained."""
    return jax.tree.map(lambda leaf: leaf if _is_trained(leaf) else None, params)


def untrained(params: PyTree) -> PyTree:
    """Return the parameters with None in place of the leaves that are trained."""
    return jax.tree.map(lambda leaf: None if _is_trained(leaf) else leaf, params)


def merge(params: PyTree, new: PyTree) -> PyTree:
    """Return the parameters with their trained leaves replaced by those of `new`."""
    values = iter(jax.tree.leaves(new))
    return jax.tree.map(lambda leaf: next(values) if _is_trained(leaf) else leaf, params)


def check_params(who: str, params: PyTree) -> None:
    """Refuse what is no pytree of arrays with something to train in it."""
    if isinstance(params, TrainState):
        raise TypeError(format_error(who, "parameters were expected, got a TrainState.", fix="pass its .params."))
    leaves = leaves_with_paths(params)
    strange = [
        f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves
        if not (is_array_like(leaf) or isinstance(leaf, int | float)) or isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if strange:
        raise TypeError(
            format_error(who, "parameters must be a pytree of arrays.", strange, "pass arrays with values.")
        )
    if not any(_is_trained(leaf) for leaf in jax.tree.leaves(abstract(params))):
        what = f"nothing is trainable among {plural(len(leaves), 'parameter leaf')}."
        raise ValueError(format_error(who, what, fix="pass floating leaves."))


def digest(params: PyTree) -> str:
    """Return a checksum of names, shapes, dtypes and bits, which tells two sets of parameters apart."""
    total = 0
    for path, leaf in leaves_with_paths(params):
        if is_array_like(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            leaf = jax.random.key_data(leaf)
        value = np.ascontiguousarray(jax.device_get(leaf))
        total = zlib.crc32(f"{path}:{value.dtype}{list(np.shape(leaf))}".encode(), total)
        total = zlib.crc32(value.view(np.uint8).data if value.ndim else value.tobytes(), total)
    return f"{total:08x}"


def _is_trained(leaf: jax.Array | np.ndarray) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
