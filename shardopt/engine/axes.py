"""One table: what each mesh axis splits, and which leaves' gradients are summed over it.

From it follows what is sharded, and what crosses which axis: **a leaf may be sharded over the axes that its gradient is
summed over.** Where it is sharded over one, its gradient is reduce-scattered over it, else all-reduced.
"""

import math
from collections.abc import Collection
from typing import Literal, NamedTuple

from jax.sharding import Mesh, PartitionSpec

from shardopt.partition import LeafPlan


class Axis(NamedTuple):
    """A row of the table.

    Attributes:
      splits: what devices along the axis have different parts of: rows of the batch, positions of its sequences, blocks
        of the model, or inner dims of its leaves.
      sums: the leaves whose gradients are summed over it: all, the outer ones (those of no block), those that hold no
        experts, or none, because the partitioner does it.
    """

    splits: Literal["rows", "positions", "blocks", "dims"]
    sums: Literal["all", "outer", "no experts", "none"]


TABLE = {
    "replica": Axis(splits="rows", sums="all"),
    "data": Axis(splits="rows", sums="all"),
    "expert": Axis(splits="rows", sums="no experts"),
    "context": Axis(splits="positions", sums="all"),
    "pipeline": Axis(splits="blocks", sums="outer"),
    "tensor": Axis(splits="dims", sums="none"),
}


class AxisTable(NamedTuple):
    """The table on the mesh of one strategy.

    Attributes:
      sizes: mesh axis name -> size.
      rows: the axes that the rows of the batch are split over.
      positions: the axes that the positions of its sequences are split over.
      summed: those of both over which gradients are summed: all, or all but replica while replicas train apart.
      stages: ("pipeline",) where blocks run on several stages, else ().
      stacked: ("replica",) where each replica has parameters of its own, stacked along a first dim; else ().
    """

    sizes: dict[str, int]
    rows: tuple[str, ...]
    positions: tuple[str, ...]
    summed: tuple[str, ...]
    stages: tuple[str, ...]
    stacked: tuple[str, ...]

    @property
    def num_shares(self) -> int:
        """How many devices' shares of the batch one gradient is the sum of."""
        return math.prod(self.sizes[axis] for axis in self.summed)

    @property
    def summed_rows(self) -> tuple[str, ...]:
        """The axes that split the rows of one gradient."""
        return tuple(axis for axis in self.summed if axis in self.rows)

    @property
    def num_all_row_shares(self) -> int:
        """Into how many shares the axes of rows cut those of all replicas."""
        return math.prod(self.sizes[axis] for axis in self.rows)

    @property
    def num_row_shares(self) -> int:
        """Into how many shares these axes cut the rows."""
        return math.prod(self.sizes[axis] for axis in self.summed_rows)

    @property
    def num_position_shares(self) -> int:
        """Into how many shares the positions of a sequence are cut."""
        return math.prod(self.sizes[axis] for axis in self.positions)

    def gradient(self, plan: LeafPlan, *, done: Collection[str] = ()) -> tuple[str, ...]:
        """Return the axes that the gradient of a leaf is summed over, less those over which it has been already.

        A gradient of experts is complete over expert: the tokens of all its devices came to them.
        """
        over = self.summed if plan.stacked else (*self.summed, *self.stages)
        own = [axis for axis, row in TABLE.items() if row.sums == "no experts" and plan.experts]
        return tuple(axis for axis in over if axis not in done and axis not in own)

    def stack(self, spec: PartitionSpec = PartitionSpec()) -> PartitionSpec:  # noqa: B008 (a constant)
        """Return the spec of a value of which each replica has its own."""
        return PartitionSpec(*self.stacked, *spec)


def axes_of(mesh: Mesh, *, pipelined: bool, per_replica: bool, sync_gradients: bool) -> AxisTable:
    """Return the table on a mesh.

    Args:
      mesh: the mesh.
      pipelined: whether blocks run on the stages of a schedule.
      per_replica: whether each replica has parameters of its own.
      sync_gradients: whether gradients are summed over replica all the same, as in a warm-up.
    """
    rows = tuple(axis for axis, row in TABLE.items() if row.splits == "rows" and axis in mesh.axis_names)
    positions = tuple(axis for axis, row in TABLE.items() if row.splits == "positions" and axis in mesh.axis_names)
    batch = (*rows, *positions)
    stacked = ("replica",) if per_replica else ()
    return AxisTable(
        sizes=dict(mesh.shape),
        rows=rows,
        positions=positions,
        summed=batch if sync_gradients else tuple(axis for axis in batch if axis not in stacked),
        stages=tuple(axis for axis, row in TABLE.items() if row.splits == "blocks") if pipelined else (),
        stacked=stacked,
    )
