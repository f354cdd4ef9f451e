"""A loss of one row, made into a loss of a batch: its mean over rows is right by construction."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shardopt.config._options import BatchDims, check_batch_dims
from shardopt.core import (
    Loss,
    Max,
    Min,
    PyTree,
    Sum,
    Updated,
    Weighted,
    calling,
    is_inexact,
    leaves_with_paths,
    path_text,
    plural,
    type_error,
    value_error,
    wide_dtype,
)
from shardopt.core._block_model import as_block_model, is_key_of_each_row, takes_rng
from shardopt.core._trace_context import RowContext
from shardopt.losses._batch_dims import row_dim_by_rules
from shardopt.losses._parts import loss_parts
from shardopt.losses._rows import with_rows

_ONE_ROW = RowContext(
    (),
    1,
    refused=(
        "so.per_row gives the loss one row",
        "write a loss of the batch for what a row needs of the other rows",
    ),
)


@calling("per_row")
def per_row(loss_of_row: Callable[..., Loss], *, batch_dims: BatchDims = ()) -> "PerRow":
    """Return the loss of a batch: the mean over its rows of a loss of one row.

    `loss_of_row` sees one row and nothing else. So each device runs it on its own rows, in every
    strategy that takes a function, and no proof is needed.

    Args:
      loss_of_row: `loss_of_row(params, row) -> scalar | Weighted`, or `(loss, metrics)`, as
        `loss_fn` of `so.ddp`. The leaves of `row` have no dim of rows: `row["x"]` is [D] for
        `batch["x"]` [B, D]. It may take a keyword `rng`: a random key for each row.
      batch_dims: which dim of a leaf counts rows, as in `so.ddp`: `[(regex, dim), ...]`. By default
        dim 0 does, and a leaf without dims is shared by all rows. A strategy must get the same.

    Returns:
      A loss `(params, batch) -> loss`, or `(params, batch, rng)` if `loss_of_row` takes `rng`. It
      also runs without a strategy.

    Raises:
      TypeError: if `loss_of_row` is no function, or a `BlockModel`, whose functions take batches.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> @so.per_row
      ... def loss(params, row):
      ...     return (row["x"] @ params - row["y"]) ** 2
      >>> float(loss(jnp.ones(2), {"x": jnp.eye(2), "y": jnp.array([1.0, 3.0])}))
      2.0

    **Values.** A number is averaged over rows. `so.losses.Weighted` gives the sum of totals over
    the sum of weights. `Sum`, `Max` and `Min` are taken over rows. A new value in `Updated` is
    averaged, or is the largest if it is an integer.

    **Random keys.** At step s row r of the global batch gets
    `fold_in(fold_in(wrap_key_data(state.rng), s), r)`. So its draws
    do not depend on the mesh or on `micro_batches`; only on a context axis each share of the
    positions draws its own.

    **Exceptions.** Five kinds of losses run as a loss without a proof does, with the reason:

    - The loss names a mesh axis that carries rows.
    - It uses `jax.custom_batching.custom_vmap`, which may mix rows.
    - It draws from keys that are not of threefry2x32, such as "rbg": `jax.vmap` draws for all rows
      together.
    - A custom derivative does not scale with its cotangent.
    - A weight of `Weighted` depends on the parameters.
    """
    if not callable(loss_of_row) or as_block_model(loss_of_row) is not None:
        problem = f"loss_of_row must be a function of (params, row), got {loss_of_row!r:.80}."
        fix = "pass a BlockModel to the strategy itself: its functions take whole batches."
        raise type_error(problem, fix=fix)
    return PerRow(loss_of_row, tuple(check_batch_dims("batch_dims", batch_dims)))


@dataclasses.dataclass(frozen=True)
class PerRow:
    """The loss that `per_row` returns.

    Attributes:
      loss_of_row: the loss of one row.
      batch_dims: see `per_row`.
    """

    loss_of_row: Callable[..., Loss]
    batch_dims: BatchDims = ()

    def __call__(self, params: PyTree, batch: PyTree, rng: jax.Array | None = None) -> Loss:
        """Return the loss of a batch.

        Args:
          params: the parameters.
          batch: the batch, with rows in the dims that `row_dims` names.
          rng: a random key, or a key for each row [rows].
        """
        dims = self.row_dims(batch)
        num_rows = self._num_rows(batch)
        keys = rng
        if rng is not None and not is_key_of_each_row(rng):
            keys = row_keys(rng, jnp.arange(num_rows))
        values = jax.vmap(self.of_row, in_axes=(None, dims, 0), axis_size=num_rows)(
            params, batch, keys
        )
        if isinstance(values, tuple) and not isinstance(values, Weighted):
            loss, metrics = values
            return _over_rows(loss), {name: _over_rows(x) for name, x in metrics.items()}
        return _over_rows(values)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature: with `rng` if the loss of a row takes it, and with the same default."""
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("params", "batch")
        ]
        if takes_rng(self.loss_of_row):
            rng = inspect.signature(self.loss_of_row).parameters["rng"]
            parameters.append(rng.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        return inspect.Signature(parameters)

    def row_dims(self, batch: PyTree) -> PyTree:
        """Return the dim of each leaf of a batch that counts rows; None if all rows share it."""

        def dim_of(path: jax.tree_util.KeyPath, leaf: PyTree) -> int | None:
            return row_dim_by_rules(self.batch_dims, path_text(path), jnp.ndim(leaf))

        return jax.tree_util.tree_map_with_path(dim_of, batch)

    def of_row(self, params: PyTree, row: PyTree, key: jax.Array | None) -> Loss:
        """Return the loss of one row, which must be a scalar.

        Args:
          params: the parameters.
          row: the row, without dims of rows.
          key: the random key of the row; None outside of training.
        """
        loss_of_row = cast(Callable[..., Loss], with_rows(_ONE_ROW, self.loss_of_row))
        if key is None or not takes_rng(self.loss_of_row):
            returned = loss_of_row(params, row)
        else:
            returned = loss_of_row(params, row, rng=key)
        loss_parts("per_row", returned, 1)  # raises if this is not a loss
        return returned

    def _num_rows(self, batch: PyTree) -> int:
        dims = jax.tree.leaves(self.row_dims(batch), is_leaf=lambda dim: dim is None)
        lengths = {
            path or "batch": jnp.shape(leaf)[dim]
            for (path, leaf), dim in zip(leaves_with_paths(batch), dims, strict=True)
            if dim is not None
        }
        if len(set(lengths.values())) == 1:
            return next(iter(lengths.values()))
        problem = "leaves of the batch do not agree on a number of rows."
        lines = [f"{path}: {plural(length, 'row')}" for path, length in lengths.items()]
        fix = "name the dim of rows of a leaf, or None if all rows share it: batch_dims=[...]."
        with calling("per_row"):
            raise value_error(problem, lines, fix)


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the random keys of rows, [rows], for their numbers in the global batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def row_numbers(
    device: ArrayLike, micro_batch: ArrayLike, num_micro_batches: int, rows: int
) -> jax.Array:
    """Return the numbers in the global batch of the rows of a micro-batch.

    Args:
      device: the number of the device along the axes of rows, or of several devices [devices].
      micro_batch: the number of the micro-batch.
      num_micro_batches: the number of micro-batches that each device cuts its rows into.
      rows: the number of rows of a micro-batch on one device.
    """
    first_rows = (jnp.asarray(device) * num_micro_batches + micro_batch) * rows
    return jnp.add.outer(first_rows, jnp.arange(rows)).reshape(-1)


def _over_rows(value: Any) -> Any:
    """Return the value of the batch for the values of its rows [rows, ...]."""
    if isinstance(value, Weighted | Sum):
        return jax.tree.map(_sum, value)
    if isinstance(value, Max):
        return Max(value.value.max(0))
    if isinstance(value, Min):
        return Min(value.value.min(0))
    if isinstance(value, Updated):
        return jax.tree.map(_mean_or_largest, value)
    return _mean(value)


def _sum(x: jax.Array) -> jax.Array:
    return x.sum(0, dtype=wide_dtype(x.dtype) if is_inexact(x) else None)


def _mean(x: jax.Array) -> jax.Array:
    return x.mean(0, dtype=wide_dtype(x.dtype))


def _mean_or_largest(x: jax.Array) -> jax.Array:
    if is_inexact(x):
        return _mean(x).astype(x.dtype)
    return x.max(0)
