"""One way to lay a model out over chips, and what each device then holds of it: the strategies' own rules, without a device."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from shardopt.core.block_model import BlockModel
from shardopt.core.errors import plural
from shardopt.core.types import PyTree, Rules
from shardopt.engine.config import PLACEMENTS, Placement, StrategyConfig
from shardopt.engine.layout import make_layout
from shardopt.engine.owned_update import layout_bytes
from shardopt.mesh import spec_axes
from shardopt.partition import COLUMNS, LayoutBytes, LeafPlan, ShardAxes, plan_leaves, shard_axes, state_specs
from shardopt.partition.report import num_shards
from shardopt.pipeline import Schedule, schedules
from shardopt.planning.workload import Recompute, Workload

CHUNKED = ("interleaved", "looped_breadth_first", "zero_bubble", "zero_bubble_lockstep")
"""Schedules that take several chunks a stage."""

ON_A_V = ("zero_bubble_v", "dual_pipe_v")
"""Schedules that have two chunks a stage, on a V."""

IN_LOCKSTEP = ("gpipe", "eager_one_f_one_b", "interleaved", "looped_breadth_first", "zero_bubble_lockstep")
"""Schedules that put the same passes on all stages in a tick; the others send their messages ahead."""


class Searched(NamedTuple):
    """What `so.schedules.search` is told.

    Attributes:
      forward: seconds of a stage's forward of a micro-batch, [S].
      backward: of the gradient of its input, [S].
      weight: of the gradient of its weights, [S].
      communication: of a message.
      memory: the most activations on a stage.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    communication: float
    memory: int


class Layout(NamedTuple):
    """What `so.make_mesh` and `so.hybrid` are told, as plain values.

    Attributes:
      replica: copies of the shards.
      data: devices that the batch is spread over, times replica.
      pipeline: stages.
      tensor: devices that share every block.
      placement: what is sharded over data: "ddp", "zero1", "zero2" or "fsdp".
      micro_batches: parts of a device's rows that are worked on one after another.
      schedule: name of a builder in `so.schedules`; None without a pipeline.
      chunks: virtual stages per stage.
      remat: whether the backward pass runs forwards again; "save:NAME,..." all but the values of these names.
      gather_dtype: dtype in which fsdp gathers weights; None is their own.
      scatter_dtype: dtype in which all but ddp reduce-scatter gradients; None is that of the weights.
      context: devices that share the positions of every row.
      expert: devices that share the experts, and have rows each.
      searched: what the schedule "search" is found for; None for any other.
      regather: whether fsdp in a pipeline gathers a block in every pass, rather than once a step.
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
    searched: Searched | None = None
    regather: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size, outermost first; expert and context where they are above 1."""
        sizes = {"replica": self.replica, "data": self.data, "pipeline": self.pipeline}
        sizes |= {axis: size for axis, size in (("expert", self.expert), ("context", self.context)) if size > 1}
        return sizes | {"tensor": self.tensor}

    @property
    def num_chips(self) -> int:
        """The product of the sizes."""
        return math.prod(self.sizes.values())

    @property
    def pieces(self) -> int:
        """Into how many parts a batch is cut before one is worked on; a part may be that of a row's positions."""
        return self.replica * self.data * self.expert * self.context * self.micro_batches

    @property
    def shards(self) -> ShardAxes:
        """What a placement shards over."""
        return shard_axes(self.sizes)

    def table(self) -> Schedule | None:
        """Return the schedule's table; None without a pipeline."""
        if self.schedule is None:
            return None
        return _table(self.schedule, self.pipeline, self.micro_batches, self.chunks, self.searched)

    def builder(self) -> Callable[[int, int], Schedule]:
        """Return what `so.hybrid` takes as schedule."""
        return _builder(self.schedule or "eager_one_f_one_b", self.chunks, self.searched)

    def strategy(self, rules: Rules, expert_leaves: Sequence[str] = ()) -> dict[str, Any]:
        """Return keyword arguments of `so.hybrid`, with the tensor rules and leaves of experts where these axes are above 1."""
        wire: dict[str, Any] = {"gather_dtype": self.gather_dtype} if self.placement == "fsdp" else {}
        if self.scatter_dtype is not None:
            wire["scatter_dtype"] = self.scatter_dtype
        if not self.regather:
            wire["regather"] = False
        if self.expert > 1:
            wire["expert_leaves"] = tuple(expert_leaves)
        return {
            "schedule": self.builder(),
            "micro_batches": self.micro_batches,
            "placement": self.placement,
            "remat": self.remat,
            "rules": rules if self.tensor > 1 else (),
            **wire,
        }

    def __str__(self) -> str:
        """Return `data=64 tensor=8, fsdp, 4 micro-batches, remat`."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one chip"
        words = [axes, self.placement + ("" if self.regather else " gathered once")]
        if self.schedule is not None:
            words.append(
                self.schedule + (f" x {self.chunks}" if self.chunks > 1 and self.schedule not in ON_A_V else "")
            )
            words += [f"at most {plural(self.searched.memory, 'activation')}"] if self.searched is not None else []
            words += ["sent ahead"] if self.schedule not in IN_LOCKSTEP else []
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        return ", ".join([*words, *(["remat" if self.remat is True else self.remat] if self.remat else [])])


@functools.lru_cache(maxsize=512)
def _table(name: str, num_stages: int, num_micro_batches: int, chunks: int, searched: Searched | None) -> Schedule:
    return _builder(name, chunks, searched)(num_stages, num_micro_batches)


def _builder(name: str, chunks: int, searched: Searched | None) -> Callable[[int, int], Schedule]:
    make = getattr(schedules, name)
    if searched is not None:
        make = functools.partial(make, **searched._asdict())
    elif name in CHUNKED:
        make = functools.partial(make, num_chunks=chunks)
    return make if name in IN_LOCKSTEP else schedules.send_ahead(make)


class Elements(NamedTuple):
    """How many numbers of the parameters are on a device once tensor and pipeline have cut them.

    Attributes:
      sharded_blocks: of blocks, in leaves that data can shard.
      replicated_blocks: of blocks, in leaves that stay replicated over data.
      sharded_outer: of the outer parameters, likewise.
      replicated_outer: likewise.
      largest_outer: of the largest outer leaf that data can shard, tables left out.
      loss_outer: of the outer leaves that data can shard and the loss reads.
      largest_loss: of the largest of these.
      tables: of the outer leaves that data shards by columns, for lookups.
      experts: of blocks, in leaves of experts once the expert axis has cut them; data (and context) shards them.
      expert: size of that axis.
      at_experts: of blocks, in leaves of experts that data shards, whether there is such an axis or not.
    """

    sharded_blocks: int
    replicated_blocks: int
    sharded_outer: int
    replicated_outer: int
    largest_outer: int
    loss_outer: int
    largest_loss: int
    tables: int
    experts: int = 0
    expert: int = 1
    at_experts: int = 0

    def blocks(self, data: int = 1) -> float:
        """Return those of blocks on one of `data` devices, those of the expert axis among them."""
        return self.sharded_blocks / data + self.replicated_blocks + self.experts / max(1, data // self.expert)

    def outer(self, data: int = 1) -> float:
        """Return those of the outer parameters on one of `data` devices."""
        return self.sharded_outer / data + self.replicated_outer

    def total(self, data: int = 1) -> float:
        """Return all of them on one of `data` devices."""
        return self.blocks(data) + self.outer(data)


class PlacedModel(NamedTuple):
    """A workload under a layout.

    Attributes:
      workload: the model.
      layout: mesh sizes, placement, schedule, micro-batches.
      elements: numbers on a device before data shards anything.
      params: bytes of parameters that a device holds.
      opt_state: bytes of optimizer state that a device holds.
      itemsize: bytes of a parameter.
      shards: what the placement shards.
    """

    workload: Workload
    layout: Layout
    elements: Elements
    params: int
    opt_state: int
    itemsize: int
    shards: Placement

    @property
    def gathered_itemsize(self) -> int:
        """Bytes of a parameter as it is gathered."""
        dtype = self.layout.gather_dtype
        return self.itemsize if dtype is None else jnp.dtype(dtype).itemsize

    @property
    def scattered_itemsize(self) -> int:
        """Bytes of a gradient as it is reduce-scattered."""
        dtype = self.layout.scatter_dtype
        return self.itemsize if dtype is None else jnp.dtype(dtype).itemsize

    @property
    def recompute(self) -> Recompute | None:
        """What the backward pass runs again of a block; None for nothing."""
        return self.workload.recompute(self.layout.remat)

    @property
    def keeps_products(self) -> bool:
        """Whether blocks keep no elementwise results for the backward pass: so do fsdp and pipelines."""
        return self.shards.params or self.layout.pipeline > 1

    @property
    def num_blocks(self) -> int:
        """Blocks on a stage."""
        return self.workload.num_blocks // self.layout.pipeline


def abstract_opt_state(workload: Workload, tx: optax.GradientTransformation | None = None) -> PyTree:
    """Return shapes and dtypes of the optimizer state: those of `tx.init`, whatever the optimizer; by default AdamW's."""
    return jax.eval_shape((optax.adamw(1e-3) if tx is None else tx).init, workload.params)


class _Sizes(NamedTuple):
    """What the placement rules read of a mesh."""

    shape: Mapping[str, int]


def place(
    workload: Workload, layout: Layout, opt_state: PyTree, *, min_shard_elements: int = 1024, tiled: bool = False
) -> PlacedModel:
    """Return the bytes of parameters and optimizer state on each device, exactly as strategies place them.

    A TPU stores arrays in tiles (`tiled`).
    """
    mesh = cast(Mesh, _Sizes(layout.sizes))
    placement = PLACEMENTS[layout.placement]
    tables = workload.tables if placement.params and layout.shards.size > 1 and layout.pipeline == 1 else ()
    tree = plan_leaves(
        workload.params,
        who="plan",
        mesh=mesh,
        rules=workload.rules if layout.tensor > 1 else (),
        stacked=True,
        pipelined=layout.pipeline > 1,
        min_shard_elements=min_shard_elements if placement.opt_state else 1,
        is_trainable=lambda path: True,
        tables=tables,
        expert_leaves=() if workload.experts is None else workload.experts.leaves,
    )
    plans: list[LeafPlan] = jax.tree.leaves(tree)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(workload.params)]
    specs = state_specs(
        opt_state,
        list(zip(paths, plans, strict=True)),
        sharded=placement.opt_state,
        axes=layout.shards,
        sizes=layout.sizes,
        min_shard_elements=min_shard_elements,
    )
    held = functools.partial(_device_bytes, sizes=layout.sizes, tiled=tiled)
    return PlacedModel(
        workload=(workload.tiled if layout.context > 1 else workload).over_experts(layout.expert, layout.tensor),
        layout=layout,
        elements=_elements(plans, mesh, workload, tables),
        params=held(workload.params, [plan.spec(sharded=placement.params) for plan in plans]),
        opt_state=held(opt_state, jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))),
        itemsize=jnp.dtype(plans[0].dtype).itemsize,
        shards=placement,
    )


def state_layout_bytes(
    workload: Workload, layout: Layout, tx: optax.GradientTransformation, *, min_shard_elements: int = 1024
) -> LayoutBytes | None:
    """Return what an optimizer's work on matrices sends with either `opt_state_layout`; None where there is none to send."""
    nothing = lambda *args: args[-1]  # noqa: E731
    model = BlockModel(nothing, nothing, nothing)  # it is not run
    config = StrategyConfig(
        "plan",
        tx,
        cast(Mesh, _Sizes(layout.sizes)),
        model,
        PLACEMENTS[layout.placement],
        rules=workload.rules if layout.tensor > 1 else (),
        min_shard_elements=min_shard_elements,
        expert_leaves=() if workload.experts is None else workload.experts.leaves,
        schedule=layout.table(),
    )
    return layout_bytes(config, make_layout(config, workload.params))


def _elements(plans: list[LeafPlan], mesh: Mesh, workload: Workload, tables: tuple[str, ...]) -> Elements:
    of_experts = () if workload.experts is None else workload.experts.leaves
    sizes = {plan.path: math.prod(plan.shape) // num_shards(plan.spec(sharded=False), mesh) for plan in plans}

    def counts(*, stacked: bool, sharded: bool) -> list[int]:
        return [
            sizes[plan.path]
            for plan in plans
            if plan.stacked is stacked and not plan.experts and (plan.dim is not None) is sharded
        ]

    looked_up = [plan.path for plan in plans if plan.path in tables and plan.dim == COLUMNS]
    others = [plan for plan in plans if not plan.stacked and plan.dim is not None and plan.path not in looked_up]
    at_loss = [sizes[plan.path] for plan in plans if plan.path in workload.loss_reads and plan.dim is not None]
    at_experts = [
        sizes[plan.path]
        for plan in plans
        if plan.dim is not None and any(re.search(pattern, plan.path) for pattern in of_experts)
    ]
    return Elements(
        sharded_blocks=sum(counts(stacked=True, sharded=True)),
        replicated_blocks=sum(counts(stacked=True, sharded=False)),
        sharded_outer=sum(counts(stacked=False, sharded=True)),
        replicated_outer=sum(counts(stacked=False, sharded=False)),
        largest_outer=max((sizes[plan.path] for plan in others), default=0),
        loss_outer=sum(at_loss),
        largest_loss=max(at_loss, default=0),
        tables=sum(sizes[path] for path in looked_up),
        experts=sum(sizes[plan.path] for plan in plans if plan.experts),
        expert=mesh.shape.get("expert", 1),
        at_experts=sum(at_experts),
    )


def _device_bytes(tree: PyTree, specs: list[PartitionSpec], *, sizes: Mapping[str, int], tiled: bool) -> int:
    total = 0
    for leaf, spec in zip(jax.tree.leaves(tree), specs, strict=True):
        cuts = [math.prod(sizes[axis] for axis in spec_axes((entry,))) for entry in spec]
        shape = tuple(dim // cut for dim, cut in itertools.zip_longest(leaf.shape, cuts, fillvalue=1))
        size = leaf.dtype.itemsize
        total += stored_bytes(shape, size) if tiled else math.prod(shape) * size
    return total


_LANES, _SUBLANES, _FLAT = 128, 8, 1024


@functools.lru_cache(maxsize=4096)
def stored_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of an array (the part that a chip holds) in a TPU's memory, its tiles filled up.

    XLA:TPU stores two dims in tiles of 8 x 128 numbers (1, 2 or 4 x 128 where the first has no more), chooses the two that
    waste least, and flat arrays in tiles of up to 1024. Read off its layouts, and equal to them byte for byte in every
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
        count // (rows * lanes) * _round_up(rows, min(_SUBLANES, _power_of_two(rows))) * _round_up(lanes, _LANES)
        for rows, lanes in itertools.permutations(shape, 2)
    )


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _power_of_two(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << max(size - 1, 0).bit_length()
