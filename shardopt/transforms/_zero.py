"""`zero`: each device stores its shard of an optimizer state, between the steps of one's own loop."""

from typing import Any

import optax
from jax.sharding import Mesh

from shardopt.core import PyTree, calling, check_transformation
from shardopt.core._axis import is_bound
from shardopt.transforms._state_form import check_mesh
from shardopt.transforms._zero_constraints import ByConstraints
from shardopt.transforms._zero_shards import ByShards


@calling("zero")
def zero(
    inner: optax.GradientTransformation, axis_name: str, mesh: Mesh | None = None
) -> optax.GradientTransformationExtraArgs:
    """Shard the state of any optimizer over an axis, in your own loop: ZeRO stage 1.

    Args:
      inner: any optax transformation, or a whole chain.
      axis_name: the mesh axis, or the axis of the `pmap`, that the state is sharded over.
      mesh: the mesh of a loop under `jax.jit`; by default the mesh of `jax.set_mesh`. Not needed
        where the axis is bound.

    Returns:
      An optax transformation. It takes the gradients of the whole batch: under `jit` as they are,
      under `shard_map` and `pmap` after their mean.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if the mesh has no such axis. In `update`, if the axis is neither bound nor on a
        mesh, or the types of `shard_map` show that gradients are not averaged yet.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> mesh = so.make_mesh(data=8)
      >>> tx = so.transforms.zero(optax.adam(1e-3), "data", mesh)
      >>> state = tx.init({"w": jnp.zeros((64, 32))})
      >>> state[0].mu["w"].addressable_shards[0].data.shape
      (8, 32)

    **Equivalence**: equal to `inner`, for any optimizer: it computes on whole leaves.

    **Placement**: under `jit` the state keeps its structure, and each leaf is sharded along its
    largest dim that the axis divides. A leaf without such a dim stays whole. A state that comes in
    whole, because of `out_shardings` or `filter_shard` of your own, gives a warning when the step
    is compiled. Programs of several processes and of jax's compilation cache are not looked at:
    their text may not hold the address of a function. A step that `jax.export` stores does not warn
    either. An eager `init` warns of parameters whose largest dim an Auto axis shards already. Under
    `shard_map` and `pmap` leaves are flattened, padded and cut, except leaves with fewer numbers
    than devices. A state that was made outside of the axis is whole until the first update.
    `so.transforms.on_mesh` carries it in and out of `shard_map`. A device that gets the shards of
    another one, after an unreplicate and a replicate, returns NaN.

    **Communication**: under `jit` the partitioner reduce-scatters gradients, or all-reduces and
    cuts them, and all-gathers updates. If the axis is bound, the state is all-gathered at each
    update: memory is saved between steps. `so.zero` sends gradients and updates only.

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      2020, section 5.1.
    """
    tx = check_transformation("inner", inner)
    if mesh is not None:
        check_mesh(mesh, axis_name)
    by_constraints = ByConstraints(tx, axis_name, mesh)
    by_shards = ByShards(tx, axis_name)

    @calling("zero")
    def init(params: PyTree) -> PyTree:
        if is_bound(axis_name):
            return by_shards.init(params)
        return by_constraints.init(params)

    @calling("zero")
    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if is_bound(axis_name):
            return by_shards.update(updates, state, params, **extra)
        return by_constraints.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)
