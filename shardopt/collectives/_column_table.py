"""`ColumnTable`: a table that devices hold by columns, until `so.nn.embedding` looks rows up."""

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from shardopt.collectives._buckets import MeshAxes
from shardopt.collectives._wire import Encoded
from shardopt.core._stand_in import StandIn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ColumnTable(StandIn):
    """A table [V, D] sharded by columns over a mesh axis.

    `embed` gets it for a leaf that `BlockModel.tables` names.

    Attributes:
      shard: [V, D/n], the columns of this device.
      axis: the mesh axis, or several, of size n.
      tensor: how the table is sharded over tensor: `PartitionSpec("tensor", None)`, or an empty
        spec.
      sums: the dtype of the reduce-scatter of its gradient, if the table were gathered; None for a
        frozen table.
    """

    caller = "embedding"
    problem = (
        "a table that BlockModel.tables names was used as an array, and it is sharded by columns."
    )
    fix = "read it by so.nn.embedding alone, in embed; or take its name out of BlockModel.tables."

    shard: jax.Array
    axis: MeshAxes = dataclasses.field(metadata={"static": True})
    tensor: PartitionSpec = dataclasses.field(metadata={"static": True})
    sums: DTypeLike | None = dataclasses.field(metadata={"static": True})

    def astype(self, dtype: DTypeLike) -> "ColumnTable":
        """Return the table in another dtype, which is also the dtype of its rows when they are
        sent.
        """
        return dataclasses.replace(self, shard=self.shard.astype(dtype))


class TableForm(NamedTuple):
    """The form of a table that is not gathered; see `WireForm`.

    Attributes:
      tensor: see `ColumnTable`.
      sums: see `ColumnTable`.
    """

    tensor: PartitionSpec
    sums: DTypeLike | None

    is_scattered = False

    def encode(self, shard: jax.Array, axes: MeshAxes) -> Encoded:
        """Return no arrays; the decoded table holds the shard."""
        return Encoded([], lambda _: ColumnTable(shard, axes, self.tensor, self.sums))

    def gradient(self, cotangent: ColumnTable) -> jax.Array:
        """Return the gradient of the columns of this device."""
        return cotangent.shard
