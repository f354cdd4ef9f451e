"""The update that a worker pushes, and the checks that the server makes before it accepts an
update.
"""

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core import (
    Metric,
    PyTree,
    TrainState,
    Weighted,
    abstract,
    is_array_like,
    is_inexact,
    is_key,
    leaves_with_paths,
    plural,
    type_error,
    value_error,
    wide_dtype,
)

NO_WEIGHT = "loss: its weight is 0"


class Update(NamedTuple):
    """One push: the gradient of a loss that is not yet divided by its weight.

    Let T_i and W_i be the total and weight of the loss on the n_i rows of push i, both per row.
    Several pushes are averaged as sum n_i grad T_i / sum n_i W_i. This is the gradient on the union
    of their rows. A plain mean loss has W_i = 1.

    Attributes:
      grads: grad T, like the parameters, with None for leaves that are not trained. With a reducer,
        its message.
      loss: T and W.
      metrics: the aux metrics of the loss, each as its kind: `Weighted`, `Sum`, `Max`, `Min`.
      rows: n, the number of rows that the update was computed from.
      is_finite: bool [2 + trained leaves]: the weight is not 0, the loss is finite, each leaf of
        `grads` is finite. None if not known yet.
      unsent: with a reducer, the norm of the worker's error memory after this push, divided by the
        norm of the gradient; None without a reducer.
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
      clock: the number of the worker's step, counted from 0.
    """

    def __init__(self, message: str, *, worker: int, clock: int):
        super().__init__(message)
        self.worker = worker
        self.clock = clock

    def __reduce__(self):
        """Pickle the error with all its attributes, for other processes."""
        return partial(NonFiniteUpdateError, worker=self.worker, clock=self.clock), (str(self),)


def make_update(
    grads: PyTree, *, loss: float | jax.Array = 0.0, weight: float | jax.Array = 1.0, rows: int = 1
) -> Update:
    """Return an update made from a gradient; the workers of a run make theirs from a loss function.

    Args:
      grads: the gradient, like the parameters, with None for leaves that are not trained.
      loss: the loss of this gradient, for the metrics.
      weight: the divisor of `grads` and `loss`.
      rows: the weight of this update compared with other updates of the same clock.

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
    checks = [
        update.loss.weight != 0,
        jnp.isfinite(update.loss.total) & jnp.isfinite(update.loss.weight),
    ]
    return jnp.stack(checks + [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(update.grads)])


_jitted_finiteness = jax.jit(finiteness)


def faults(update: Update, trained_params: PyTree) -> list[str]:
    """Return the reasons why an update cannot be used: a weight of 0, and the loss and leaves that
    are not finite.

    The names come from `trained_params`. For an encoded gradient `is_finite` describes the decoded
    gradient.
    """
    is_finite = np.asarray(
        _jitted_finiteness(update._replace(rows=None))
        if update.is_finite is None
        else update.is_finite
    )
    if is_finite.all():
        return []
    names = ["loss", *(path for path, _ in leaves_with_paths(trained_params))]
    reasons = [] if is_finite[0] else [NO_WEIGHT]
    return reasons + [
        f"{name}: not finite"
        for name, finite in zip(names, is_finite[1:], strict=True)
        if not finite
    ]


def check_update(
    update: Update | None, trained_params: PyTree, worker: int, message: PyTree = None
) -> Update:
    """Return the update, or refuse it if it does not match the parameters, or `message` if pushes
    are encoded.
    """
    if not isinstance(update, Update):
        problem = f"worker {worker} must push an Update, got {type(update).__name__}."
        raise type_error(problem, fix="make one with parameter_server.make_update(grads).")
    if message is not None:
        if (
            jax.tree.map(_leaf_type, update.grads) != jax.tree.map(_leaf_type, message)
            or update.is_finite is None
        ):
            problem = f"the push of worker {worker} is not encoded as the server reads it."
            raise value_error(problem, fix="push what the compressor of the same reducer writes.")
        return update
    if jax.tree.structure(update.grads) != jax.tree.structure(trained_params):
        pushed_paths, trained_paths = (
            dict(leaves_with_paths(x)).keys() for x in (update.grads, trained_params)
        )
        offenders = [
            f"{path}: pushed, but not a trained parameter"
            for path in sorted(pushed_paths - trained_paths)
        ]
        offenders += [f"{path}: missing" for path in sorted(trained_paths - pushed_paths)]
        problem = f"the push of worker {worker} has another structure than the trained parameters."
        fix = "push the gradient of the parameters that were pulled."
        raise value_error(problem, offenders, fix)
    pairs = zip(leaves_with_paths(update.grads), jax.tree.leaves(trained_params), strict=True)
    misfits = [
        f"{path}: {_leaf_type(grad)}, the parameter is {_leaf_type(leaf)}"
        for (path, grad), leaf in pairs
        if (grad.shape, grad.dtype) != (leaf.shape, leaf.dtype)
    ]
    if misfits:
        verb = f"do{'es' if len(misfits) == 1 else ''} not fit"
        problem = f"{plural(len(misfits), 'leaf')} of the push of worker {worker} {verb}."
        fix = "push gradients of the parameters' own shapes and dtypes."
        raise value_error(problem, misfits, fix)
    return update


def _leaf_type(leaf: Any) -> str:
    """Return dtype and shape as text, such as `float32[2, 3]`, or the name of the Python type."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def trained(params: PyTree) -> PyTree:
    """Return the parameters with None in place of the leaves that are not trained."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, params)


def replace_trained(params: PyTree, new_leaves: PyTree) -> PyTree:
    """Return the parameters with their trained leaves replaced by `new_leaves`."""
    values = iter(jax.tree.leaves(new_leaves))
    return jax.tree.map(lambda leaf: next(values) if is_inexact(leaf) else leaf, params)


def check_params(params: PyTree) -> None:
    """Refuse parameters that are not a pytree of arrays, or have no leaf to train."""
    if isinstance(params, TrainState):
        raise type_error("parameters were expected, got a TrainState.", fix="pass its .params.")
    leaves = leaves_with_paths(params)
    non_arrays = [
        f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves
        if not (is_array_like(leaf) or isinstance(leaf, int | float))
        or isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if non_arrays:
        raise type_error(
            "parameters must be a pytree of arrays.", non_arrays, "pass arrays with values."
        )
    if not any(map(is_inexact, jax.tree.leaves(abstract(params)))):
        problem = f"nothing is trainable among {plural(len(leaves), 'parameter leaf')}."
        raise value_error(problem, fix="pass floating leaves.")


def digest(params: PyTree) -> str:
    """Return a checksum of the names, shapes, dtypes and bits of parameters."""
    checksum = 0
    for path, leaf in leaves_with_paths(params):
        values = jax.random.key_data(leaf) if is_key(leaf) else leaf
        # with at least one dim, since numpy cannot view an array without dims as bytes
        array = np.ascontiguousarray(jax.device_get(values))
        form = f"{path}:{array.dtype}{list(np.shape(values))}"
        checksum = zlib.crc32(form.encode(), checksum)
        checksum = zlib.crc32(array.view(np.uint8).data, checksum)
    return f"{checksum:08x}"
