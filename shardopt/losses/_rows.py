"""Functions that a loss calls to see the rows of the whole batch: all rows, their mean, their sum.

A loss runs on every device with that device's rows. The step wraps it in `with_rows`, so that these
functions know which mesh axes carry the other rows. Without the wrapper (one device, the global
view) the array has all rows already.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.config._config import StrategyConfig
from shardopt.core import PyTree, format_error, is_inexact, leaves_with_paths, wide_dtype
from shardopt.core._block_model import LossFn, as_block_model
from shardopt.core._trace_context import RowContext, trace_context, within_rows
from shardopt.mesh import mesh_under_trace


def gather_batch(x: PyTree) -> PyTree:
    """Return the rows of all devices, in the order of the global batch; for use inside a loss.

    With x_d [rows, ...] on device d of D: y = concatenate(x_1, ..., x_D), the same on every device.
    Differentiable; the gradient of x_d is the sum over devices of their gradients of these rows.

    Args:
      x: an array, or a pytree of them, [rows, ...], computed from this device's rows.

    Returns:
      The gathered array or pytree, [devices * rows, ...].

    Raises:
      ValueError: if an array has no dims, or with `micro_batches` above 1 or a pipeline, which see
        a part of the batch.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> def contrastive(params, batch):  # CLIP: every other row of the whole batch is a negative
      ...     images, texts = batch["image"] @ params["image"], batch["text"] @ params["text"]
      ...     logits = images @ so.losses.gather_batch(texts).T
      ...     positives = jax.lax.dot_general(images, texts, (((1,), (1,)), ((0,), (0,))))
      ...     return jnp.mean(jax.nn.logsumexp(logits, axis=1) - positives)
      >>> params = {"image": jnp.eye(2), "text": jnp.eye(2)}
      >>> round(float(contrastive(params, {"image": jnp.eye(2), "text": jnp.eye(2)})), 4)
      0.3133

    **Equivalence.** The loss sees the same rows as on one device with the whole batch. It is exact,
    up to summation order, in every strategy; if each replica trains by itself, it sees the rows of
    its replica. On one device, in `view="global"` and outside of a strategy it returns x.

    **Communication** in each call: an all-gather of all rows over the axes that carry rows
    (replica, data), and a reduce-scatter of the same size in the backward pass. Half precision is
    sent, and its gradient summed, in float32.

    References:
      Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021,
      figure 3.
    """
    context = _context("gather_batch", x)

    def gather(x: jax.Array, context: RowContext) -> jax.Array:
        wide = wide_dtype(x.dtype) if is_inexact(x) else x.dtype
        return jax.lax.all_gather(x.astype(wide), context.axes, tiled=True).astype(x.dtype)

    if context is None:
        return jax.tree.map(jnp.asarray, x)
    return jax.tree.map(lambda x: gather(jnp.asarray(x), context), x)


def batch_mean(x: PyTree) -> PyTree:
    """Return the mean over the rows of the whole global batch; for use inside a loss.

    With x_d [rows, ...] on device d of D: m = 1/(D rows) sum_d sum_r x_d[r], the same on every
    device. Differentiable.

    Args:
      x: an array, or a pytree of them, [rows, ...], computed from this device's rows.

    Returns:
      The mean of each array, [...], in the dtype of `jnp.mean`.

    Raises:
      ValueError: if an array has no dims, or with `micro_batches` above 1 or a pipeline, which see
        a part of the batch.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> def policy_gradient(params, batch):  # advantages normalised over the whole batch
      ...     mean = so.losses.batch_mean(batch["advantage"])
      ...     std = jnp.sqrt(so.losses.batch_mean((batch["advantage"] - mean) ** 2))
      ...     return -jnp.mean((batch["advantage"] - mean) / std * (batch["x"] @ params))
      >>> batch = {"advantage": jnp.array([1.0, 3.0]), "x": jnp.eye(2)}
      >>> float(policy_gradient(jnp.array([0.0, 2.0]), batch))
      -1.0

    **Equivalence.** As `gather_batch`; on one device it is `jnp.mean(x, axis=0)`.

    **Communication** in each call: an all-reduce of the mean's size over the axes that carry rows
    (replica, data), and another in the backward pass, in float32 at least.

    References:
      Ioffe and Szegedy, "Batch Normalization", 2015, algorithm 1.
    """
    context = _context("batch_mean", x)

    def local_mean(x: jax.Array) -> jax.Array:
        return jnp.mean(x, axis=0)

    def global_mean(x: jax.Array, context: RowContext) -> jax.Array:
        dtype = jax.eval_shape(local_mean, x).dtype
        mean = jnp.mean(x, axis=0, dtype=wide_dtype(dtype))
        return (jax.lax.psum(mean, context.axes) / context.devices).astype(dtype)

    return _reduce_rows(context, local_mean, global_mean, x)


def batch_sum(x: PyTree) -> PyTree:
    """Return the sum over the rows of the whole global batch; for use inside a loss.

    With x_d [rows, ...] on device d of D: s = sum_d sum_r x_d[r], the same on every device.
    Differentiable.

    Args:
      x: an array, or a pytree of them, [rows, ...], computed from this device's rows.

    Returns:
      The sum of each array, [...], in the dtype of `jnp.sum`.

    Raises:
      ValueError: if an array has no dims, or with `micro_batches` above 1 or a pipeline, which see
        a part of the batch.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> def summed(params, batch):  # a sum over the examples, not their mean
      ...     return so.losses.batch_sum((batch - params) ** 2)
      >>> float(summed(jnp.array(1.0), jnp.array([0.0, 3.0])))
      5.0

    **Equivalence.** As `gather_batch`; on one device it is `jnp.sum(x, axis=0)`.

    **Communication** in each call: an all-reduce of the sum's size over the axes that carry rows
    (replica, data), and another in the backward pass. Floating numbers are summed in float32 at
    least.
    """
    context = _context("batch_sum", x)

    def local_sum(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=0)

    def global_sum(x: jax.Array, context: RowContext) -> jax.Array:
        dtype = jax.eval_shape(local_sum, x).dtype
        wide = wide_dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else dtype
        return jax.lax.psum(jnp.sum(x, axis=0, dtype=wide), context.axes).astype(dtype)

    return _reduce_rows(context, local_sum, global_sum, x)


class RowsNotSeenError(ValueError):
    """A loss asks for the rows of the whole batch, and it does not see them."""


def row_context(config: StrategyConfig) -> RowContext:
    """Return the row context of a strategy's loss in the per-device view."""
    axes = config.axes
    pipelined = (
        "in a pipeline the loss sees one micro-batch at a time",
        "use a mesh with pipeline=1",
    )
    refused = None if config.schedule is None else pipelined
    if axes.num_position_shares > 1:
        refused = (
            "on a context axis the loss sees a part of each sequence",
            "use a mesh with context=1, or view='global'",
        )
    return RowContext(axes.summed, axes.num_shares, config.loss.micro_batches, refused=refused)


def with_rows(context: RowContext, loss_fn: LossFn) -> LossFn:
    """Return the loss, or the `BlockModel`, with each of its functions called within the context,
    whenever it is traced.
    """
    model = as_block_model(loss_fn)
    if model is None:
        return _run_within(context, loss_fn)
    parts = {
        name: _run_within(context, getattr(model, name)) for name in ("embed", "block", "loss")
    }
    return model._replace(**parts)


def _run_within(context: RowContext, f: Any) -> Callable[..., Any]:
    @functools.wraps(f)
    def run_in_context(*args: Any, **kwargs: Any) -> Any:
        with within_rows(context):
            return f(*args, **kwargs)

    return run_in_context


def _context(caller: str, x: PyTree) -> RowContext | None:
    """Return the context.

    Raise ValueError if the rows of the whole batch are not available, or x has none.
    """
    scalars = [path or "x" for path, leaf in leaves_with_paths(x) if jnp.ndim(leaf) == 0]
    if scalars:
        fix = "pass what each row gives, [rows, ...]; a mean over rows is no row."
        raise ValueError(format_error(caller, "an array without dims has no rows.", scalars, fix))
    context = trace_context().rows
    if context is None:
        if mesh_under_trace().manual_axes:
            problem = "it was called in the per-device view, but outside of a strategy's loss."
            fix = (
                "call it in the loss itself, not in a shard_map of your own or in a rule of"
                " jax.custom_vjp."
            )
            raise ValueError(format_error(caller, problem, fix=fix))
        return None
    refused = context.refused
    if refused is None and context.micro_batches > 1:
        problem = (
            f"with micro_batches={context.micro_batches} the loss sees one micro-batch at a time"
        )
        refused = problem, "use micro_batches=1, or view='global'"
    if refused is not None:
        problem, fix = refused
        raise RowsNotSeenError(
            format_error(caller, f"{problem}, never the rows of the whole batch.", fix=f"{fix}.")
        )
    return context


def _reduce_rows(
    context: RowContext | None,
    local_reduce: Callable[[jax.Array], jax.Array],
    global_reduce: Callable[[jax.Array, RowContext], jax.Array],
    x: PyTree,
) -> PyTree:
    if context is None:
        return jax.tree.map(lambda x: local_reduce(jnp.asarray(x)), x)
    return jax.tree.map(lambda x: global_reduce(jnp.asarray(x), context), x)
