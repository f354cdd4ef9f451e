"""One table: the part of the work that each mesh axis splits, and the gradients that are summed
over it.

The table decides how leaves are sharded and which collectives run. **A leaf may be sharded over the
axes that its gradient is summed over**. If a leaf is sharded over an axis, its gradient is
reduce-scattered over it. Otherwise its gradient is all-reduced.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

from jax.sharding import Mesh, PartitionSpec

from shardopt.mesh import size_along
from shardopt.partition import LeafPlan


class Axis(NamedTuple):
    """A row of the table.

    Attributes:
      splits: what devices along the axis divide: rows of the batch, positions of its sequences,
        blocks of the model, or inner dims of its leaves.
      sums: the leaves whose gradients are summed over the axis: all; outer leaves, which belong to
        no block; leaves without experts; or none, because the partitioner sums them.
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
      summed: the axes of rows and positions over which gradients are summed: all of them, or all
        but replica while each replica trains by itself.
      stages: ("pipeline",) if blocks run on several stages, else ().
      stacked: ("replica",) if each replica has its own parameters, stacked along a first dim; else
        ().
    """

    sizes: dict[str, int]
    rows: tuple[str, ...]
    positions: tuple[str, ...]
    summed: tuple[str, ...]
    stages: tuple[str, ...]
    stacked: tuple[str, ...]

    @property
    def num_shares(self) -> int:
        """The number of devices whose shares of the batch add up to one gradient."""
        return size_along(self.sizes, self.summed)

    @property
    def summed_rows(self) -> tuple[str, ...]:
        """The axes that split the rows of one gradient."""
        return tuple(axis for axis in self.summed if axis in self.rows)

    @property
    def num_all_row_shares(self) -> int:
        """The number of shares that the rows of all replicas are cut into."""
        return size_along(self.sizes, self.rows)

    @property
    def num_row_shares(self) -> int:
        """The number of shares that the rows of one gradient are cut into."""
        return size_along(self.sizes, self.summed_rows)

    @property
    def num_position_shares(self) -> int:
        """The number of shares that the positions of a sequence are cut into."""
        return size_along(self.sizes, self.positions)

    def gradient(self, plan: LeafPlan, *, done: Collection[str] = ()) -> tuple[str, ...]:
        """Return the axes that the gradient of a leaf is still summed over, without the axes in
        `done`.

        A gradient of experts is complete over expert: the tokens of all devices along the axis came
        to the expert.
        """
        sum_axes = self.summed if plan.stacked else (*self.summed, *self.stages)
        complete_axes = [
            axis for axis, row in TABLE.items() if row.sums == "no experts" and plan.experts
        ]
        return tuple(axis for axis in sum_axes if axis not in done and axis not in complete_axes)

    def stack(self, spec: PartitionSpec = PartitionSpec()) -> PartitionSpec:  # noqa: B008 (a constant)
        """Return the spec of a value that each replica has its own copy of."""
        return PartitionSpec(*self.stacked, *spec)


def axes_of(mesh: Mesh, *, pipelined: bool, per_replica: bool, sync_gradients: bool) -> AxisTable:
    """Return the table on a mesh.

    Args:
      mesh: the mesh.
      pipelined: whether blocks run on the stages of a schedule.
      per_replica: whether each replica has its own parameters.
      sync_gradients: whether gradients are summed over replica even then, as in a warm-up.
    """

    def axes_that_split(unit: str) -> tuple[str, ...]:
        return tuple(
            axis for axis, row in TABLE.items() if row.splits == unit and axis in mesh.axis_names
        )

    rows = axes_that_split("rows")
    positions = axes_that_split("positions")
    batch_axes = (*rows, *positions)
    stacked = ("replica",) if per_replica else ()
    return AxisTable(
        sizes=dict(mesh.shape),
        rows=rows,
        positions=positions,
        summed=(
            batch_axes
            if sync_gradients
            else tuple(axis for axis in batch_axes if axis not in stacked)
        ),
        stages=("pipeline",) if pipelined else (),
        stacked=stacked,
    )
