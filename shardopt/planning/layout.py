"""One way to lay a model out over chips: sizes of the mesh axes, placement, schedule, micro-batches."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.types import PyTree
from shardopt.engine.config import PLACEMENTS, Placement
from shardopt.partition import LeafPlan, plan_leaves, state_specs
from shardopt.partition.report import device_bytes, shards
from shardopt.pipeline import Schedule, schedules
from shardopt.planning.workload import Workload

CHUNKED = ("interleaved", "zero_bubble_lockstep")
"""Schedules that take several chunks a stage."""


class Layout(NamedTuple):
    """What `so.make_mesh` and `so.hybrid` are told, as plain values.

    Attributes:
      replica: copies of the shards.
      data: devices that the batch is spread over, times replica.
      pipeline: stages.
      tensor: devices that share every block.
      placement: what is split over data: "ddp", "zero1", "zero2" or "fsdp".
      micro_batches: parts of a device's rows that are worked on one after another.
      schedule: name of a builder in `so.schedules`; None without a pipeline.
      chunks: virtual stages a stage.
      remat: whether the backward pass runs forwards again.
      gather_dtype: dtype in which fsdp gathers weights; None is their own.
    """

    replica: int = 1
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    placement: str = "fsdp"
    micro_batches: int = 1
    schedule: str | None = None
    chunks: int = 1
    remat: bool = False
    gather_dtype: Any = None

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size, outermost first."""
        return {"replica": self.replica, "data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}

    @property
    def num_chips(self) -> int:
        """The product of the sizes."""
        return math.prod(self.sizes.values())

    @property
    def pieces(self) -> int:
        """Into how many parts the rows of a batch are cut before one is worked on."""
        return self.replica * self.data * self.micro_batches

    def table(self) -> Schedule | None:
        """Return the schedule's table; None without a pipeline."""
        if self.schedule is None:
            return None
        return _table(self.schedule, self.pipeline, self.micro_batches, self.chunks)

    def builder(self) -> Callable[[int, int], Schedule]:
        """Return what `so.hybrid` takes as schedule."""
        make = getattr(schedules, self.schedule or "eager_one_f_one_b")
        return functools.partial(make, num_chunks=self.chunks) if self.schedule in CHUNKED else make

    def strategy(self, rules: Any) -> dict[str, Any]:
        """Return keyword arguments of `so.hybrid`, with the tensor rules of the model where tensor is above 1."""
        gather = {"gather_dtype": self.gather_dtype} if self.placement == "fsdp" else {}
        return {
            "schedule": self.builder(),
            "micro_batches": self.micro_batches,
            "placement": self.placement,
            "remat": self.remat,
            "rules": rules if self.tensor > 1 else (),
            **gather,
        }

    def __str__(self) -> str:
        """Return `data=64 tensor=8, fsdp bfloat16, 4 micro-batches, remat`."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one chip"
        words = [axes, self.placement]
        if self.schedule is not None:
            words.append(self.schedule + (f" x {self.chunks}" if self.chunks > 1 else ""))
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        return ", ".join([*words, *(["remat"] if self.remat else [])])


@functools.lru_cache(maxsize=512)
def _table(name: str, num_stages: int, num_micro_batches: int, chunks: int) -> Schedule:
    more = {"num_chunks": chunks} if name in CHUNKED else {}
    return getattr(schedules, name)(num_stages, num_micro_batches, **more)


# Every layout worth a look: divisors of the chips for the axes, and what goes with them.


MAX_TENSOR = 64
MAX_PIPELINE = 64
MAX_MICRO_BATCHES = 64


def layouts(
    workload: Workload,
    *,
    chips: int,
    batch_size: int,
    slices: int,
    replicas: Sequence[int],
    placements: Sequence[str],
    schedules: Sequence[str],
    remat: Sequence[bool],
    gather_dtype: Any,
) -> Iterator[Layout]:
    """Yield the layouts of `chips` chips whose sizes divide what they have to.

    Tensor and pipeline take powers of two (or the chips' own small divisors) up to 64, stages divide the blocks, data
    takes the rest. Micro-batches are powers of two that leave a device at least a row; a pipeline gets at least as many as stages.
    """
    for tensor in _divisors(chips // slices, MAX_TENSOR if any(workload.tensor_sums) else 1):
        for pipeline in _divisors(chips // slices // tensor, MAX_PIPELINE):
            if workload.num_blocks % pipeline:
                continue
            rest = chips // tensor // pipeline
            for replica in replicas:
                data = rest // replica
                if rest % replica or batch_size % rest:
                    continue
                sizes = {"replica": replica, "data": data, "pipeline": pipeline, "tensor": tensor}
                rows = batch_size // rest
                for micro_batches, placement, schedule, again in _ways(
                    workload, sizes, rows, placements, schedules, remat
                ):
                    for chunks in _chunks(workload, pipeline, micro_batches, schedule):
                        yield Layout(
                            **sizes,
                            placement=placement,
                            micro_batches=micro_batches,
                            schedule=schedule,
                            chunks=chunks,
                            remat=again,
                            gather_dtype=gather_dtype if placement == "fsdp" else None,
                        )


def _ways(
    workload: Workload,
    sizes: dict[str, int],
    rows: int,
    placements: Sequence[str],
    schedules: Sequence[str],
    remat: Sequence[bool],
) -> Iterator[tuple[int, str, str | None, bool]]:
    pipeline = sizes["pipeline"]
    for micro_batches in _powers(rows, MAX_MICRO_BATCHES):
        if pipeline > 1 and micro_batches < pipeline:
            continue
        for placement in placements if sizes["data"] > 1 else ("ddp",):
            for schedule in schedules if pipeline > 1 else (None,):
                for again in remat:
                    yield micro_batches, placement, schedule, again


def _chunks(workload: Workload, pipeline: int, micro_batches: int, schedule: str | None) -> list[int]:
    if schedule not in CHUNKED:
        return [1]
    several = [2] if workload.num_blocks % (2 * pipeline) == 0 and micro_batches % pipeline == 0 else []
    return several if schedule == "interleaved" else [1, *several]


def _divisors(count: int, most: int) -> list[int]:
    """Powers of two that divide a count, and its other divisors up to 8."""
    return [n for n in range(1, min(count, most) + 1) if count % n == 0 and (n & (n - 1) == 0 or n <= 8)]


def _powers(count: int, most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most and count % (1 << i) == 0]


# Where the leaves of a workload live under a candidate: the strategies' own rules, asked without a device.


# How a TPU stores arrays: in tiles, which thin shards do not fill.


_LANES, _SUBLANES, _FLAT = 128, 8, 1024


@functools.lru_cache(maxsize=4096)
def stored_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of an array in a TPU's memory, its tiles filled up.

    XLA:TPU stores two dims in tiles of 8 x 128 numbers (1, 2 or 4 x 128 where the first has no more), chooses the two that
    waste least, and flat arrays in tiles of up to 1024. Read off its layouts, and equal to them byte for byte in every
    compile of `benchmarks/pod.py`.

    Args:
      shape: of the part that a chip holds.
      itemsize: bytes of a number.

    Example:
      >>> stored_bytes((50257, 12), 4) == 50304 * 16 * 4
      True
    """
    if len(shape) < 2:
        tile = max(_LANES, min(_FLAT, _power(math.prod(shape))))
        return _up(math.prod(shape), tile) * itemsize
    count, ways = math.prod(shape), itertools.permutations(shape, 2)
    if count == 0:
        return 0
    return (
        min(
            count // (rows * lanes) * _up(rows, min(_SUBLANES, _power(rows))) * _up(lanes, _LANES)
            for rows, lanes in ways
        )
        * itemsize
    )


def stored_device_bytes(leaves: PyTree, specs: PyTree, sizes: dict[str, int]) -> int:
    """Return the bytes that a chip stores of leaves split by `PartitionSpec`s on a mesh of these sizes."""
    pairs = zip(jax.tree.leaves(leaves), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True)
    return sum(stored_bytes(_local(leaf.shape, spec, sizes), leaf.dtype.itemsize) for leaf, spec in pairs)


def _local(shape: tuple[int, ...], spec: Any, sizes: dict[str, int]) -> tuple[int, ...]:
    cuts = [math.prod(sizes[axis] for axis in _axes(entry)) for entry in spec]
    return tuple(dim // cut for dim, cut in itertools.zip_longest(shape, cuts, fillvalue=1))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, jax.sharding.PartitionSpec)


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _power(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << max(size - 1, 0).bit_length()


class Elements(NamedTuple):
    """How many numbers of the parameters are on a device once tensor and pipeline have cut them.

    Attributes:
      split_blocks: of blocks, in leaves that data can split.
      whole_blocks: of blocks, in leaves that stay whole over data.
      split_outer: of the outer parameters, likewise.
      whole_outer: likewise.
      largest_outer: of the largest outer leaf that data can split.
      loss_outer: of the outer leaves that data can split and the loss reads.
      largest_loss: of the largest of these.
    """

    split_blocks: int
    whole_blocks: int
    split_outer: int
    whole_outer: int
    largest_outer: int
    loss_outer: int
    largest_loss: int

    @property
    def blocks(self) -> int:
        """All of blocks."""
        return self.split_blocks + self.whole_blocks

    @property
    def outer(self) -> int:
        """All of the outer parameters."""
        return self.split_outer + self.whole_outer


class PlacedModel(NamedTuple):
    """A workload on a mesh.

    Attributes:
      elements: numbers on a device before data splits anything.
      params: bytes of parameters that a device holds.
      opt_state: bytes of optimizer state that a device holds.
      itemsize: bytes of a parameter.
      switches: what the placement splits.
    """

    elements: Elements
    params: int
    opt_state: int
    itemsize: int
    switches: Placement


class _Sizes(NamedTuple):
    """What the placement rules read of a mesh."""

    shape: dict[str, int]


def abstract_opt_state(workload: Workload, tx: optax.GradientTransformation) -> PyTree:
    """Return shapes and dtypes of the optimizer state: those of `tx.init`, whatever the optimizer."""
    return jax.eval_shape(tx.init, workload.params)


def place(
    workload: Workload,
    candidate: Layout,
    opt_state: PyTree,
    *,
    min_shard_elements: int = 1024,
    tiled: bool = False,
) -> PlacedModel:
    """Return the bytes of parameters and optimizer state on each device, exactly as strategies place them.

    Args:
      workload: the model.
      candidate: the layout.
      opt_state: from `abstract_opt_state`.
      min_shard_elements: as strategies take it.
      tiled: whether the device stores arrays in tiles, as a TPU does.

    Raises:
      ValueError: if a dim that a tensor rule names is not divisible, or no rule uses a tensor axis above 1.
    """
    mesh: Any = _Sizes(candidate.sizes)
    switches = PLACEMENTS[candidate.placement]
    pipelined = candidate.pipeline > 1
    tree = plan_leaves(
        workload.params,
        who="plan",
        mesh=mesh,
        rules=workload.rules if candidate.tensor > 1 else (),
        stacked=True,
        pipelined=pipelined,
        min_shard_elements=min_shard_elements if switches.opt_state else 1,
        is_trainable=lambda path: True,
    )
    plans: list[LeafPlan] = jax.tree.leaves(tree)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(workload.params)]
    specs = jax.tree.unflatten(jax.tree.structure(workload.params), [p.spec(split=switches.params) for p in plans])
    opt_specs = state_specs(
        opt_state,
        list(zip(paths, plans, strict=True)),
        split=switches.opt_state,
        data_size=candidate.data,
        min_shard_elements=min_shard_elements,
    )

    def held(tree: PyTree, specs: PyTree) -> int:
        return stored_device_bytes(tree, specs, mesh.shape) if tiled else device_bytes(tree, specs, mesh)

    return PlacedModel(
        elements=_elements(plans, mesh, workload.loss_reads),
        params=held(workload.params, specs),
        opt_state=held(opt_state, opt_specs),
        itemsize=jnp.dtype(plans[0].dtype).itemsize,
        switches=switches,
    )


def _elements(plans: list[LeafPlan], mesh: Any, loss_reads: tuple[str, ...]) -> Elements:
    def counts(*, stacked: bool, split: bool) -> list[int]:
        chosen = [plan for plan in plans if plan.stacked is stacked and (plan.dim is not None) is split]
        return [math.prod(plan.shape) // shards(plan.spec(split=False), mesh) for plan in chosen]

    read = [plan for plan in plans if plan.path in loss_reads and plan.dim is not None]
    at_loss = [math.prod(plan.shape) // shards(plan.spec(split=False), mesh) for plan in read]
    return Elements(
        split_blocks=sum(counts(stacked=True, split=True)),
        whole_blocks=sum(counts(stacked=True, split=False)),
        split_outer=sum(counts(stacked=False, split=True)),
        whole_outer=sum(counts(stacked=False, split=False)),
        largest_outer=max(counts(stacked=False, split=True), default=0),
        loss_outer=sum(at_loss),
        largest_loss=max(at_loss, default=0),
    )
