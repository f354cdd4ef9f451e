"""The loss of some rows of a step, on one device."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core import Arrays, PyTree, error_text
from shardopt.core._block_model import as_block_model, call, run_blocks
from shardopt.core._loss_parts import LossParts
from shardopt.core._trace_context import RowContext
from shardopt.diagnose._pieces import Piece
from shardopt.losses._batch_dims import map_rows, num_rows
from shardopt.losses._metrics import value_of
from shardopt.losses._parts import loss_parts
from shardopt.losses._rows import RowsNotSeenError, with_rows
from shardopt.losses._sums import leaf_wire

_CANNOT_SEE = (
    "find_nan runs the rows of each device apart, each with the key of its device",
    "search in the global view, as by so.ddp(tx, mesh, loss_fn, view='global')",
)
"""Why a loss with a random key does not see the whole batch, and the remedy."""


@dataclasses.dataclass(frozen=True)
class PieceLoss:
    """The loss of a step, for any of the rows of its batch.

    Attributes:
      config: of the strategy.
      layout: of its parameters.
      hide_rows: whether a device runs the loss on some rows of several devices.
      params: the parameters, on the host.
      batch: the whole batch, on the host.
    """

    config: StrategyConfig
    layout: Layout
    hide_rows: bool
    params: PyTree
    batch: PyTree

    @property
    def num_rows(self) -> int:
        """The number of rows of the whole batch."""
        return num_rows(self.config, self.batch)

    @property
    def leaves(self) -> Arrays:
        """The leaves of the parameters."""
        return self.layout.treedef.flatten_up_to(self.params)

    def select(self, rows: np.ndarray | None) -> PyTree:
        """Return the batch with these rows."""
        if rows is None:
            return self.batch
        return map_rows(
            self.config, lambda leaf, dim: leaf[(slice(None),) * dim + (rows,)], self.batch
        )

    def loss_of(
        self, leaves: Arrays, batch: PyTree, key: jax.Array | None
    ) -> tuple[jax.Array, PyTree]:
        """Return the loss of some rows, and the new values of frozen leaves."""
        parts = self.parts_of(leaves, batch, key)
        if self.is_whole(batch, key):
            return value_of(parts.loss), parts.updates
        # the weight of a piece may be 0: the step divides by the weight of all pieces
        return jnp.sum(jnp.stack(jax.tree.leaves(parts.loss.total))), parts.updates

    def parts_of(self, leaves: Arrays, batch: PyTree, key: jax.Array | None) -> LossParts:
        """Return the parts of the loss of some rows."""
        wires = [leaf_wire(self.config.wire, plan) for plan in self.layout.plans]
        leaves = [
            x if wire.gather_dtype is None else x.astype(wire.gather_dtype)
            for x, wire in zip(leaves, wires, strict=True)
        ]
        returned = self.returned(self.layout.treedef.unflatten(leaves), batch, key)
        return loss_parts(self.config.strategy, returned, num_rows(self.config, batch))

    def is_whole(self, batch: PyTree, key: jax.Array | None) -> bool:
        """Return whether these are all rows, for a loss without a random key: no other rows have a
        part in its value.
        """
        return key is None and num_rows(self.config, batch) == self.num_rows

    def returned(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> PyTree:
        """Return the result of the loss.

        If it names mesh axes, one device stands for all: each axis has size 1.
        """
        loss_fn = self.config.loss.loss_fn
        hides_rows = self.hide_rows and not self.is_whole(batch, key)
        if hides_rows:
            axes = self.config.axes
            loss_fn = with_rows(
                RowContext(axes.summed, axes.num_shares, refused=_CANNOT_SEE), loss_fn
            )
        model = as_block_model(loss_fn)

        def run(params: PyTree, batch: PyTree, key: jax.Array | None) -> PyTree:
            return (
                call(loss_fn, key, 0, params, batch)
                if model is None
                else run_blocks(model, params, batch, key)
            )

        try:
            return run(params, batch, key)
        except NameError as error:
            if "axis name" not in str(error):
                raise
            if hides_rows:
                problem, fix = _CANNOT_SEE
                text = error_text(
                    f"the loss names a mesh axis, and {problem}.",
                    fix=f"use so.losses.batch_mean; and {fix}.",
                )
                raise RowsNotSeenError(text) from error
        for axis in self.config.mesh.axis_names:
            run = _with_axis(run, axis)
        return run(params, batch, key)

    def gradients_of(self, leaves: Arrays, batch: PyTree, key: jax.Array | None) -> Arrays:
        """Return the gradients of the trained leaves."""

        def loss(trained):
            merged = self.layout.treedef.flatten_up_to(self.layout.merge(leaves, trained))
            return self.loss_of(merged, batch, key)[0]

        return jax.grad(loss)(self.layout.trained_leaves(leaves))

    def reads_other_rows(self, piece: Piece) -> bool:
        """Return whether the loss of a piece reads the rows of other devices."""
        try:
            jax.eval_shape(self.loss_of, self.leaves, self.select(piece.rows), piece.key)
        except RowsNotSeenError:
            return True
        return False


def _with_axis(run: Callable[..., PyTree], axis: str) -> Callable[..., PyTree]:
    """Return the function with an axis of size 1, which its collectives may name."""
    run_on_axis = jax.vmap(run, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)
    return lambda *args: jax.tree.map(lambda x: x[0], run_on_axis(*args))
