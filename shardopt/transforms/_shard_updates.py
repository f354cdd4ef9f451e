"""`shard_updates`: each device stores and updates its shard of the optimizer state."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.collectives._shards import psum_scatter
from shardopt.core._arguments import check_transformation
from shardopt.core._axis import AxisName, axis_names, axis_size
from shardopt.core._errors import calling
from shardopt.core._types import PyTree, leaves_with_paths, wide_dtype
from shardopt.reducers import PerDevice
from shardopt.reducers._axis import all_gather_packed, all_to_all_packed, check_not_summed
from shardopt.reducers._mean import buckets_of
from shardopt.reducers._reducer import check_alike, check_leaves
from shardopt.transforms._shard_checks import check_elementwise


class ShardUpdatesState(NamedTuple):
    """The state of `shard_updates`: the state of the wrapped transformation for this device's
    shards.
    """

    inner: PerDevice


@calling("shard_updates")
def shard_updates(
    inner: optax.GradientTransformation, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Average gradients by a reduce-scatter, update this device's shard, and gather the updates:
    ZeRO-1 in a chain.

    u = all_gather(inner(shard of mean_d g_d)). Use it instead of `average_gradients`. After
    `average_gradients` the result is the same, but gradients are reduced twice.

    Args:
      inner: an optimizer that acts element by element.
      axis_name: the axis, or a tuple of axes, of the `shard_map`, `pmap` or `vmap` around `init`
        and `update`.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind; in `init` and `update`, if a leaf is not
        floating.
      ValueError: in `init` and `update`, if the axis is not bound; in `update`, if `inner` cannot
        be shown to act element by element, or the types show that the gradients are summed already.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.shard_updates(optax.adam(1.0), "data")
      >>> def step(g):
      ...     state = tx.init(g)
      ...     return tx.update(g, state)[0], state.inner.value[0].mu
      >>> update, mu = jax.vmap(step, axis_name="data")(jnp.array([[1.0, 2.0, 3.0], [1.0, 0.0, -5.0]]))
      >>> print(update[0].round(3), mu.shape)
      [-1. -1.  1.] (2, 2)

    **Equivalence**: equal to `inner` on the mean gradients, up to summation order, if `inner` acts
    element by element. Any other `inner` raises an error before it runs. The check traces `inner`
    for whole leaves on one device, and for shards, and compares the two traces. Both must have the
    same operations except for shapes, and each operation must be known to act on elements in place.
    So the check finds

    - a norm, a factored moment or a transpose,
    - a mask by size or by position, or a factor of 1/fan-in,
    - random numbers.

    A sum over a shard is allowed if a collective completes it before it is used, and if padding
    adds 0 to it. An example is `so.transforms.clip_by_global_norm(..., split=True)`: inside
    `shard_updates` every leaf is sharded, also a leaf without dims. Extra arguments of `update`
    must be the same on all devices.

    **Placement**: the state of `inner` is sharded over N devices. Each leaf is flattened, padded,
    and cut into N equal shards. A shard keeps the number of dims of its leaf ([n, 1, ..., 1]), so
    that masks by key path or number of dims work. A leaf without dims is on one shard, and zero on
    all others. `init` needs the axis too: `so.reducers.Stacked` makes the state outside
    `shard_map`.

    **Communication** per update and device, for Psi gradient bytes: reduce-scatter and all-gather,
    2(N-1)/N Psi, one bucket at a time. For gradients in half precision an all-to-all replaces the
    reduce-scatter, and sums are in fp32.

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      2020, section 5.1.
    """
    tx = check_transformation("inner", inner)
    functions = _ShardUpdates(tx, axis_name, axis_names(axis_name))
    return optax.GradientTransformationExtraArgs(functions.init, functions.update)


class _ShardUpdates(NamedTuple):
    """The functions of `shard_updates`, with its arguments."""

    tx: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    names: tuple[str, ...]

    @calling("shard_updates")
    def init(self, params: PyTree) -> ShardUpdatesState:
        check_leaves(params)
        return ShardUpdatesState(PerDevice(self.tx.init(self.shards_of(params))))

    @calling("shard_updates")
    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ShardUpdatesState]:
        check_leaves(updates)
        num_devices = axis_size(self.axis_name)
        leaves, treedef = jax.tree.flatten(updates)
        check_not_summed(self.axis_name, [path for path, _ in leaves_with_paths(updates)], leaves)
        if params is not None:
            check_alike("the parameters", updates, params)
        shards = treedef.unflatten(_mean_shards(leaves, num_devices, self.axis_name))
        param_shards = None if params is None else self.shards_of(params)
        check_elementwise(
            self.tx, self.names, (updates, params), (shards, param_shards), extra_args
        )
        update_shards, inner_state = self.tx.update(
            shards, state.inner.value, param_shards, **extra_args
        )
        gathered = _gather_leaves(
            jax.tree.leaves(update_shards), [leaf.shape for leaf in leaves], self.axis_name
        )
        return treedef.unflatten(gathered), ShardUpdatesState(PerDevice(inner_state))

    def shards_of(self, tree: PyTree) -> PyTree:
        """Return this device's shard of each leaf."""
        num_devices, device_index = axis_size(self.axis_name), jax.lax.axis_index(self.axis_name)

        def shard_of(leaf):
            flat_shard = jax.lax.dynamic_index_in_dim(
                _as_rows(leaf, num_devices), device_index, keepdims=False
            )
            return _with_dims(flat_shard, leaf.ndim)

        return jax.tree.map(shard_of, tree)


def _mean_shards(leaves: list[jax.Array], num_devices: int, axis_name: AxisName) -> list[jax.Array]:
    """Return this device's shard of the mean of each leaf, reduced one bucket at a time."""
    leaf_rows = [_as_rows(leaf, num_devices) for leaf in leaves]
    shards = [_with_dims(rows[0], leaf.ndim) for rows, leaf in zip(leaf_rows, leaves, strict=True)]
    for bucket in buckets_of([rows.size for rows in leaf_rows], [leaf.dtype for leaf in leaves]):
        buffer = jnp.concatenate([leaf_rows[i] for i in bucket.members], axis=1)
        mean, start = _scatter_mean(buffer, num_devices, axis_name), 0
        for i in bucket.members:
            stop = start + leaf_rows[i].shape[1]
            shards[i] = _with_dims(mean[start:stop], leaves[i].ndim)
            start = stop
    return shards


def _scatter_mean(rows: jax.Array, num_devices: int, axis_name: AxisName) -> jax.Array:
    if rows.dtype == wide_dtype(rows.dtype):
        return psum_scatter(rows, axis_name, 0)[0] / num_devices
    received = all_to_all_packed([rows], axis_name)[0].astype(wide_dtype(rows.dtype))
    return (received.sum(axis=0) / num_devices).astype(rows.dtype)


def _gather_leaves(
    shards: list[jax.Array], shapes: list[tuple[int, ...]], axis_name: AxisName
) -> list[jax.Array]:
    leaves = list(shards)
    for i, shard in enumerate(shards):
        if not shard.size:
            leaves[i] = shard.reshape(shapes[i])
    for bucket in buckets_of([shard.size for shard in shards], [shard.dtype for shard in shards]):
        gathered = all_gather_packed([shards[i].reshape(1, -1) for i in bucket.members], axis_name)
        for i, rows in zip(bucket.members, gathered, strict=True):
            leaves[i] = rows.reshape(-1)[: math.prod(shapes[i])].reshape(shapes[i])
    return leaves


def _as_rows(leaf: jax.Array, num_rows: int) -> jax.Array:
    """Flatten a leaf, pad it with zeros, and cut it into equal rows."""
    length = -(-leaf.size // num_rows)
    return jnp.pad(jnp.reshape(leaf, -1), (0, num_rows * length - leaf.size)).reshape(
        num_rows, length
    )


def _with_dims(flat: jax.Array, ndim: int) -> jax.Array:
    return flat.reshape(flat.shape + (1,) * (ndim - 1) if ndim else ())
