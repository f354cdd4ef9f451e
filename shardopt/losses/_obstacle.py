"""The reason why the devices of a strategy cannot run its loss on their own rows, and the remedies."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from shardopt.collectives._per_device import TENSOR
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core import (
    Arrays,
    NotSeparableError,
    PyTree,
    abstract,
    format_error,
    leaves_with_paths,
    plural,
)
from shardopt.core._block_model import abstract_key, call
from shardopt.losses._batch_dims import num_rows, resized, row_dims, sequence_dim
from shardopt.losses._explain import explained
from shardopt.losses._operation_text import operation_line, operation_name
from shardopt.losses._per_row import PerRow
from shardopt.losses._rows import row_context, with_rows
from shardopt.losses._separable import Cut, LossCall, Mixing, find_mixing
from shardopt.mesh import analysis, on_mesh
from shardopt.partition import LeafPlan
from shardopt.separability._dependence import leaves_used
from shardopt.separability._relations import Operation
from shardopt.trace._marks import EXPERTS


class Obstacle(NamedTuple):
    """The reason why devices cannot run a loss on their own rows.

    Attributes:
      problem: a sentence.
      lines: the operations that cause it, with their source lines.
      fix: the remedies.
      operation: the operation that mixes rows; "" if it is not known.
      cause: the error of a loss that cannot be traced on a piece.
    """

    problem: str
    lines: tuple[str, ...]
    fix: str
    operation: str
    cause: Exception | None = None

    def error(self, config: StrategyConfig) -> Exception:
        """Return the error of a strategy without a global view: the error of shardopt on a piece,
        else a `NotSeparableError`.
        """
        if self.cause is not None and "\nFix: " in str(self.cause):
            return self.cause
        no_view = "" if config.schedule is None else "a mesh with pipeline=1; or "
        wire = config.wire
        if not no_view and (wire.reducer is not None or wire.scatter_dtype is not None):
            no_view = "no reducer; or "
        fix = f"{no_view or GLOBAL}{self.fix}"
        return NotSeparableError(
            format_error(config.strategy, self.problem, self.lines, fix), operation=self.operation
        )


GLOBAL = 'view="global", which is exact for every loss; or '
FIX = (
    "so.per_row(a loss of one row), which needs no proof; so.losses.gather_batch,"
    " so.losses.batch_mean or so.losses.batch_sum for what a row needs of the whole batch, and"
    " so.losses.Weighted for a normaliser that depends on the rows; or view='unproved' if you know"
    " better."
)
FIX_ROW = (
    "a loss of a row without it, see so.per_row; or view='unproved' if you know that the mean over"
    " rows is exact."
)
FIX_POSITIONS = (
    "so.nn.attention for what a position needs of the others, and so.nn.positions for its index;"
    " inputs and targets as leaves of their own rather than shifted in the loss; a mesh with"
    " context=1; or view='unproved' if you know better."
)


def find_obstacle(
    config: StrategyConfig, layout: Layout, batch: PyTree, *, training: bool
) -> Obstacle | None:
    """Return why devices cannot run the loss of a strategy on their own rows.

    None if it is proved, or with `view="unproved"`.

    Args:
      config: the config of the step; for evaluation, its `of_evaluation`.
      layout: the layout of the parameters.
      batch: a global batch; only its shapes count.
      training: whether the loss is differentiated, and gets a random key if it takes one.
    """
    configs = [config]
    # during warmup the replicas share one gradient
    if config.local_updates is not None and config.local_updates.warmup_steps:
        configs.append(config._replace(sync_gradients=True))
    for phase_config in configs:
        if phase_config.num_pieces == 1 or phase_config.loss.separable:
            continue
        with explained(phase_config.replace(view="per_device")):
            obstacle = _find_obstacle(phase_config, layout, batch, training=training)
        if obstacle is not None:
            return obstacle
    return None


def _find_obstacle(
    config: StrategyConfig, layout: Layout, batch: PyTree, *, training: bool
) -> Obstacle | None:
    axes = config.axes
    loss_call = LossCall(
        caller=config.strategy,
        key=abstract_key(config.loss.loss_fn) if training else None,
        training=training,
        axis_sizes={axis: size for axis, size in axes.sizes.items() if axis != TENSOR or size == 1},
    )
    find = functools.partial(
        on_mesh(config.mesh, find_mixing), config.loss.loss_fn, as_gathered(config, layout)
    )
    replicas = axes.num_all_row_shares // axes.num_row_shares
    replica_batch = resized(
        config, abstract(batch), rows=max(1, num_rows(config, batch) // replicas)
    )
    if any(plan.experts for plan in layout.plans) and axes.sizes["expert"] > 1:
        obstacle = _find_stray_expert_use(config, layout, loss_call, replica_batch)
        if obstacle is not None:
            return obstacle
    if axes.num_position_shares > 1:
        dims = [
            sequence_dim(config, path, leaf.ndim) for path, leaf in leaves_with_paths(replica_batch)
        ]
        cut = Cut(axes.num_position_shares, dims, positions=axes.positions)
        mixing = find(replica_batch, cut, loss_call)
        if mixing is not None:
            text = f"positions, which {cut.pieces} devices along context share"
            return _obstacle_of(mixing, text, FIX_POSITIONS)
    with_context = dataclasses.replace(loss_call, context=row_context(config))
    for rows, pieces in _row_cuts(config, num_rows(config, replica_batch)):
        divided_batch = resized(
            config, replica_batch, rows=rows, position_shares=axes.num_position_shares
        )
        mixing = find(divided_batch, Cut(pieces, row_dims(config, replica_batch)), with_context)
        if mixing is not None:
            fix = FIX_ROW if isinstance(config.loss.loss_fn, PerRow) else FIX
            return _obstacle_of(mixing, _row_cut_text(config), fix)
    return None


def _row_cut_text(config: StrategyConfig) -> str:
    counts = {"devices": config.axes.num_shares, "micro-batches": config.loss.micro_batches}
    cut = " and ".join(f"{count} {unit}" for unit, count in counts.items() if count > 1)
    return f"rows, so {cut} could train on another"


def _obstacle_of(mixing: Mixing, cut: str, fix: str) -> Obstacle:
    problem = f"{mixing.result} is not shown to be a (weighted) mean over {cut}: {mixing.reason}"
    return Obstacle(problem, mixing.lines, fix, mixing.operation, mixing.cause)


def _row_cuts(config: StrategyConfig, rows: int) -> list[tuple[int, int]]:
    """Return pairs (rows, pieces): the loss of so many rows must be the mean of the losses of so
    many pieces.

    Rows that do not fill all pieces are evaluated as equal pieces and single rows
    (`evaluate.Totals`). Then two losses must be means over single rows: the loss of all rows, and
    the loss of a piece.
    """
    pieces, size = config.pieces_of(rows)
    cuts = [(rows, pieces)]
    if rows != pieces * size:
        cuts = [(rows, rows), (size, size)]
    return [cut for cut in cuts if cut[1] > 1]


def _find_stray_expert_use(
    config: StrategyConfig, layout: Layout, loss_call: LossCall, batch: PyTree
) -> Obstacle | None:
    """Return an obstacle if the loss uses experts outside of so.nn.mixture_of_experts: each device
    has other experts.
    """

    def traced_results(params: PyTree, batch: PyTree, key: jax.Array | None) -> Arrays:
        with analysis():
            return jax.tree.leaves(
                call(with_rows(row_context(config), config.loss.loss_fn), key, 0, params, batch)
            )

    axis_env = list(loss_call.axis_sizes.items())
    jaxpr = on_mesh(config.mesh, jax.make_jaxpr(traced_results, axis_env=axis_env))(
        as_gathered(config, layout), batch, loss_call.key
    )
    expert_leaves = [{i: None} if plan.experts else {} for i, plan in enumerate(layout.plans)]
    num_other_arguments = len(jaxpr.jaxpr.invars) - len(expert_leaves)
    first_uses = {
        leaf: use
        for used in leaves_used(
            jaxpr, [*expert_leaves, *[{}] * num_other_arguments], except_through=EXPERTS
        )
        for leaf, use in used.items()
    }
    if not first_uses:
        return None
    lines = [
        layout.plans[leaf].path + ("" if use is None else f": {operation_line(Operation(use))}")
        for leaf, use in sorted(first_uses.items())
    ]
    problem = (
        f"the loss uses {plural(len(first_uses), 'leaf')} of experts outside of"
        f" so.nn.mixture_of_experts, and each of {config.axes.sizes['expert']} devices along expert"
        " has its own experts."
    )
    fix = (
        "decay or clip weights in the optax chain; a mesh with expert=1; or view='unproved' if the"
        " loss sends tokens over expert itself."
    )
    operation = next(
        (operation_name(Operation(use)) for use in first_uses.values() if use is not None), ""
    )
    return Obstacle(problem, tuple(lines), fix, operation)


def as_gathered(config: StrategyConfig, layout: Layout) -> PyTree:
    """Return the parameters as the loss gets them."""

    def gathered(leaf: jax.ShapeDtypeStruct, plan: LeafPlan) -> jax.ShapeDtypeStruct:
        dtype = config.slots.wire(config.wire, plan).gather_dtype or leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    leaves = layout.treedef.flatten_up_to(layout.abstract.params)
    return layout.treedef.unflatten(
        [gathered(*pair) for pair in zip(leaves, layout.plans, strict=True)]
    )
