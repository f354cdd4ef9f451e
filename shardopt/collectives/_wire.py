"""`LeafWire`: how a leaf and its gradient travel between devices, and their form on the way."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from shardopt.collectives._buckets import MeshAxes
from shardopt.core import Arrays
from shardopt.mesh import device_kind


class Encoded(NamedTuple):
    """A shard in the form of its gather.

    Attributes:
      arrays: the arrays that are gathered, on the dim of the leaf.
      decode: makes the leaf, or a node that stands for it, of the gathered arrays.
    """

    arrays: Arrays
    decode: Callable[[Arrays], Any]


class WireForm(Protocol):
    """How a leaf is written on the wire, if not as its own numbers.

    The functions run inside the step: `encode` before the all-gather, `gradient` before the
    reduce-scatter of its gradient.
    """

    @property
    def is_scattered(self) -> bool:
        """Whether the gradient is reduce-scattered like that of other leaves; else it stays local."""
        ...

    def encode(self, shard: jax.Array, axes: MeshAxes) -> Encoded:
        """Return the shard of this device, as it is gathered over the axes."""
        ...

    def gradient(self, cotangent: Any) -> jax.Array:
        """Return the gradient of the leaf, from the gradient of the decoded leaf."""
        ...


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
      form: how the leaf is written when it is all-gathered; None: as its own numbers.
    """

    dim: int | None
    tensor: PartitionSpec
    axes: MeshAxes
    gather_dtype: DTypeLike | None = None
    scatter_dtype: DTypeLike | None = None
    trained: bool = True
    form: WireForm | None = None

    def stacked(self, num_dims: int) -> "LeafWire":
        """Return the wire of such leaves stacked along new first dims."""
        dim = None if self.dim is None else self.dim + num_dims
        return self._replace(dim=dim, tensor=PartitionSpec(*[None] * num_dims, *self.tensor))

    @property
    def of_gradient(self) -> "LeafWire":
        """The wire of a gradient."""
        is_local = self.form is not None and not self.form.is_scattered
        return self._replace(dim=None if is_local else self.dim, form=None)

    def scattered(self, x: jax.Array) -> jax.Array:
        """Return a local gradient, cast to the dtype that is sent."""
        return x if self.dim is None or self.scatter_dtype is None else x.astype(self.scatter_dtype)

    def sends_bits(self, x: jax.Array) -> bool:
        """Return whether a gradient that was cast is sent as bits, because XLA:CPU would send it as
        fp32.
        """
        is_cast = self.dim is not None and self.scatter_dtype is not None
        return is_cast and x.dtype.itemsize == 2 and device_kind() == "cpu"
