"""`shard_updates`: each device keeps and updates its part of the optimizer state."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.collectives.shards import psum_scatter
from shardopt.core.arguments import check_transformation
from shardopt.core.types import leaves_with_paths, wide_dtype
from shardopt.reducers import PerDevice
from shardopt.reducers.axis import (
    AxisName,
    all_gather_packed,
    all_to_all_packed,
    axis_names,
    axis_size,
    check_not_summed,
)
from shardopt.reducers.mean import buckets_of
from shardopt.reducers.reducer import check_alike, check_leaves
from shardopt.transforms.shard_checks import check_elementwise


class ShardUpdatesState(NamedTuple):
    """The state of `shard_updates`: that of the wrapped transformation, over this device's shards."""

    inner: PerDevice


def shard_updates(inner: optax.GradientTransformation, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """Average gradients by a reduce-scatter, update this device's shard, and gather the updates: ZeRO-1 in a chain.

    u = all_gather(inner(shard of mean_d g_d)). It takes the place of `average_gradients`; after it, the result is
    the same, but gradients are reduced twice.

    **Equivalence**: equal to `inner` on the mean gradients, up to summation order, for what acts element by element;
    anything else is refused before it runs. `inner` is traced for whole leaves on one device and for shards, and the
    traces are read side by side: they must be the same operations but for shapes, each of them known to act on
    elements in place. So a norm, a factored moment, a transpose, a mask by size or by position, a factor of 1/fan-in
    or random numbers are all found. A sum over a shard is let through if a collective completes it before it is used,
    and if padding adds 0 to it, as in `so.transforms.clip_by_global_norm(..., split=True)`: in here every leaf is
    sharded, those without dims too. Extra arguments of `update` must be the same on all devices.

    **Placement**: the state of `inner` is sharded N ways: each leaf flattened, padded, and cut into N equal shards,
    which keep the number of dims ([n, 1, ..., 1]), so that masks by key path or number of dims work. A leaf without
    dims is one shard's, and zero on all others. `init` needs the axis, too: so.reducers.init_state makes the state outside.

    **Communication** an update, per device, for Psi gradient bytes: reduce-scatter and all-gather,
    2(N-1)/N Psi, a bucket at a time. Gradients in half precision take an all-to-all for the reduce-scatter, and are
    summed in fp32.

    Args:
      inner: an optimizer that acts element by element.
      axis_name: the axis, or a tuple of axes, of the `shard_map`, `pmap` or `vmap` around `init` and `update`.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind; in `init` and `update`, if a leaf is not floating.
      ValueError: in `init` and `update`, if the axis is not bound; in `update`, if `inner` cannot be shown to act
        element by element, or the gradients are known to be summed already.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.shard_updates(optax.adam(1.0), "data")
      >>> def step(g):
      ...     state = tx.init(g)
      ...     return tx.update(g, state)[0], state.inner.value[0].mu
      >>> update, mu = jax.vmap(step, axis_name="data")(jnp.array([[1.0, 2.0, 3.0], [1.0, 0.0, -5.0]]))
      >>> print(update[0].round(3), mu.shape)
      [-1. -1.  1.] (2, 2)

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.1.
    """
    who = "shard_updates"
    tx = check_transformation(who, "inner", inner)
    names = axis_names(who, axis_name)

    def shards_of(tree):
        count, me = axis_size(who, axis_name), jax.lax.axis_index(axis_name)

        def one(leaf):
            own = jax.lax.dynamic_index_in_dim(_rows(leaf, count), me, keepdims=False)
            return _with_dims(own, leaf.ndim)

        return jax.tree.map(one, tree)

    def init(params):
        check_leaves(who, params)
        return ShardUpdatesState(PerDevice(tx.init(shards_of(params))))

    def update(updates, state, params=None, **extra_args: Any):
        check_leaves(who, updates)
        count = axis_size(who, axis_name)
        leaves, treedef = jax.tree.flatten(updates)
        check_not_summed(who, axis_name, [path for path, _ in leaves_with_paths(updates)], leaves)
        if params is not None:
            check_alike(who, "the parameters", updates, params)
        shards = treedef.unflatten(_mean_shards(leaves, count, axis_name))
        own_params = None if params is None else shards_of(params)
        check_elementwise(who, tx, names, (updates, params), (shards, own_params), extra_args)
        found, inner_state = tx.update(shards, state.inner.value, own_params, **extra_args)
        gathered = _gather_leaves(jax.tree.leaves(found), [leaf.shape for leaf in leaves], axis_name)
        return treedef.unflatten(gathered), ShardUpdatesState(PerDevice(inner_state))

    return optax.GradientTransformationExtraArgs(init, update)


def _mean_shards(leaves: list[jax.Array], count: int, axis_name: AxisName) -> list[jax.Array]:
    """Return this device's shard of the mean of each leaf, reduced a bucket at a time."""
    rows = [_rows(leaf, count) for leaf in leaves]
    shards = [_with_dims(row[0], leaf.ndim) for row, leaf in zip(rows, leaves, strict=True)]
    for bucket in buckets_of([row.size for row in rows], [leaf.dtype for leaf in leaves]):
        buffer = jnp.concatenate([rows[i] for i in bucket.members], axis=1)
        mean, start = _scatter_mean(buffer, count, axis_name), 0
        for i in bucket.members:
            stop = start + rows[i].shape[1]
            shards[i] = _with_dims(mean[start:stop], leaves[i].ndim)
            start = stop
    return shards


def _scatter_mean(rows: jax.Array, count: int, axis_name: AxisName) -> jax.Array:
    if rows.dtype == wide_dtype(rows.dtype):
        return psum_scatter(rows, axis_name, 0)[0] / count
    received = all_to_all_packed([rows], axis_name)[0].astype(wide_dtype(rows.dtype))
    return (received.sum(axis=0) / count).astype(rows.dtype)


def _gather_leaves(shards: list[jax.Array], shapes: list[tuple[int, ...]], axis_name: AxisName) -> list[jax.Array]:
    leaves = list(shards)
    for i, shard in enumerate(shards):
        if not shard.size:
            leaves[i] = shard.reshape(shapes[i])
    for bucket in buckets_of([shard.size for shard in shards], [shard.dtype for shard in shards]):
        gathered = all_gather_packed([shards[i].reshape(1, -1) for i in bucket.members], axis_name)
        for i, rows in zip(bucket.members, gathered, strict=True):
            leaves[i] = rows.reshape(-1)[: math.prod(shapes[i])].reshape(shapes[i])
    return leaves


def _rows(leaf: jax.Array, count: int) -> jax.Array:
    """Return a leaf flat, padded with zeros and cut into as many rows as there are devices."""
    length = -(-leaf.size // count)
    return jnp.pad(jnp.reshape(leaf, -1), (0, count * length - leaf.size)).reshape(count, length)


def _with_dims(flat: jax.Array, ndim: int) -> jax.Array:
    return flat.reshape(flat.shape + (1,) * (ndim - 1) if ndim else ())
