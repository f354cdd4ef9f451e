"""Rows of a table, looked up where it lies: whole on each device, or sharded by columns over data.

With R ids on each of n devices and columns [V, D/n] of a table on each: the ids go to all, each looks up its columns of all
n R rows, and an all-to-all brings each device all columns of its own R rows. Backwards an all-to-all takes their gradients to
the columns, and each device has the whole gradient of its own: nothing is left to sum over the axis.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt.collectives import MeshAxes, all_gather, all_to_all, constrain_tensor, shard_by_shard
from shardopt.core.errors import format_error
from shardopt.core.types import wide_dtype
from shardopt.mesh import mesh_under_trace, spec_axes

Mode = Literal["fill", "clip"]
NAME = "embedding"
"""The `checkpoint_name` of the rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ColumnTable:
    """A table [V, D] that is sharded by columns over a mesh axis: what embed gets of a leaf that `BlockModel.tables` names.

    Attributes:
      shard: [V, D/n], the columns of this device.
      axis: the mesh axis, or several, of size n.
      tensor: how the table is sharded over tensor, `PartitionSpec("tensor", None)` or none.
      sums: dtype in which its gradient would be reduce-scattered if it were gathered; None where it has none.
    """

    shard: jax.Array
    axis: MeshAxes = dataclasses.field(metadata={"static": True})
    tensor: PartitionSpec = dataclasses.field(metadata={"static": True})
    sums: DTypeLike | None = dataclasses.field(metadata={"static": True})

    def astype(self, dtype: DTypeLike) -> "ColumnTable":
        """Return the table in another dtype, in which its rows then travel."""
        return dataclasses.replace(self, shard=self.shard.astype(dtype))

    def __jax_array__(self) -> jax.Array:
        """Refuse to be an array.

        Raises:
          TypeError: always.
        """
        what = "a table that BlockModel.tables names was used as an array, and it is sharded by columns."
        fix = "read it by so.nn.embedding alone, in embed; or take its name out of BlockModel.tables."
        raise TypeError(format_error("embedding", what, fix=fix))

    def __getitem__(self, ids: object) -> jax.Array:
        """Likewise.

        Raises:
          TypeError: always.
        """
        return self.__jax_array__()


def embedding(
    table: Float[Array, "V D"] | ColumnTable, ids: Int[Array, "*rows"], *, mode: Mode = "fill"
) -> Float[Array, "*rows D"]:
    """Return the row of a table that each id names: y[...] = table[ids[...]].

    **Equivalence**: the same wherever the table lies, up to the order in which gradients of one row are added; they are
    added in fp32 at least where the table is sharded by columns.

    **Communication**: none for a table that is whole on the device, as fsdp gathers it. Where `BlockModel.tables` names
    it, fsdp leaves it sharded by columns over the N devices of data, and what sends fewer bytes is done each micro-batch, with
    R ids on a device and b bytes per number: an exchange of the rows, an all-gather of 4 N R and two all-to-alls of R D b
    (one where the table is frozen); or an all-gather of the table, V D b, and a reduce-scatter of its gradient. So the
    exchange is taken where R is about below V. Over tensor, which may shard V, what the partitioner does with a gather.

    Args:
      table: [V, D].
      ids: integers of any shape.
      mode: what an id outside of the table gives: "fill" NaN, "clip" the nearest row.

    Returns:
      [*ids.shape, D] in the dtype of the table; it has the `checkpoint_name` "embedding".

    Raises:
      TypeError: if the ids are not integers.
      ValueError: if mode is unknown.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> print(so.nn.embedding(jnp.eye(3), jnp.array([2, 0])))
      [[0. 0. 1.]
       [1. 0. 0.]]
    """
    if mode not in ("fill", "clip"):
        raise ValueError(format_error("embedding", f"unknown mode {mode!r}.", fix="use 'fill' or 'clip'."))
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"embedding: ids must be integers, got {ids.dtype}.")
    if not isinstance(table, ColumnTable):
        return checkpoint_name(_rows(table, ids, mode), NAME)
    if sent_by_exchange(table, ids) < sent_by_gather(table):
        rows = _exchanged(table, ids.reshape(-1), mode)
        return checkpoint_name(rows.reshape(*ids.shape, rows.shape[-1]), NAME)
    (whole,) = all_gather([table.shard], [1], [table.tensor], axes=[table.axis], scatter_dtypes=[table.sums])
    return checkpoint_name(_rows(whole, ids, mode), NAME)


def exchange_bytes(
    ids: float, width: float, *, devices: int, itemsize: int, trained: bool = True
) -> tuple[float, float]:
    """Return what each device of an axis sends to look rows up by exchange: the all-gather of ids, and all the all-to-alls.

    Buffers as `so.audit` counts them, of which (n - 1) / n travel.

    Args:
      ids: R, how many ids a device has.
      width: D, numbers in a row.
      devices: n.
      itemsize: bytes of a number.
      trained: whether gradients go back.
    """
    return 4.0 * devices * ids, (1 + trained) * ids * width * itemsize


def sent_by_exchange(table: ColumnTable, ids: jax.Array) -> float:
    """Return the bytes of the exchange."""
    devices, columns = jax.lax.axis_size(table.axis), table.shard.shape[1]
    itemsize = table.shard.dtype.itemsize
    return sum(
        exchange_bytes(ids.size, columns * devices, devices=devices, itemsize=itemsize, trained=table.sums is not None)
    )


def sent_by_gather(table: ColumnTable) -> float:
    """Return the bytes of gathering the table, and of reduce-scattering its gradient."""
    elements = table.shard.size * jax.lax.axis_size(table.axis)
    elements /= math.prod(mesh_under_trace().shape[axis] for axis in spec_axes(table.tensor))
    sums = 0 if table.sums is None else jnp.dtype(table.sums).itemsize
    return elements * (table.shard.dtype.itemsize + sums)


def _rows(table: jax.Array, ids: jax.Array, mode: Mode) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode=mode, fill_value=jnp.nan if mode == "fill" else None)


def _exchanged(table: ColumnTable, ids: jax.Array, mode: Mode) -> jax.Array:
    """Return [R, D] of a table that each device has columns of."""
    shape, dtype, axis = table.shard.shape, table.shard.dtype, table.axis

    def move(x: jax.Array, split: int, concat: int) -> jax.Array:
        return shard_by_shard(lambda xs: [all_to_all(xs[0], axis, split, concat)], [x], [PartitionSpec()])[0]

    def forward(shard: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        gather = lambda xs: [jax.lax.all_gather(xs[0], axis, tiled=True)]  # noqa: E731
        (everywhere,) = shard_by_shard(gather, [ids], [PartitionSpec()])
        return move(_rows(shard, everywhere, mode), 0, 1), everywhere

    def backward(everywhere: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
        zeros = jnp.zeros(shape, wide_dtype(dtype))
        _, pullback = jax.vjp(lambda table: _rows(table, everywhere, mode), zeros)
        (columns,) = pullback(move(grad, 1, 0).astype(zeros.dtype))
        return constrain_tensor([columns.astype(dtype)], [table.tensor])[0], None

    run = jax.custom_vjp(lambda shard, ids: forward(shard, ids)[0])
    run.defvjp(forward, backward)
    return run(table.shard, ids)
