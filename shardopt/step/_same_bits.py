"""A step with the same bits on every mesh: rows run in tiles, and sums have one order.

Rows of the global batch are cut into tiles of `tile_rows`. The program of a tile is the same on
every mesh. Gradients of tiles are added in a binary tree, which depends on the number of tiles
alone: each device adds the tiles that it holds, then shards are exchanged, and the devices' sums are
added in the upper part of the tree.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.collectives import all_gather
from shardopt.collectives._buckets import shards_of
from shardopt.collectives._shards import all_to_all
from shardopt.config._axes import AxisTable
from shardopt.config._config import DDP, StrategyConfig
from shardopt.config._layout import Layout
from shardopt.config._slots import StepInputs, StepSlots
from shardopt.core import Arrays, PyTree, Weighted, calling, value_error, wide_zeros, widened
from shardopt.core._block_model import as_block_model
from shardopt.core._loss_parts import LossParts
from shardopt.losses._batch_dims import num_rows
from shardopt.losses._loss import loss_of_rows, step_key
from shardopt.losses._metrics import combined, factor, objective
from shardopt.losses._per_row import row_numbers
from shardopt.losses._sums import cut, leaf_wire, scale, sum_parts
from shardopt.remat._gathered_block import kept_by_jax
from shardopt.step._fenced import FencedUpdate, fenced, fenced_on_each
from shardopt.step._gradients import ExactSum, MicroBatches, PerDeviceView


def same_bits(config: StrategyConfig, slots: StepSlots) -> StepSlots:
    """Return the slots of a strategy with those filled that decide the order of sums.

    Raises:
      ValueError: if the bits would depend on the mesh.
    """
    _check(config)
    return slots._replace(
        differentiate={"per_device": PerDeviceView(Tiles(), sum_tiles)},
        reduce=lambda config, trained: TreeSum(),
        update=FencedUpdate(slots.update),
        # A value that is computed again may be fused otherwise on some meshes.
        remat=kept_by_jax,
    )


def _check(config: StrategyConfig) -> None:
    """Refuse a strategy whose bits would depend on the mesh."""
    cutting = [
        axis
        for axis in ("tensor", "pipeline", "context", "expert")
        if config.mesh_shape.get(axis, 1) > 1
    ]
    shares = config.axes.num_all_row_shares
    refused = {
        f"mesh axis {', '.join(map(repr, cutting))} cuts sums inside of a tile": bool(cutting),
        f"{shares} devices hold rows, and a tree of two branches needs 1, 2, 4, 8, ...": bool(
            shares & (shares - 1)
        ),
        "the partitioner orders the sums of view='global'": config.loss.view == "global",
        "replicas that train apart have another sum on each mesh": config.per_replica,
        "weights that a BlockModel rounds are gathered in 8 bits": config.gathers
        and bool(getattr(as_block_model(config.loss.loss_fn), "rounded", None)),
        "a cross-check adds the bits of each device's own gradient": config.sums,
    }
    problems = [problem for problem, holds in refused.items() if holds]
    if problems:
        fix = "use a mesh with the axes data and replica; or leave tile_rows out."
        with calling(config.strategy):
            raise value_error(
                "exact(tile_rows=...) cannot give the same bits on every mesh.", problems, fix
            )


class Tiles(MicroBatches):
    """The `DeviceLoss` of a device that differentiates one tile after another."""

    def gradients(
        self, config: StrategyConfig, layout: Layout, inputs: StepInputs
    ) -> tuple[Arrays, LossParts]:
        """Return the sums of gradients over the tiles of this device, and loss parts [tiles, ...]."""
        return _tiles(config, layout, inputs).gradients()

    def losses(self, config: StrategyConfig, layout: Layout, inputs: StepInputs) -> LossParts:
        """Return the loss parts of the tiles of this device, [tiles, ...]."""
        tiles = _tiles(config, layout, inputs)
        return _not_differentiated(tiles.losses)(tiles.inputs.params)


def _tiles(config: StrategyConfig, layout: Layout, inputs: StepInputs) -> "_Tiles":
    """Return the tiles of one device, for which parameters are gathered once."""
    # combinators and cross-checks change the config of a strategy that was checked
    _check(config)
    if config.gathers:
        wires = [leaf_wire(config.wire, plan) for plan in layout.plans]
        inputs = inputs._replace(params=all_gather(inputs.params, wires))
    return _Tiles(config.replace(placement=DDP, gather_dtype=None), layout, inputs)


@dataclasses.dataclass(frozen=True, eq=False)
class _Tiles:
    """The tiles of one device in one step."""

    config: StrategyConfig
    layout: Layout
    inputs: StepInputs

    def gradients(self) -> tuple[Arrays, LossParts]:
        params = self.inputs.params
        trained = self.layout.trained_leaves(params)
        weights = None
        if isinstance(jax.eval_shape(self.losses, params).loss.weight, tuple):
            weights = sum_tiles(self.losses(params), self.config.axes).loss.weight

        def loss_of(trained, tile, key):
            merged = self.layout.merge(params, trained)
            parts = loss_of_rows(self.config, self.layout, merged, tile, key)
            # Not divided by the number of devices: small gradients would be rounded.
            return objective(parts.loss, 1, weights), parts

        def run(index):
            grads, parts = self.run(jax.grad(loss_of, has_aux=True), trained, index)
            return [widened(grad) for grad in grads], parts

        return _sum_tree(run, wide_zeros(trained), self.count, 0)

    def losses(self, params: Arrays) -> LossParts:
        tree = self.layout.treedef.unflatten(params)

        def loss_of(tree, tile, key):
            return loss_of_rows(self.config, self.layout, tree, tile, key)

        return jax.lax.map(
            functools.partial(self.run, loss_of, tree), jnp.arange(self.count, dtype=jnp.int32)
        )

    @property
    def rows(self) -> int:
        rows = self.inputs.piece_rows or self.config.loss.tile_rows
        assert rows is not None
        return rows

    @property
    def count(self) -> int:
        return num_rows(self.config, self.inputs.batch) // self.rows

    def run(self, f: Callable[..., Any], params: PyTree, index: jax.Array) -> PyTree:
        """Return `f(params, tile, key)` of a tile of this device, as a program of its own."""
        config = self.config
        inputs = self.inputs
        leaves, assemble = cut(config, inputs.batch, self.count)
        tile = assemble([jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in leaves])
        number = jax.lax.axis_index(config.axes.rows) * self.count + index

        def numbers():
            return row_numbers(0, number, 1, self.rows)

        key = step_key(config, inputs.step, inputs.rng, number, 0, row_numbers=numbers)
        return fenced(f, params, tile, key)


def _not_differentiated(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the function, for optimizers that only evaluate the loss of a batch."""
    f = jax.custom_jvp(f)

    @f.defjvp
    def refuse(primals, tangents):
        problem = "the optimizer differentiates the loss itself, which does not add up in one tree."
        raise value_error(problem, fix="use another optimizer, or leave tile_rows out.")

    return f


def _sum_tree(
    run: Callable[[jax.Array], tuple[PyTree, PyTree]], zeros: PyTree, count: int, first: Any
) -> tuple[PyTree, PyTree]:
    """Return the sum of the first results of `run(first)`, ..., `run(first + count - 1)` in a
    binary tree, and the other results stacked [count, ...].

    An odd number of tiles at the bottom of the tree is added one after another.
    """
    if count == 1:
        total, parts = run(first)
        return total, jax.tree.map(lambda x: x[None], parts)
    # The tree of 8 tiles. Its shape depends on the number of tiles alone; devices only cut it:
    #
    #                 +                1 device adds all of it;
    #            /         \           2 devices add below this line,
    #          +             +         and `TreeSum` the top;
    #        /   \         /   \       4 devices add below this line,
    #       +     +       +     +      and `TreeSum` two levels.
    #      0 1   2 3     4 5   6 7
    branches = 2 if count % 2 == 0 else count
    size = count // branches

    def add(total, branch):
        part, parts = _sum_tree(run, zeros, size, first + branch * size)
        # not 0 + part, which changes -0
        return jax.tree.map(lambda x, y: jnp.where(branch == 0, y, x + y), total, part), parts

    # A scan in a scan, log2(count) deep: the program of a tile is compiled once, so all tiles have
    # its bits. Unrolled copies could be fused with their neighbours.
    total, parts = jax.lax.scan(add, zeros, jnp.arange(branches, dtype=jnp.int32))
    return total, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), parts)


def _sum_pairs(rows: jax.Array) -> jax.Array:
    """Return the sum of rows in a binary tree; further rows of 0 would not change it."""
    while rows.shape[0] > 1:
        if rows.shape[0] % 2:
            rows = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def sum_tiles(parts: LossParts, axes: AxisTable) -> LossParts:
    """Add parts [tiles of this device, ...] up over all tiles, which every device gathers."""

    def add(metric: Any) -> Any:
        # -0 + 0 is 0, so -0 would show how many zeros were added
        return combined(
            metric,
            lambda x: _sum_pairs(jnp.where(x == 0, jnp.zeros_like(x), x))[None],
            jnp.asarray,
            jnp.asarray,
        )

    def sum_all(parts):
        metrics = {name: add(metric) for name, metric in parts.metrics.items()}
        parts = LossParts(add(parts.loss), metrics, parts.updates)
        return sum_parts(parts, axes._replace(summed=()))

    return fenced(
        sum_all, jax.tree.map(lambda x: jax.lax.all_gather(x, axes.rows, tiled=True), parts)
    )


class TreeSum(ExactSum):
    """The `Reduce` that adds the sums of devices in the upper part of the tree.

    Each device keeps its shards of the sums, whatever the placement is.
    """

    def grad_specs(self, config: StrategyConfig, layout: Layout) -> list[PartitionSpec]:
        """Return how the sums are sharded."""
        return [plan.data_spec(sharded=True) for plan in layout.trained]

    def norm(self, config: StrategyConfig, leaves: Arrays, specs: list[PartitionSpec]) -> jax.Array:
        """Return the norm, which each device computes from whole gradients."""

        def norm(*leaves):
            return optax.tree.norm(list(map(widened, leaves)))

        return fenced_on_each(config, norm, leaves)

    def __call__(
        self,
        config: StrategyConfig,
        layout: Layout,
        grads: Arrays,
        loss: Weighted,
        state: PyTree,
        stored_order: Callable[[Arrays], Arrays],
    ) -> tuple[Arrays, PyTree]:
        """Return the gradients of the union batch; there is no state."""
        remaining_factor = factor(loss, 1)

        # Upper part of the tree. The axes of rows are (replica, data), so devices along data are
        # neighbours in the tree, and are added first.
        def mean(grad, plan):
            axes = config.axes.rows
            if plan.dim is not None:
                rows = shards_of(grad, plan.dim, jax.lax.axis_size(plan.axes))
                grad = _sum_pairs(all_to_all(rows, plan.axes, 0, 0))
                axes = tuple(axis for axis in axes if axis not in plan.shard_axes)
            if axes:
                grad = _sum_pairs(jax.lax.all_gather(grad, axes))
            # The dtype of the leaf comes last: all additions above it are in fp32 at least.
            return scale(grad, remaining_factor).astype(plan.dtype)

        return list(map(mean, grads, layout.trained)), state
