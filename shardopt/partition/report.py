"""What lives where, as a table: specs, bytes per device, and why leaves stay replicated that could be sharded."""

import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from shardopt.core.types import PyTree, TrainState, leaves_with_paths
from shardopt.mesh import spec_axes
from shardopt.partition.plan import LeafPlan, data_dim, shard_axes


class ReportRow(NamedTuple):
    """One parameter leaf.

    `params` is its spec, `opt_state` that of optimizer state of its shape, if there is any; bytes are those of the
    parameter alone.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    params: PartitionSpec
    opt_state: PartitionSpec
    bytes_total: int
    bytes_per_device: int
    replicated_because: str


class ReplicatedState(NamedTuple):
    """A leaf of optimizer state that stays replicated over data although the strategy shards state."""

    path: str
    shape: tuple[int, ...]
    bytes: int
    because: str


class Owned(NamedTuple):
    """Matrices that are each worked on by one device, its owner.

    Attributes:
      paths: the parameters.
      owners: of each matrix or block, the number of its owner along the axes; empty where the partitioner gathers instead.
      because: why there are no owners.
      state: whether optimizer state lives there as well.
      arrays: if it does not, how many large arrays of each matrix go there in a step, and come back.
    """

    paths: tuple[str, ...]
    owners: tuple[int, ...]
    because: str = ""
    state: bool = False
    arrays: tuple[int, int] = (0, 0)


class Owners(NamedTuple):
    """How an optimizer's work on matrices is shared out.

    Attributes:
      rows: the matrices.
      num_owners: how many owners there are.
      imbalance: by which part the flops of the busiest owner exceed the mean.
      bytes_sent: what each device sends in a step to bring matrices there and back.
      padding: how many of these bytes carry nothing, because all owners are sent as much as the busiest.
    """

    rows: tuple[Owned, ...]
    num_owners: int
    imbalance: float
    bytes_sent: int
    padding: int

    def lines(self) -> list[str]:
        """Return a line for each row, and one for all."""
        found = []
        for row in self.rows:
            names = ", ".join(row.paths)
            if row.because:
                found.append(f"matrices of {names} are gathered for their products: {row.because}")
                continue
            there, back = row.arrays
            moved = f"; their optimizer state is not: {there} arrays of each go there, {back} come back"
            moved = ", with their optimizer state" if row.state else moved
            found.append(f"matrices of {names} are at owners {_ranges(row.owners)}{moved}")
        total = f"{self.bytes_sent:,} bytes sent per device and step to {self.num_owners} owners and back"
        share = f", {self.padding / self.bytes_sent:.1%} of them padding" if self.padding else ""
        return [*found, f"{total}{share}; the busiest has {self.imbalance:.1%} more flops than the mean"]


class LayoutBytes(NamedTuple):
    """What an optimizer's work on matrices sends in a step, per device, beside what one of elements alone would.

    Attributes:
      within: with `opt_state_layout="within"`, about: each product or decomposition gathers the smallest of what it reads and
        makes, loops multiplied in where they say how often they turn.
      matrices: with `opt_state_layout="matrices"`.
    """

    within: int
    matrices: int

    @property
    def recommended(self) -> str:
        """The layout that sends less."""
        return "matrices" if self.matrices < self.within else "within"

    def __str__(self) -> str:
        """Return a line."""
        sent = (
            f"'within' sends about {self.within:,} bytes per device and step for matrices, 'matrices' {self.matrices:,}"
        )
        return f"opt_state_layout: {sent}; recommended: {self.recommended!r}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write (0, 1, 2, 2, 5) as "0-2, 5"."""
    found: list[list[int]] = []
    for one in sorted(set(numbers)):
        if found and found[-1][-1] == one - 1:
            found[-1].append(one)
        else:
            found.append([one])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


class Report(NamedTuple):
    """The placement of a parameter tree and its optimizer state; `str` gives a table.

    Attributes:
      rows: one a parameter leaf.
      replicated_state: the optimizer state, scalars apart, that stays replicated although the strategy shards it.
      params_bytes: parameter bytes on each device.
      opt_state_bytes: optimizer state bytes on each device.
      owners: how work on matrices is shared out, with `opt_state_layout="matrices"`.
      layouts: what each `opt_state_layout` sends; None if the optimizer works on no matrices, or its state is replicated.
      view: in which view the loss runs, and why, a line.
    """

    rows: tuple[ReportRow, ...]
    replicated_state: tuple[ReplicatedState, ...]
    params_bytes: int
    opt_state_bytes: int
    owners: Owners | None = None
    layouts: LayoutBytes | None = None
    view: str = ""

    @property
    def replicated(self) -> tuple[ReportRow, ...]:
        """The leaves that stay replicated over data although the strategy shards."""
        return tuple(row for row in self.rows if row.replicated_because)

    def __str__(self) -> str:
        head = ("leaf", "shape", "parameters", "optimizer state", "bytes per device", "replicated because")
        table = [head] + [
            (
                row.path,
                f"{row.dtype}{list(row.shape)}",
                str(row.params),
                str(row.opt_state),
                f"{row.bytes_per_device:,}",
                row.replicated_because,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
        lines += [
            f"optimizer state {one.path} {list(one.shape)}, {one.bytes:,} bytes, stays replicated: {one.because}"
            for one in self.replicated_state
        ]
        lines += [] if self.owners is None else self.owners.lines()
        lines += [] if self.layouts is None else [str(self.layouts)]
        lines += [self.view] * bool(self.view)
        total = f"each device holds {self.params_bytes:,} bytes of parameters, {self.opt_state_bytes:,} of state"
        return "\n".join(line.rstrip() for line in [*lines, total])


def report(
    plans: PyTree,
    specs: TrainState,
    abstract_state: TrainState,
    *,
    mesh: Mesh,
    params_split: bool,
    state_split: bool,
    min_shard_elements: int,
) -> Report:
    """Build the report of a train state's `specs` (a `TrainState` of `PartitionSpec`)."""
    rows = []
    for plan in jax.tree.leaves(plans, is_leaf=lambda x: isinstance(x, LeafPlan)):
        params, state = plan.spec(sharded=params_split), plan.state_spec(sharded=state_split)
        bytes_total = math.prod(plan.shape) * plan.dtype.itemsize
        rows.append(
            ReportRow(
                path=plan.path,
                shape=plan.shape,
                dtype=str(plan.dtype),
                params=params,
                opt_state=state if plan.trainable else PartitionSpec(),
                bytes_total=bytes_total,
                bytes_per_device=bytes_total // shards(params, mesh),
                replicated_because=plan.reason if state_split and shard_axes(mesh.shape).size > 1 else "",
            )
        )
    return Report(
        rows=tuple(rows),
        replicated_state=_replicated_state(specs, abstract_state, mesh, min_shard_elements) if state_split else (),
        params_bytes=sum(row.bytes_per_device for row in rows),
        opt_state_bytes=device_bytes(abstract_state.opt_state, specs.opt_state, mesh),
    )


def _replicated_state(
    specs: TrainState, abstract_state: TrainState, mesh: Mesh, min_shard_elements: int
) -> tuple[ReplicatedState, ...]:
    axes = shard_axes(mesh.shape)
    placed = jax.tree.leaves(specs.opt_state, is_leaf=lambda x: isinstance(x, PartitionSpec))
    found = []
    for (path, leaf), spec in zip(leaves_with_paths(abstract_state.opt_state), placed, strict=True):
        if axes.size > 1 and math.prod(leaf.shape) > 1 and axes.names[0] not in spec_axes(spec):
            _, reason = data_dim(leaf.shape, spec, axes, min_shard_elements)
            found.append(ReplicatedState(path, leaf.shape, math.prod(leaf.shape) * leaf.dtype.itemsize, reason))
    return tuple(found)


def device_bytes(tree: PyTree, specs: PyTree, mesh: Mesh) -> int:
    """Return the bytes that a tree placed by `specs` takes on each device."""
    leaves = jax.tree.leaves(tree)
    placed = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // shards(spec, mesh)
        for leaf, spec in zip(leaves, placed, strict=True)
    )


def shards(spec: PartitionSpec, mesh: Mesh) -> int:
    """Return into how many pieces a spec cuts a leaf."""
    return math.prod(mesh.shape[axis] for axis in spec_axes(spec))
