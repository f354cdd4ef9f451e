"""Look up rows of a table that is whole on each device, or sharded by columns over data.

Each of n devices has R ids and the columns [V, D/n] of a table. An all-gather brings all ids to all
devices, and each looks up its columns of all n R rows. An all-to-all then brings each device all
columns of its own R rows. Backwards, an all-to-all sends the gradients of rows to the devices of
the columns. Each device then has the complete gradient of its columns: no sum over the axis
remains.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from shardopt.collectives import LeafWire, all_gather, all_to_all, constrain_tensor, shard_by_shard
from shardopt.collectives._column_table import ColumnTable
from shardopt.core import wide_dtype
from shardopt.kernels._devices import is_local
from shardopt.mesh import device_kind, is_analysed, mesh_under_trace, spec_axes
from shardopt.nn._ids import as_int32, integers
from shardopt.trace._marks import LOOKED_UP

_TILE = 128
"""Rows of a gradient that a product adds at once."""


def embedding(
    table: Float[Array, "V D"] | ColumnTable, ids: Int[Array, "*rows"]
) -> Float[Array, "*rows D"]:
    """Return the row of a table that each id names: y[...] = table[ids[...]].

    Args:
      table: [V, D].
      ids: integers of any shape. An id outside of the table, below 0 too, gives NaN.

    Returns:
      [*ids.shape, D] in the dtype of the table; it has the `checkpoint_name` "embedding".

    Raises:
      TypeError: if the ids are not integers, or the table holds integers, which have no NaN.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> print(so.nn.embedding(jnp.eye(3), jnp.array([2, 0])))
      [[0. 0. 1.]
       [1. 0. 0.]]

    **Equivalence**: the result does not depend on the placement of the table, up to the order of
    sums. Gradients of one row are added in fp32 at least, also for a table in half precision. In
    bfloat16 a sum of many small numbers stops growing, and a frequent token would learn too little.

    **Memory**: a sum of gradients has 4 V D bytes, until it is rounded to the dtype of the table.

    **Communication**: none if the device has the whole table, as when fsdp gathers it. If
    `BlockModel.tables` names the table, fsdp leaves it sharded by columns over the N devices of
    data. With R ids on a device and b bytes per number, each micro-batch takes the way that sends
    fewer bytes:

    - an exchange of the rows: an all-gather of 4 N R bytes and two all-to-alls of R D b (one if the
      table is frozen);
    - a gather of the table: an all-gather of V D b, and a reduce-scatter of its gradient.

    So it exchanges rows if R is below about V. If tensor shards V, the partitioner decides how the
    look-up communicates over tensor.
    """
    dtype = (table.shard if isinstance(table, ColumnTable) else table).dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"embedding: the table must hold floating numbers, got {dtype}.")
    ids = as_int32(integers("embedding", "ids", ids))
    # jnp.take counts negative ids from the end
    ids = jnp.where(ids < 0, jnp.iinfo(ids.dtype).max, ids)
    if not isinstance(table, ColumnTable):
        return checkpoint_name(_look_up(table, ids), LOOKED_UP)
    if sent_by_exchange(table, ids) < sent_by_gather(table):
        rows = _look_up_by_exchange(table, ids.reshape(-1))
        return checkpoint_name(rows.reshape(*ids.shape, rows.shape[-1]), LOOKED_UP)
    (full_table,) = all_gather(
        [table.shard], [LeafWire(1, table.tensor, table.axis, scatter_dtype=table.sums)]
    )
    return checkpoint_name(_look_up(full_table, ids), LOOKED_UP)


def exchange_bytes(
    ids: float, width: float, *, devices: int, itemsize: int, trained: bool = True
) -> tuple[float, float]:
    """Return the buffer bytes of a look-up by exchange on each device: of the all-gather of ids,
    and of all all-to-alls.

    Buffers are counted as in `so.hlo.audit`; (n - 1) / n of their bytes travel.

    Args:
      ids: R, the number of ids on a device.
      width: D, numbers in a row.
      devices: n.
      itemsize: bytes of a number.
      trained: whether gradients are sent back.
    """
    return 4.0 * devices * ids, (1 + trained) * ids * width * itemsize


def sent_by_exchange(table: ColumnTable, ids: jax.Array) -> float:
    """Return the buffer bytes of the exchange of rows."""
    devices = jax.lax.axis_size(table.axis)
    columns = table.shard.shape[1]
    itemsize = table.shard.dtype.itemsize
    return sum(
        exchange_bytes(
            ids.size,
            columns * devices,
            devices=devices,
            itemsize=itemsize,
            trained=table.sums is not None,
        )
    )


def sent_by_gather(table: ColumnTable) -> float:
    """Return the buffer bytes of the gather of the table, and of the reduce-scatter of its
    gradient.
    """
    elements = table.shard.size * jax.lax.axis_size(table.axis)
    elements /= math.prod(mesh_under_trace().shape[axis] for axis in spec_axes(table.tensor))
    sums = 0 if table.sums is None else jnp.dtype(table.sums).itemsize
    return elements * (table.shard.dtype.itemsize + sums)


def _look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows; backwards, the rows of one id are added in float32 at least."""
    if is_analysed() or (table.dtype == wide_dtype(table.dtype) and not _adds_by_atomics()):
        return _rows_of(table, ids)
    return _look_up_with_wide_sums(table, ids)


def _rows_of(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)


def _adds_by_atomics() -> bool:
    """Return whether the devices are GPUs, on which XLA adds scattered rows by atomic operations."""
    kind = device_kind() or "cpu"
    return kind != "cpu" and not kind.startswith("TPU")


@jax.custom_jvp
def _look_up_with_wide_sums(table: jax.Array, ids: jax.Array) -> jax.Array:
    return _rows_of(table, ids)


@_look_up_with_wide_sums.defjvp
def _tangents(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]) -> tuple:
    """Look the tangent up in a wide table. The transpose then adds wide numbers."""
    (table, ids), (d_table, _) = primals, tangents
    # The transpose of this cast is a cast of the sum, so rows are added in float32.
    d_table = d_table.astype(wide_dtype(table.dtype))
    rows = _rows_of(table, ids)
    places = jnp.take(jnp.arange(len(table)), ids, mode="fill", fill_value=len(table))
    look_up = _look_up_in_tiles if _adds_by_atomics() and is_local() else _look_up_or_zero
    return rows, look_up(d_table, places).astype(rows.dtype)


def _look_up_or_zero(table: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take(table, places, axis=0, mode="fill", fill_value=0)


def _look_up_in_tiles(table: jax.Array, places: jax.Array) -> jax.Array:
    """Look up rows in tiles of sorted places: each row once in a tile, from where a product copies
    it.

    So the transpose adds the rows of one place in a tile by a product, and few additions to one
    place are left. A GPU adds them by atomic operations, one after another. On an H200, 16,384 rows
    of 768 with few ids took 32 of 76 ms of a step. Sums of a tile that has NaN or infinity are NaN.
    """
    outside = len(table)
    order = jnp.argsort(places.reshape(-1))
    tiles = jnp.pad(
        places.reshape(-1)[order], (0, -order.size % _TILE), constant_values=outside
    ).reshape(-1, _TILE)
    is_first = jnp.pad(tiles[:, 1:] != tiles[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    copies = (tiles[:, :, None] == tiles[:, None, :]) & is_first[:, None, :]
    first_rows = _look_up_or_zero(table.reshape(outside, -1), jnp.where(is_first, tiles, outside))
    rows = jnp.einsum("nij,njd->nid", copies.astype(table.dtype), first_rows, precision="highest")
    rows = rows.reshape(-1, rows.shape[-1]).at[jnp.argsort(order)].get(unique_indices=True)
    is_inside = places[(..., *[None] * (table.ndim - 1))] < outside
    return jnp.where(is_inside, rows.reshape(*places.shape, *table.shape[1:]), 0)


def _look_up_by_exchange(table: ColumnTable, ids: jax.Array) -> jax.Array:
    """Return the rows [R, D] of a table that is sharded by columns."""
    shape = table.shard.shape
    dtype = table.shard.dtype
    axis = table.axis

    def exchange(x: jax.Array, split: int, concat: int) -> jax.Array:
        return shard_by_shard(
            lambda xs: [all_to_all(xs[0], axis, split, concat)], [x], [PartitionSpec()]
        )[0]

    def forward(shard: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        def gather(xs):
            return [jax.lax.all_gather(xs[0], axis, tiled=True)]

        (all_ids,) = shard_by_shard(gather, [ids], [PartitionSpec()])
        # [n R, D/n] -> [R, D]: rows are split over devices, and columns are joined.
        return exchange(_look_up(shard, all_ids), 0, 1), all_ids

    def backward(all_ids: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
        zeros = jnp.zeros(shape, wide_dtype(dtype))
        _, pullback = jax.vjp(lambda table: _look_up(table, all_ids), zeros)
        # Backwards in the other direction: each device gets its columns of the gradients of all
        # ids.
        (d_columns,) = pullback(exchange(grad, 1, 0).astype(zeros.dtype))
        return constrain_tensor([d_columns.astype(dtype)], [table.tensor])[0], None

    look_up = jax.custom_vjp(lambda shard, ids: forward(shard, ids)[0])
    look_up.defvjp(forward, backward)
    return look_up(table.shard, ids)
