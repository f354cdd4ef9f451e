"""`on_mesh`: links whose state differs between devices, in a loop of one's own under `jit` or
`shard_map`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardopt.core import (
    Arrays,
    PyTree,
    calling,
    check_transformation,
    leaves_with_paths,
    merge_replicas,
    path_text,
    replaced,
    type_error,
    value_error,
)
from shardopt.core._axis import is_bound
from shardopt.core._device_state import DeviceNumber, PerDevice, is_marked, map_by_mark, state_specs
from shardopt.transforms._local_gradients import OF_DEVICE
from shardopt.transforms._state_form import check_alike, check_mesh


@calling("on_mesh")
def on_mesh(
    tx: optax.GradientTransformation, mesh: Mesh, axis_name: str, *, own_params: bool = False
) -> "OnMesh":
    """Run a chain with links of `so.transforms` on a mesh, in your own loop.

    Some links keep a state that differs between devices, and need the gradient of each device.
    `on_mesh` stores this state as global arrays [N, ...], sharded over the axis.

    Args:
      tx: an optax transformation, such as a chain with `average_gradients`.
      mesh: the mesh of the loop.
      axis_name: the mesh axis that the links name; the batch is split over it.
      own_params: whether each device has parameters of its own, [N, ...], as `local_updates` needs.

    Returns:
      An optax transformation, with two further functions:

      - `init(params)` makes the state of all devices, placed on the mesh.
      - `update(grads, state, params)` under `jit` takes the gradients of all devices, [N, ...], see
        `per_device_grads`. Inside of your own `shard_map` it takes the gradients of this device. On
        a mesh with Explicit axes it takes gradients whose type is unreduced over the axis.
      - `specs(state)` gives the `PartitionSpec` of each leaf, for `in_specs` and `out_specs`.
      - `resized(state)` carries a state of another number of devices to this mesh.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if the mesh has no such axis.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> mesh = so.make_mesh(data=8)
      >>> reducer = so.reducers.error_feedback(so.reducers.int8())
      >>> chain = optax.chain(so.transforms.average_gradients("data", reducer), optax.sgd(1.0))
      >>> tx = so.transforms.on_mesh(chain, mesh, "data")
      >>> loss = lambda params, x: jnp.mean(x @ params)
      >>> grads_of = so.transforms.per_device_grads(jax.value_and_grad(loss), mesh, "data")
      >>> @jax.jit
      ... def step(params, state, x):
      ...     value, grads = grads_of(params, x)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params, state = step(jnp.zeros(2), tx.init(jnp.zeros(2)), jnp.ones((16, 2)))
      >>> print(params.round(2))
      [-1. -1.]
    """
    check_mesh(mesh, axis_name)
    chain = _ChainOnMesh(check_transformation("tx", tx), mesh, axis_name, own_params)
    transformation = OnMesh(chain.init, chain.update)
    transformation.specs = chain.specs
    transformation.resized = chain.resized
    return transformation


class OnMesh(optax.GradientTransformationExtraArgs):
    """What `on_mesh` returns: optax must know it as a transformation, or it drops weights and
    losses around it.
    """

    specs: Callable[[PyTree], PyTree]
    resized: Callable[[PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class _ChainOnMesh:
    """The functions of what `on_mesh` returns."""

    tx: optax.GradientTransformationExtraArgs
    mesh: Mesh
    axis_name: str
    own_params: bool

    def init(self, params: PyTree) -> PyTree:
        """Return the first state; inside of `shard_map` the state as it is handed in."""
        if is_bound(self.axis_name):
            return map_by_mark(
                self.tx.init(params), lambda leaf: jnp.asarray(leaf)[None], _unchanged
            )
        stacked_init = jax.vmap(
            self.tx.init,
            in_axes=0 if self.own_params else None,
            axis_name=self.axis_name,
            axis_size=self.mesh.shape[self.axis_name],
        )
        # vmap stacks every leaf. Those without a mark are equal on all devices, so one copy stays.
        state = map_by_mark(stacked_init(params), _unchanged, lambda leaf: leaf[0])

        def place(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
            sharding = NamedSharding(self.mesh, spec)
            if AxisType.Explicit in self.mesh.axis_types:  # where a constraint is an assertion
                return jax.reshard(leaf, sharding)
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree.map(place, state, self.specs(state))

    def specs(self, state: PyTree) -> PyTree:
        """Return the `PartitionSpec` of each leaf of a state."""
        return state_specs(state, self.axis_name)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the updates, and the new state.

        Args:
          updates: under `jit` the gradients of all devices [N, ...]; inside of `shard_map` the
            gradients of this device.
          state: the state, as `init` returns it or as `shard_map` hands it in.
          params: the parameters, the same on all devices; with `own_params` the parameters of all
            devices [N, ...], or as `shard_map` hands them in.
          **extra: further arguments of the transformation, the same on all devices. `weight` has
            the weight of each device, [N], under `jit`, and is a scalar inside of `shard_map`.

        Raises:
          ValueError: under `jit`, if gradients or weights do not have a first dim of N, or the
            updates differ between devices that have the same parameters.
        """
        if is_bound(self.axis_name):
            return self._update_device(updates, state, params, **extra)
        if _are_unreduced(updates, self.axis_name):
            return self._update_unreduced(updates, state, params, **extra)
        self._check_stacked(updates)

        weights = self._weights(extra)

        def run(
            grads: PyTree, state: PyTree, params: PyTree, weights: PyTree, extra: dict[str, Any]
        ):
            extra = extra | device_part(weights)
            with jax.named_scope(OF_DEVICE):
                grads = device_part(grads)
            updates, state = self._update_device(grads, state, params, **extra)
            if not self.own_params:
                self._check_shared(updates)
            return updates, state

        specs = self.specs(state)
        stacked = PartitionSpec(self.axis_name)
        of_params = stacked if self.own_params else PartitionSpec()
        in_specs = stacked, specs, of_params, stacked, PartitionSpec()
        run = manual(run, self.mesh, self.axis_name, in_specs, (of_params, specs))
        return run(updates, state, params, weights, extra)

    def _weights(self, extra: dict[str, Any]) -> dict[str, jax.Array]:
        """Take the weights of all devices, if there are any, out of the further arguments."""
        weight = extra.pop("weight", None)
        if weight is None:
            return {}
        size = self.mesh.shape[self.axis_name]
        if jnp.shape(weight) != (size,):
            problem = f"under jit weight has shape [{size}], got {jnp.shape(weight)}."
            fix = "pass the weight of each device, such as mask.reshape(size, -1).sum(1)."
            with calling("on_mesh"):
                raise value_error(problem, fix=fix)
        return {"weight": weight}

    def _update_unreduced(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the updates for gradients whose type says that they are not summed yet."""
        size = self.mesh.shape[self.axis_name]
        if extra.get("weight") is not None:
            problem = (
                "unreduced gradients belong to the loss of the whole batch, and take no weight."
            )
            with calling("on_mesh"):
                raise value_error(problem, fix="leave it out.")

        def run(parts: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]):
            # the mean of these is the sum of the parts
            with jax.named_scope(OF_DEVICE):
                grads = jax.tree.map(lambda part: part * size, parts)
            return self._update_device(grads, state, params, **extra)

        specs = self.specs(state)
        replicated = PartitionSpec()
        unreduced = PartitionSpec(unreduced=frozenset([self.axis_name]))
        in_specs = unreduced, specs, replicated, replicated
        # No pcast makes an unreduced value a varying one, so types cannot be checked.
        run = jax.shard_map(
            run, mesh=self.mesh, in_specs=in_specs, out_specs=(replicated, specs), check_vma=False
        )
        return run(updates, state, params, extra)

    @calling("on_mesh.resized")
    def resized(self, state: PyTree) -> PyTree:
        """Return a state of another number of devices for this mesh: each device gets the mean of
        the error memories.

        The next update adds the mean of the memories to the mean of the gradients, so nothing is
        lost.

        Raises:
          ValueError: if the state has leaves marked `PerDevice`. They have no meaning on other
            devices.
        """
        nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_marked)
        per_device_paths = [
            path_text(path)
            for path, node in nodes
            if isinstance(node, PerDevice) and jax.tree.leaves(node)
        ]
        if per_device_paths:
            problem = "state that belongs to its device cannot be carried to another axis size."
            fix = "make it again with init, or use so.zero or so.ddp, whose state can be resharded."
            raise value_error(problem, per_device_paths, fix)
        size = self.mesh.shape[self.axis_name]

        def merge(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(merge_replicas(leaf), (size, *leaf.shape[1:]))

        def carry(node: PyTree) -> PyTree:
            if isinstance(node, DeviceNumber):
                return DeviceNumber(jnp.arange(size, dtype=jnp.int32))
            return jax.tree.map(merge, node) if is_marked(node) else node

        return jax.tree.map(carry, state, is_leaf=is_marked)

    def _update_device(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        device_state = map_by_mark(state, self._device_leaf, _unchanged)
        device_params = device_part(params) if self.own_params else params
        try:
            updates, device_state = self.tx.update(updates, device_state, device_params, **extra)
        except TypeError as error:
            if "manual ax" not in str(error):
                raise
            problem = (
                "a transformation with branches, such as optax.apply_if_finite, is around a link that"
                " averages: gradients are a mean in one branch alone."
            )
            fix = (
                "put so.transforms.average_gradients before it; or so.transforms.skip_anomalies in"
                " the place of optax.apply_if_finite."
            )
            with calling("on_mesh"):
                raise type_error(problem, fix=fix) from error
        self._check_shared(device_state)
        if self.own_params:
            updates = jax.tree.map(lambda leaf: leaf[None], updates)
        return updates, map_by_mark(device_state, lambda leaf: jnp.asarray(leaf)[None], _unchanged)

    def _device_leaf(self, stacked: jax.Array) -> jax.Array:
        if stacked.shape[:1] == (1,):
            return stacked[0]
        problem = (
            f"the state is not that of {self.mesh.shape[self.axis_name]} devices, or is not split:"
            f" a leaf has shape {stacked.shape} on this device."
        )
        with calling("on_mesh"):
            raise value_error(problem, fix="use tx.specs(state), or tx.resized(state).")

    def _check_shared(self, tree: PyTree) -> None:
        """Refuse what types show to differ between devices, but no link marks."""
        problem = f"updates or states differ along {self.axis_name!r}: no link before averages."
        fix = (
            "put so.transforms.average_gradients before it in the chain; or, to train apart,"
            " so.transforms.local_updates around it, with own_params=True."
        )
        with calling("on_mesh"):
            check_alike(
                map_by_mark(tree, lambda leaf: None, _unchanged), self.axis_name, problem, fix
            )

    def _check_stacked(self, updates: PyTree) -> None:
        size = self.mesh.shape[self.axis_name]
        wrong = [
            f"{path or 'gradient'}: shape {jnp.shape(leaf)}"
            for path, leaf in leaves_with_paths(updates)
            if jnp.shape(leaf)[:1] != (size,)
        ]
        if wrong:
            problem = f"under jit it takes the gradients of {size} devices, [{size}, ...]."
            fix = (
                "make them with so.transforms.per_device_grads(jax.value_and_grad(loss_fn), mesh,"
                f" {self.axis_name!r})."
            )
            with calling("on_mesh"):
                raise value_error(problem, wrong, fix)


@calling("per_device_grads")
def per_device_grads(
    value_and_grad: Callable[..., tuple[Any, PyTree]],
    mesh: Mesh,
    axis_name: str,
    *,
    own_params: bool = False,
) -> Callable[..., tuple[Any, PyTree]]:
    """Return `f(params, *batch)`, which differentiates a loss on the rows of each device.

    Under `jit` jax gives the gradient of the whole batch, summed already. Links that compress
    gradients, or train apart, need the gradient of each device.

    Args:
      value_and_grad: such as `jax.value_and_grad(loss_fn)`, or equinox's; called as
        `value_and_grad(params, *batch)` with the rows of one device.
      mesh: the mesh of the loop.
      axis_name: the mesh axis that splits the rows: dim 0 of each leaf of `batch`.
      own_params: whether each device has parameters of its own, [N, ...].

    Returns:
      A function that returns the mean of the values of all devices, and the gradients of all
      devices [N, ...], sharded over the axis. Leaves of `params` that are no arrays are passed on.

    Raises:
      TypeError: if `mesh` is no mesh, or `axis_name` no name.
      ValueError: if the mesh has no such axis; from the returned function, if a leaf of the batch
        has no rows that N divides.
    """
    check_mesh(mesh, axis_name)

    def run(params: PyTree, *batch: PyTree) -> tuple[Any, PyTree]:
        size = mesh.shape[axis_name]
        wrong = [
            f"{path}: shape {jnp.shape(leaf)}"
            for path, leaf in leaves_with_paths(batch)
            if not jnp.ndim(leaf) or jnp.shape(leaf)[0] % size
        ]
        if wrong:
            problem = f"{size} devices along {axis_name!r} do not divide the rows of the batch."
            with calling("per_device_grads"):
                raise value_error(problem, wrong, f"use a multiple of {size} rows.")
        leaves, treedef = jax.tree.flatten(params)
        places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

        def differentiate(arrays: Arrays, batch: PyTree) -> tuple[Any, PyTree]:
            if own_params:
                device_arrays = device_part(arrays)
            else:
                # Types are checked here, and jax would sum the gradient of an invarying parameter
                # over devices.
                device_arrays = jax.lax.pcast(arrays, axis_name, to="varying")
            device_leaves = replaced(leaves, places, device_arrays)
            value, grads = value_and_grad(treedef.unflatten(device_leaves), *batch)
            value = jax.tree.map(lambda x: jax.lax.pmean(x, axis_name), value)
            return value, jax.tree.map(lambda leaf: leaf[None], grads)

        replicated = PartitionSpec()
        split = PartitionSpec(axis_name)
        arrays = [leaves[i] for i in places]
        in_specs = split if own_params else replicated, split
        return manual(differentiate, mesh, axis_name, in_specs, (replicated, split))(arrays, batch)

    return run


def manual(
    f: Callable[..., Any], mesh: Mesh, axis_name: str, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """Return `shard_map` over one axis; the partitioner keeps the others, if they are larger than
    1.
    """
    auto_axes = [axis for axis in mesh.axis_names if axis != axis_name and mesh.shape[axis] > 1]
    axes = {axis_name} if auto_axes else set(mesh.axis_names)
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


def _are_unreduced(updates: PyTree, axis_name: str) -> bool:
    """Return whether the types of gradients say that they are not summed over an axis yet."""
    leaves = jax.tree.leaves(updates)
    unreduced = [axis_name in jax.typeof(leaf).sharding.spec.unreduced for leaf in leaves]
    return bool(unreduced) and all(unreduced)


def device_part(stacked: PyTree) -> PyTree:
    """Return the part of this device of leaves [1, ...]."""
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def _unchanged(leaf: PyTree) -> PyTree:
    return leaf
