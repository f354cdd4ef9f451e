"""`LeafWire`: how a leaf and its gradient travel between devices."""

from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from shardopt.collectives._buckets import MeshAxes
from shardopt.low_precision._weight import Form
from shardopt.mesh import device_kind


class LeafWire(NamedTuple):
    """How a leaf travels between devices.

    Attributes:
      dim: the dim that is sharded, or None: the leaf is replicated, and is not sent.
      tensor: how the leaf is sharded over the tensor axis; this does not change.
      axes: the mesh axis that shards the leaf, or several axes that act as one.
      gather_dtype: the dtype that the leaf is cast to before it is all-gathered, or None to keep
        its own.
      scatter_dtype: the dtype that its gradient is cast to before it is reduce-scattered, or None
        to keep its own.
      trained: whether the leaf has a gradient. A bucket would send the zeros of a frozen leaf.
      form: how the leaf is rounded to 8 bits before it is all-gathered, as a matrix; None does not
        round it.
    """

    dim: int | None
    tensor: PartitionSpec
    axes: MeshAxes
    gather_dtype: DTypeLike | None = None
    scatter_dtype: DTypeLike | None = None
    trained: bool = True
    form: Form | None = None

    def stacked(self, num_dims: int) -> "LeafWire":
        """Return the wire of such leaves stacked along new first dims."""
        dim = None if self.dim is None else self.dim + num_dims
        return self._replace(dim=dim, tensor=PartitionSpec(*[None] * num_dims, *self.tensor))

    @property
    def of_gradient(self) -> "LeafWire":
        """The wire of a gradient.

        The gradient of a rounded leaf is scattered by the rows of its matrix.
        """
        return (
            self if self.form is None else self._replace(dim=0, tensor=PartitionSpec(), form=None)
        )

    def scattered(self, x: jax.Array) -> jax.Array:
        """Return a local gradient, cast to the dtype that is sent."""
        return x if self.dim is None or self.scatter_dtype is None else x.astype(self.scatter_dtype)

    def sends_bits(self, x: jax.Array) -> bool:
        """Return whether a gradient that was cast is sent as bits, because XLA:CPU would send it as
        fp32.
        """
        is_cast = self.dim is not None and self.scatter_dtype is not None
        return is_cast and x.dtype.itemsize == 2 and device_kind() == "cpu"
