"""The loss of some rows: it gathers parameters when they are needed, makes a random key, and
returns sums.

In the per-device view these are the rows of one micro-batch on one device; in the global view, the
rows of all devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shardopt.collectives import SMALL_BUCKET_BYTES, LeafWire, all_gather
from shardopt.collectives._column_table import TableForm
from shardopt.collectives._shards import behind_barrier, gathered_twice
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core import PyTree, Weighted
from shardopt.core._block_model import (
    BLOCKS,
    LOSS,
    BlockModel,
    LossFn,
    as_block_model,
    call,
    outer_of,
    run_blocks,
    takes_rng,
)
from shardopt.core._loss_parts import LossParts
from shardopt.losses._backward_order import scatter_first
from shardopt.losses._batch_dims import num_rows
from shardopt.losses._constraints import gather_leaves, shard_activations
from shardopt.losses._explain import explained
from shardopt.losses._parts import loss_parts
from shardopt.losses._per_row import PerRow, row_keys
from shardopt.losses._rows import row_context, with_rows
from shardopt.partition import LeafPlan
from shardopt.remat._gathered_block import block_with_remat, kept_by_jax


def loss_of_rows(
    config: StrategyConfig,
    layout: Layout,
    params: PyTree,
    batch: PyTree,
    key: jax.Array | None,
    probe: jax.Array | None = None,
    *,
    differentiated: bool = True,
) -> LossParts:
    """Return the loss of these rows.

    Parameters that are sharded, or cast before the wire, are gathered when they are needed: also in
    the backward pass, if the call is `differentiated`.

    The gradient of `probe` is the sum of the bits of the gathered parameters' local gradients, see
    `all_gather`.
    """
    loss_fn = config.loss.loss_fn
    rows = num_rows(config, batch)
    with explained(config, rows):
        if config.loss.view == "per_device":
            loss_fn = with_rows(row_context(config), loss_fn)
        model = as_block_model(loss_fn)
        if model is None:
            plain_loss = PlainLoss(config, layout, loss_fn, rows, probe, differentiated)
            return plain_loss.parts(params, batch, key)
        block_loss = BlockLoss(config, layout, model, rows, probe, differentiated)
        return block_loss.parts(params, batch, key)


@dataclasses.dataclass(frozen=True, eq=False)
class PlainLoss:
    """A loss that is a function of all parameters, which are gathered together.

    Attributes:
      config: of the strategy.
      layout: of the parameters.
      loss_fn: the function.
      rows: the number of rows of its batch.
      probe: see `loss_of_rows`.
      differentiated: see `loss_of_rows`.
    """

    config: StrategyConfig
    layout: Layout
    loss_fn: LossFn
    rows: int
    probe: jax.Array | None
    differentiated: bool

    def parts(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> LossParts:
        """Return the loss of a batch."""
        if not self.config.gathers:
            return self._of_gathered(params, batch, key)

        if self.config.loss.micro_batches > 1:
            # Otherwise the compiler sees that all micro-batches gather the same weights, and keeps
            # the gathered model.
            params, batch = behind_barrier((params, batch))
            # the barrier gives it tangents, which callbacks refuse
            batch = jax.lax.stop_gradient(batch)

        # It may be differentiated later by a value that the loss closes over, which jax.custom_vjp
        # refuses.
        if not self.differentiated:
            return self._of_gathered(self.gather(params, None), batch, key)
        run = gathered_twice(
            lambda shards: (self.gather(*shards), shards[1]),
            lambda gathered, inputs: self._of_gathered(gathered[0], *inputs),
        )
        return run((params, self.probe), (batch, key))

    def gather(self, params: PyTree, probe: jax.Array | None) -> PyTree:
        """Return the gathered parameters."""
        plans = self.layout.treedef.unflatten(self.layout.plans)
        # without buckets, because a bucket would hold all leaves at the same time
        return all_gather_leaves(self.config, params, plans, bucket_bytes=0, probe=probe)

    def _of_gathered(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> LossParts:
        returned = call(self.loss_fn, key, 0, params, batch)
        return loss_parts(self.config.strategy, returned, self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockLoss:
    """The loss of a `BlockModel`: outer parameters are gathered once, blocks one at a time.

    Attributes:
      config: of the strategy.
      layout: of the parameters.
      model: the model.
      rows: the number of rows of its batch.
      probe: see `loss_of_rows`.
      differentiated: see `loss_of_rows`.
    """

    config: StrategyConfig
    layout: Layout
    model: BlockModel
    rows: int
    probe: jax.Array | None
    differentiated: bool

    def parts(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> LossParts:
        """Return the loss of a batch."""
        gathers = self.config.gathers
        params = self._with_probes(params) if gathers else params
        gather_block = self.gather_block if gathers else None
        has_experts_and_tables = self.config.layout.expert_leaves and self._tables
        scatters_first = gathers and has_experts_and_tables and self._is_per_device
        # A value of the loss may be differentiated later, also forwards, which `jax.custom_vjp` refuses.
        remat, loss = kept_by_jax, None
        if self.differentiated:
            remat = self.config.slots.remat
            loss = functools.partial(self.loss_of, params, batch, key)
        run_block = block_with_remat(
            self.config.strategy, self.model, gather_block, remat, loss=loss
        )
        if not self._is_per_device:
            run_block = shard_activations(self.config, run_block, batch)
        returned = run_blocks(
            self.model,
            params,
            batch,
            key,
            gather_outer=self.gather_outer if gathers else None,
            run_block=run_block,
            before_loss=self.gather_before_loss if scatters_first else None,
        )
        return loss_parts(self.config.strategy, returned, self.rows)

    def gather_outer(self, outer: PyTree) -> PyTree:
        """Return the gathered outer parameters."""
        plans = outer_of(self._plans)
        return all_gather_leaves(self.config, outer, plans, tables=self._tables, probe=self.probe)

    def gather_block(self, block_and_probe: tuple[PyTree, jax.Array | None]) -> PyTree:
        """Return the gathered parameters of one block."""
        block, probe = block_and_probe
        plans = self._plans[BLOCKS]
        return all_gather_leaves(self.config, block, plans, model=self.model, probe=probe)

    def gather_before_loss(self, outer: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        """Return the outer parameters, gathered once more for the loss, and its input.

        The loss does not read the table. Other outer leaves are read by embed or by the loss, and
        gathered once.
        """
        return scatter_first(self.gather_outer, outer, x)

    def loss_of(self, params: PyTree, batch: PyTree, key: jax.Array | None, x: PyTree) -> Weighted:
        """Return the loss of the last block's result, without the metrics."""
        outer = outer_of(params)
        if self.config.gathers:
            outer = self.gather_outer(outer)
        returned = call(self.model.loss, key, LOSS, outer, x, batch)
        return loss_parts(self.config.strategy, returned, self.rows).loss

    @property
    def _plans(self) -> PyTree:
        return self.layout.treedef.unflatten(self.layout.plans)

    @property
    def _tables(self) -> frozenset[str]:
        # the model of evaluation may have no tables
        return self.layout.tables.intersection(self.model.tables)

    @property
    def _is_per_device(self) -> bool:
        return self.config.loss.view == "per_device"

    def _with_probes(self, params: PyTree) -> PyTree:
        """Return the parameters with the probe as one more leaf of each block, because a block sees
        its arguments alone.
        """
        num_blocks = jax.tree.leaves(params[BLOCKS])[0].shape[0]
        probes = self.probe
        if probes is not None:
            probes = jnp.broadcast_to(probes, (num_blocks, *probes.shape))
        return {**params, BLOCKS: (params[BLOCKS], probes)}


def all_gather_leaves(
    config: StrategyConfig,
    tree: PyTree,
    plans: PyTree,
    *,
    model: BlockModel | None = None,
    tables: Collection[str] = (),
    bucket_bytes: int = SMALL_BUCKET_BYTES,
    probe: jax.Array | None = None,
) -> PyTree:
    """All-gather the leaves of a tree over data, each cast to `gather_dtype`.

    With a model the leaves of one of its blocks.

    Leaves of a block that `model.rounded` names are `RoundedWeight`, in the per-device view. Leaves
    named in `tables` stay sharded, as `ColumnTable`. The gradient of `probe` is the sum of the
    local gradients' bits.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaf_plans: list[LeafPlan] = treedef.flatten_up_to(plans)
    if model is not None:
        leaf_plans = [plan.of_block() for plan in leaf_plans]
    if config.loss.view == "global":
        return treedef.unflatten(gather_leaves(config, leaves, leaf_plans))
    roundings = (
        {}
        if model is None
        else {f"{BLOCKS}/{path}": rounding for path, rounding in model.rounded.items()}
    )
    wires = [config.slots.wire(config.wire, plan, roundings.get(plan.path)) for plan in leaf_plans]
    wires = [
        _of_table(wire, plan) if plan.path in tables else wire
        for wire, plan in zip(wires, leaf_plans, strict=True)
    ]
    # Benchmarks of dense models (benchmarks/pod_compiles.py) were measured without it: only models
    # with experts get it.
    cast_in_place = model is not None and bool(config.layout.expert_leaves)
    gathered = all_gather(
        leaves, wires, cast_in_place=cast_in_place, bucket_bytes=bucket_bytes, probe=probe
    )
    return treedef.unflatten(gathered)


def _of_table(wire: LeafWire, plan: LeafPlan) -> LeafWire:
    """Return the wire of a table that stays sharded by columns."""
    sums = (wire.scatter_dtype or plan.dtype) if plan.trainable else None
    return wire._replace(dim=None, form=TableForm(plan.tensor, sums))


def step_key(
    config: StrategyConfig,
    step: jax.Array | None,
    rng: jax.Array | None,
    micro_batch: ArrayLike,
    device: ArrayLike | None = None,
    *,
    row_numbers: Callable[[], ArrayLike] | None = None,
) -> jax.Array | None:
    """Return a different key for each step, micro-batch, and device along the data axes (by default
    this device); None outside of training.

    A loss of one row (`PerRow`) gets a key for each row instead, [rows].

    Args:
      config: of the step.
      step: the number of the step; None outside of training.
      rng: the key data of the state.
      micro_batch: the number of the micro-batch.
      device: the number of the device.
      row_numbers: returns the numbers of the rows in the global batch, [rows].
    """
    if step is None or rng is None or not takes_rng(config.loss.loss_fn):
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    if isinstance(config.loss.loss_fn, PerRow) and row_numbers is not None:
        if device is None and config.axes.positions:  # each share of the positions draws its own
            key = jax.random.fold_in(key, jax.lax.axis_index(config.axes.positions))
        return row_keys(key, jnp.asarray(row_numbers()))
    if device is None:
        device = jax.lax.axis_index((*config.axes.rows, *config.axes.positions))
    return jax.random.fold_in(jax.random.fold_in(key, device), micro_batch)
