"""Report the sharding of all leaves as a table: specs, bytes per device, and why some leaves stay
replicated.
"""

import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from shardopt.core import PyTree, TrainState, leaves_with_paths, num_bytes
from shardopt.core._tables import aligned
from shardopt.mesh import size_along, spec_axes
from shardopt.partition._plan import LeafPlan, data_dim, shard_axes


class ReportRow(NamedTuple):
    """One parameter leaf.

    `params` is the spec of the leaf. `opt_state` is the spec of optimizer state of the same shape,
    if there is any. Bytes are the bytes of the parameter alone.
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
    """Matrices that have owners: one device works on each matrix.

    Attributes:
      paths: the key paths of the parameters.
      owners: for each matrix or block, the index of its owner along the axes; empty if the
        partitioner gathers instead.
      because: why there are no owners.
      state: whether owners also hold the optimizer state.
      arrays: if they do not, how many large arrays per matrix a step sends to the owner, and back.
    """

    paths: tuple[str, ...]
    owners: tuple[int, ...]
    because: str = ""
    state: bool = False
    arrays: tuple[int, int] = (0, 0)


class Owners(NamedTuple):
    """How an optimizer's work on matrices is distributed over owners.

    Attributes:
      rows: the matrices.
      num_owners: the number of owners.
      imbalance: the share by which the flops of the busiest owner exceed the mean.
      bytes_sent: the bytes that each device sends in a step to bring matrices to owners and back.
      padding: how many of these bytes are padding, because all owners receive as much as the
        busiest one.
    """

    rows: tuple[Owned, ...]
    num_owners: int
    imbalance: float
    bytes_sent: int
    padding: int

    def lines(self) -> list[str]:
        """Return one line for each row, and a line of totals."""
        lines = []
        for row in self.rows:
            names = ", ".join(row.paths)
            if row.because:
                lines.append(f"matrices of {names} are gathered for their products: {row.because}")
                continue
            num_sent, num_received = row.arrays
            state_text = (
                f"; their optimizer state is not: {num_sent} arrays of each go there,"
                f" {num_received} come back"
            )
            state_text = ", with their optimizer state" if row.state else state_text
            lines.append(f"matrices of {names} are at owners {_ranges(row.owners)}{state_text}")
        total = (
            f"{self.bytes_sent:,} bytes sent per device and step to {self.num_owners} owners and"
            " back"
        )
        share = f", {self.padding / self.bytes_sent:.1%} of them padding" if self.padding else ""
        return [
            *lines,
            f"{total}{share}; the busiest has {self.imbalance:.1%} more flops than the mean",
        ]


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return (0, 1, 2, 2, 5) as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class Report(NamedTuple):
    """The placement of a parameter tree and its optimizer state; `str(report)` is a table.

    Attributes:
      rows: one row for each parameter leaf.
      replicated_state: optimizer state, except scalars, that stays replicated although the strategy
        shards state.
      params_bytes: parameter bytes on each device.
      opt_state_bytes: optimizer state bytes on each device.
      owners: the owners of matrices, with `opt_state="matrices"`.
      view: one line that names the view of the loss, and the reason.
      whole: one line for each leaf that a rule would split over tensor, and tensor does not divide.
    """

    rows: tuple[ReportRow, ...]
    replicated_state: tuple[ReplicatedState, ...]
    params_bytes: int
    opt_state_bytes: int
    owners: Owners | None = None
    view: str = ""
    whole: tuple[str, ...] = ()

    @property
    def replicated(self) -> tuple[ReportRow, ...]:
        """The rows of leaves that stay replicated over data although the strategy shards parameters
        or state.
        """
        return tuple(row for row in self.rows if row.replicated_because)

    def __str__(self) -> str:
        head = (
            "leaf",
            "shape",
            "parameters",
            "optimizer state",
            "bytes per device",
            "replicated because",
        )
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
        lines = aligned(table)
        lines += [
            f"optimizer state {leaf.path} {list(leaf.shape)}, {leaf.bytes:,} bytes, stays"
            f" replicated: {leaf.because}"
            for leaf in self.replicated_state
        ]
        lines += self.whole
        lines += [] if self.owners is None else self.owners.lines()
        lines += [self.view] * bool(self.view)
        total = (
            f"each device holds {self.params_bytes:,} bytes of parameters, {self.opt_state_bytes:,}"
            " of state"
        )
        return "\n".join([*lines, total])


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
    """Return the report for a train state, from its `specs` (a `TrainState` of `PartitionSpec`)."""
    rows = []
    leaf_plans = jax.tree.leaves(plans, is_leaf=lambda x: isinstance(x, LeafPlan))
    for plan in leaf_plans:
        params = plan.spec(sharded=params_split)
        state = plan.state_spec(sharded=state_split)
        bytes_total = num_bytes(plan)
        rows.append(
            ReportRow(
                path=plan.path,
                shape=plan.shape,
                dtype=str(plan.dtype),
                params=params,
                opt_state=state if plan.trainable else PartitionSpec(),
                bytes_total=bytes_total,
                bytes_per_device=bytes_total // num_shards(params, mesh),
                replicated_because=(
                    plan.reason if state_split and shard_axes(mesh.shape).size > 1 else ""
                ),
            )
        )
    return Report(
        rows=tuple(rows),
        replicated_state=(
            _replicated_state(specs, abstract_state, mesh, min_shard_elements)
            if state_split
            else ()
        ),
        params_bytes=sum(row.bytes_per_device for row in rows),
        opt_state_bytes=device_bytes(abstract_state.opt_state, specs.opt_state, mesh),
        whole=tuple(
            f"{plan.path} stays whole over tensor: {plan.whole}"
            for plan in leaf_plans
            if plan.whole
        ),
    )


def _replicated_state(
    specs: TrainState, abstract_state: TrainState, mesh: Mesh, min_shard_elements: int
) -> tuple[ReplicatedState, ...]:
    axes = shard_axes(mesh.shape)
    leaf_specs = jax.tree.leaves(specs.opt_state)
    replicated = []
    for (path, leaf), spec in zip(
        leaves_with_paths(abstract_state.opt_state), leaf_specs, strict=True
    ):
        if axes.size > 1 and math.prod(leaf.shape) > 1 and axes.names[0] not in spec_axes(spec):
            _, reason = data_dim(leaf.shape, spec, axes, min_shard_elements)
            replicated.append(ReplicatedState(path, leaf.shape, num_bytes(leaf), reason))
    return tuple(replicated)


def device_bytes(tree: PyTree, specs: PyTree, mesh: Mesh) -> int:
    """Return the bytes on each device of a tree that `specs` place."""
    return sum(
        num_bytes(leaf) // num_shards(spec, mesh)
        for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
    )


def num_shards(spec: PartitionSpec, mesh: Mesh) -> int:
    """Return the number of pieces that a spec cuts a leaf into."""
    return size_along(mesh.shape, spec_axes(spec))
