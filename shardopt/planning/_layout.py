"""`ParallelLayout`: one way to distribute a model over chips.

`place`: its bytes per device by the strategies' own rules.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from shardopt.config._config import PLACEMENTS, Placement, default_min_shard_elements
from shardopt.core import PyTree, Rules, calling
from shardopt.core._block_model import BLOCKS
from shardopt.low_precision._weight import wire_form
from shardopt.mesh import size_along, spec_axes
from shardopt.partition import (
    COLUMNS,
    LeafPlan,
    LeafPlanOptions,
    ShardAxes,
    plan_leaves,
    shard_axes,
    state_specs,
)
from shardopt.partition._report import num_shards
from shardopt.partition._rules import matches, patterns_of
from shardopt.pipeline import Schedule, schedules
from shardopt.pipeline._kinds import KINDS
from shardopt.planning._workload import Recompute, Workload
from shardopt.reducers import exact


class ParallelLayout(NamedTuple):
    """One way to distribute training: the arguments of `so.make_mesh` and `so.hybrid`, as plain
    values.

    Attributes:
      replica: size of the replica axis: copies of the shards.
      data: size of the data axis. The rows of a batch are divided over replica x data devices.
      pipeline: size of the pipeline axis: stages.
      tensor: size of the tensor axis: devices that share every block.
      placement: state that is sharded over data: "ddp", "zero1", "zero2" or "fsdp".
      micro_batches: number of parts that a device's rows are cut into; the device computes them one
        after another.
      schedule: name of a builder in `so.schedules`; None without a pipeline.
      chunks: virtual stages per stage.
      remat: whether the backward pass runs forwards again. "save:NAME,..." saves the values of
        these names.
      gather_dtype: dtype of the all-gathers of weights under fsdp; None is the dtype of the
        weights.
      scatter_dtype: dtype of the reduce-scatters of gradients, except under ddp; None is the dtype
        of the weights.
      context: size of the context axis: devices that share the positions of every row.
      expert: size of the expert axis: devices that share the experts. Each also has rows of its
        own.
    """

    replica: int = 1
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    placement: str = "fsdp"
    micro_batches: int = 1
    schedule: str | None = None
    chunks: int = 1
    remat: bool | str = False
    gather_dtype: DTypeLike | None = None
    scatter_dtype: DTypeLike | None = None
    context: int = 1
    expert: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size, outermost first; expert and context where they are above 1."""
        sizes = {"replica": self.replica, "data": self.data, "pipeline": self.pipeline}
        sizes |= {
            axis: size
            for axis, size in (("expert", self.expert), ("context", self.context))
            if size > 1
        }
        return sizes | {"tensor": self.tensor}

    @property
    def num_chips(self) -> int:
        """The product of the sizes."""
        return math.prod(self.sizes.values())

    @property
    def pieces(self) -> int:
        """The number of parts of a batch; a device computes one part at a time.

        Context cuts rows into positions.
        """
        return self.replica * self.data * self.expert * self.context * self.micro_batches

    @property
    def shards(self) -> ShardAxes:
        """The mesh axes that a placement shards over."""
        return shard_axes(self.sizes)

    def saves(self, name: str) -> bool:
        """Return whether `remat` saves the values of this name."""
        return isinstance(self.remat, str) and name in self.remat.removeprefix("save:").split(",")

    def table(self) -> Schedule | None:
        """Return the built schedule; None without a pipeline."""
        if self.schedule is None:
            return None
        return _table(self.schedule, self.pipeline, self.micro_batches, self.chunks)

    def builder(self) -> Callable[[int, int], Schedule]:
        """Return the builder that `so.hybrid` takes as `schedule`."""
        return _builder(self.schedule or "eager_one_f_one_b", self.chunks)

    def strategy(self, rules: Rules) -> dict[str, Any]:
        """Return keyword arguments of `so.hybrid`."""
        options: dict[str, Any] = {
            "schedule": self.builder(),
            "micro_batches": self.micro_batches,
            "placement": self.placement,
            "remat": self.remat,
            "rules": rules,
        }
        if self.placement == "fsdp":
            options["gather_dtype"] = self.gather_dtype
        if self.scatter_dtype is not None:
            options["reducer"] = exact(self.scatter_dtype)
        return options

    def __str__(self) -> str:
        """Return `data=64 tensor=8, fsdp, 4 micro-batches, remat`."""
        axes = (
            " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
            or "one chip"
        )
        words = [axes, self.placement]
        if self.schedule is not None:
            kind = KINDS[self.schedule]
            chunks = f" x {self.chunks}" if self.chunks > 1 and kind.takes_chunks else ""
            words.append(self.schedule + chunks)
            if not kind.in_lockstep:
                words.append("sent ahead")
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        if self.remat:
            words.append("remat" if self.remat is True else self.remat)
        return ", ".join(words)


@functools.lru_cache(maxsize=512)
def _table(name: str, num_stages: int, num_micro_batches: int, chunks: int) -> Schedule:
    return _builder(name, chunks)(num_stages, num_micro_batches)


def named_builder(name: str, chunks: int | None = None) -> Callable[[int, int], Schedule]:
    """Return the function of `so.schedules` with this name, for this many chunks."""
    builder = getattr(schedules, name)
    kind = KINDS[name]
    return (
        functools.partial(builder, num_chunks=chunks or kind.chunks)
        if kind.takes_chunks
        else builder
    )


def _builder(name: str, chunks: int) -> Callable[[int, int], Schedule]:
    builder = named_builder(name, chunks)
    return builder if KINDS[name].in_lockstep else schedules.send_ahead(builder)


class ElementCounts(NamedTuple):
    """Numbers of parameter elements on a device after tensor, pipeline and expert have split the
    leaves.

    Attributes:
      sharded_blocks: elements of block leaves that data can shard.
      replicated_blocks: elements of block leaves that stay replicated over data.
      sharded_outer: elements of outer leaves that data can shard.
      replicated_outer: elements of outer leaves that stay replicated over data.
      largest_outer: elements of the largest outer leaf that data can shard, without tables.
      loss_outer: elements of the outer leaves that data can shard and the loss reads.
      largest_loss: elements of the largest leaf in `loss_outer`.
      tables: elements of the outer leaves that data shards by columns, for lookups.
      rounded_blocks: elements among `sharded_blocks` that are gathered in 8 bits if blocks are
        gathered one at a time.
      expert_blocks: elements of expert leaves that the expert axis has split; data and context
        shard them further.
      expert_axis_size: size of the expert axis.
      data_sharded_experts: elements of expert leaves that data shards, with or without an expert
        axis.
    """

    sharded_blocks: int = 0
    replicated_blocks: int = 0
    sharded_outer: int = 0
    replicated_outer: int = 0
    largest_outer: int = 0
    loss_outer: int = 0
    largest_loss: int = 0
    tables: int = 0
    rounded_blocks: int = 0
    expert_blocks: int = 0
    expert_axis_size: int = 1
    data_sharded_experts: int = 0

    def blocks(self, data: int = 1) -> float:
        """Return the elements of blocks on one of `data` devices, expert leaves included."""
        experts = self.expert_blocks / max(1, data // self.expert_axis_size)
        return self.sharded_blocks / data + self.replicated_blocks + experts

    def outer(self, data: int = 1) -> float:
        """Return the elements of the outer parameters on one of `data` devices."""
        return self.sharded_outer / data + self.replicated_outer

    def total(self, data: int = 1) -> float:
        """Return all elements on one of `data` devices."""
        return self.blocks(data) + self.outer(data)


class PlacedModel(NamedTuple):
    """A workload under a layout.

    Attributes:
      workload: the model.
      layout: mesh sizes, placement, schedule, micro-batches.
      elements: elements on a device before data shards leaves.
      params: bytes of parameters that a device holds.
      opt_state: bytes of optimizer state that a device holds.
      itemsize: bytes of one element of the parameters.
      shards: whether the placement shards parameters, gradients and optimizer state.
    """

    workload: Workload
    layout: ParallelLayout
    elements: ElementCounts
    params: int
    opt_state: int
    itemsize: int
    shards: Placement

    @property
    def gathered_itemsize(self) -> int:
        """Bytes per element in all-gathers of weights."""
        dtype = self.layout.gather_dtype
        return self.itemsize if dtype is None else jnp.dtype(dtype).itemsize

    @property
    def scattered_itemsize(self) -> int:
        """Bytes per element in reduce-scatters of gradients."""
        dtype = self.layout.scatter_dtype
        return self.itemsize if dtype is None else jnp.dtype(dtype).itemsize

    @property
    def recompute(self) -> Recompute | None:
        """The work that the backward pass of a block runs again; None without remat."""
        return self.workload.recompute(self.layout.remat)

    @property
    def num_blocks(self) -> int:
        """Blocks on a stage."""
        return self.workload.num_blocks // self.layout.pipeline


def abstract_opt_state(
    workload: Workload, tx: optax.GradientTransformation | None = None
) -> PyTree:
    """Return shapes and dtypes of the optimizer state from `tx.init`; by default of AdamW."""
    return jax.eval_shape((optax.adamw(1e-3) if tx is None else tx).init, workload.params)


class _MeshShape(NamedTuple):
    """A mesh without devices: placement rules read its `shape` alone."""

    shape: Mapping[str, int]


@calling("plan")
def place(
    workload: Workload,
    layout: ParallelLayout,
    opt_state: PyTree,
    *,
    min_shard_elements: int | None = None,
    tiled: bool = False,
) -> PlacedModel:
    """Return the bytes of parameters and optimizer state on each device, exactly as strategies
    place them.

    Args:
      workload: the model.
      layout: mesh sizes, placement, schedule, micro-batches.
      opt_state: abstract optimizer state.
      min_shard_elements: smaller leaves stay replicated, as in strategies; None is their default.
      tiled: whether arrays are stored in tiles, as on a TPU.
    """
    mesh = cast(Mesh, _MeshShape(layout.sizes))
    placement = PLACEMENTS[layout.placement]
    min_shard_elements = min_shard_elements or default_min_shard_elements("tpu" if tiled else "")
    tables = (
        workload.tables
        if placement.params and layout.shards.size > 1 and layout.pipeline == 1
        else ()
    )
    options = LeafPlanOptions(
        rules=workload.rules,
        stacked=True,
        min_shard_elements=min_shard_elements if placement.opt_state else 1,
        is_trainable=lambda path: True,
        pipelined=layout.pipeline > 1,
        tables=tables,
    )
    plan_tree = plan_leaves(workload.params, mesh, options)
    plans: list[LeafPlan] = jax.tree.leaves(plan_tree)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(workload.params)]
    state_spec_tree = state_specs(
        opt_state,
        list(zip(paths, plans, strict=True)),
        sharded=placement.opt_state,
        axes=layout.shards,
        sizes=layout.sizes,
        min_shard_elements=min_shard_elements,
    )
    device_bytes = functools.partial(_device_bytes, sizes=layout.sizes, tiled=tiled)
    return PlacedModel(
        workload=(workload.tiled if layout.context > 1 else workload).over_experts(
            layout.expert, layout.tensor
        ),
        layout=layout,
        elements=_elements(plans, mesh, workload, tables),
        params=device_bytes(
            workload.params, [plan.spec(sharded=placement.params) for plan in plans]
        ),
        opt_state=device_bytes(opt_state, jax.tree.leaves(state_spec_tree)),
        itemsize=jnp.dtype(plans[0].dtype).itemsize,
        shards=placement,
    )


def _elements(
    plans: list[LeafPlan], mesh: Mesh, workload: Workload, tables: tuple[str, ...]
) -> ElementCounts:
    expert_patterns = patterns_of(workload.rules, "experts")

    def size(plan: LeafPlan) -> int:
        """Return the elements of a leaf on a device, before data shards it."""
        return math.prod(plan.shape) // num_shards(plan.spec(sharded=False), mesh)

    def is_table(plan: LeafPlan) -> bool:
        return plan.path in tables and plan.dim == COLUMNS

    def sharded(selects: Callable[[LeafPlan], bool]) -> list[int]:
        """Return the sizes of the selected leaves that data can shard."""
        return [size(plan) for plan in plans if plan.dim is not None and selects(plan)]

    without_experts = Counter[tuple[bool, bool]]()  # by whether stacked, and whether data shards it
    for plan in plans:
        if not plan.experts:
            without_experts[plan.stacked, plan.dim is not None] += size(plan)
    outer = sharded(lambda plan: not plan.stacked and not is_table(plan))
    loss = sharded(lambda plan: plan.path in workload.loss_reads)
    return ElementCounts(
        sharded_blocks=without_experts[True, True],
        replicated_blocks=without_experts[True, False],
        sharded_outer=without_experts[False, True],
        replicated_outer=without_experts[False, False],
        largest_outer=max(outer, default=0),
        loss_outer=sum(loss),
        largest_loss=max(loss, default=0),
        tables=sum(sharded(is_table)),
        rounded_blocks=sum(size(plan) for plan in plans if _is_rounded(plan, workload)),
        expert_blocks=sum(size(plan) for plan in plans if plan.experts),
        expert_axis_size=mesh.shape.get("expert", 1),
        data_sharded_experts=sum(sharded(lambda plan: matches(expert_patterns, plan.path))),
    )


def _is_rounded(plan: LeafPlan, workload: Workload) -> bool:
    """Return whether fsdp gathers the weight in 8 bits."""
    rounding = workload.rounded.get(plan.path.removeprefix(f"{BLOCKS}/"))
    if not plan.stacked:
        return False
    block = plan.of_block()
    return wire_form(block.dim, block.tensor, rounding) is not None


def _device_bytes(
    tree: PyTree, specs: list[PartitionSpec], *, sizes: Mapping[str, int], tiled: bool
) -> int:
    total = 0
    for leaf, spec in zip(jax.tree.leaves(tree), specs, strict=True):
        divisors = [size_along(sizes, spec_axes((entry,))) for entry in spec]
        shape = tuple(
            dim // divisor
            for dim, divisor in itertools.zip_longest(leaf.shape, divisors, fillvalue=1)
        )
        size = leaf.dtype.itemsize
        total += stored_bytes(shape, size) if tiled else math.prod(shape) * size
    return total


_LANES = 128
_SUBLANES = 8
_FLAT = 1024


@functools.lru_cache(maxsize=4096)
def stored_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of an array, or of one chip's shard, in a TPU's memory with the padding of
    its tiles.

    XLA:TPU stores two dims in tiles of 8 x 128 numbers, or k x 128 if the first dim has only k = 1,
    2 or 4. It chooses the two dims that waste least. Flat arrays are stored in tiles of up to 1024.
    These rules come from the layouts that XLA:TPU writes. They agree byte for byte with every
    compile of `benchmarks/pod.py`.

    Example:
      >>> stored_bytes((50257, 12), 4) == 50304 * 16 * 4
      True
    """
    count = math.prod(shape)
    if len(shape) < 2:
        return _round_up(count, max(_LANES, min(_FLAT, _power_of_two(count)))) * itemsize
    if count == 0:
        return 0
    return itemsize * min(
        count
        // (rows * lanes)
        * _round_up(rows, min(_SUBLANES, _power_of_two(rows)))
        * _round_up(lanes, _LANES)
        for rows, lanes in itertools.permutations(shape, 2)
    )


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
