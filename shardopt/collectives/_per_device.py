"""The per-device view, and its convention for gradients.

Inside `per_device` **a gradient is local**: it is the gradient of this device's own loss, whether
the parameter is a copy or a shard. Nothing is summed implicitly. Each gradient is then reduced
exactly once: by `all_reduce`, or by `reduce_scatter` (the backward pass of `all_gather` does the
same).

`jax.shard_map` offers two conventions. With `check_vma=True` the gradient of a replicated parameter
arrives summed, so another `psum` makes it N times too large. With `check_vma=False` it arrives
local. We take the second. The first also raises a type error for every user loss that scans with a
constant initial carry (an RNN's zeros), although the same loss runs on one device.
"""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, PartitionSpec

from shardopt.collectives._buckets import all_reduce_buckets
from shardopt.core import Arrays, PyTree
from shardopt.mesh import mesh_under_trace, spec_axes, trace_without_mesh
from shardopt.trace._jaxprs import equations

TENSOR = "tensor"
_CONSTRAINT_ERROR = "can only refer to Auto axes"  # raised by jax's with_sharding_constraint
# raised by equinox's loops
_MESH_TYPE_ERROR = "Closure-converted function called with different dynamic arguments"


def per_device(
    f: Callable[..., PyTree], mesh: Mesh, *, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """Return `f` in the per-device view of every mesh axis but tensor, which is left to the
    partitioner.

    A tensor axis of size 1 is left to the partitioner only if `f` constrains an array over tensor.
    Otherwise every axis is manual: callbacks run, and jax can locate a NaN.

    Args:
      f: a function of local shards. Gradients taken inside it are local (see the module).
      mesh: the mesh.
      in_specs: how the arguments are sharded over the manual axes; tensor is not named.
      out_specs: the same for the results. The results must be equal along every axis that is not
        named.
    """

    def in_manual_view(f: Callable[..., PyTree], manual: frozenset[str]) -> Callable[..., PyTree]:
        return jax.shard_map(
            f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False
        )

    # mesh axis   tensor > 1       tensor = 1
    # tensor      partitioner      manual, unless f constrains over it
    # others      manual           manual
    all_axes = frozenset(mesh.axis_names)
    if mesh.shape.get(TENSOR, 1) > 1:
        return in_manual_view(f, all_axes - {TENSOR})

    def run(*args: PyTree) -> PyTree:
        try:
            inlined = jax.jit(in_manual_view(f, all_axes), inline=True)  # a jaxpr is traced again
            # Only a trace can tell whether f, with the user's loss in it, constrains an array over
            # tensor.
            program = inlined.trace(*args).jaxpr
        except ValueError as error:
            error_text = f"{error} {error.__cause__}"
        else:
            error_text = _CONSTRAINT_ERROR if _constrains_tensor(program.jaxpr) else ""
            # checks for NaN and infinity need to run the function itself
            if not (error_text or jax.debug_nans.value or jax.debug_infs.value):
                return inlined(*args)
        if _CONSTRAINT_ERROR in error_text:
            return in_manual_view(f, all_axes - {TENSOR})(*args)
        of_user = trace_without_mesh(f) if _MESH_TYPE_ERROR in error_text else f
        return in_manual_view(of_user, all_axes)(*args)

    return run


def _constrains_tensor(jaxpr: Jaxpr) -> bool:
    """Return whether a program constrains an array over tensor by a `NamedSharding`.

    Jax refuses it only when lowering.
    """
    specs = (
        getattr(eqn.params["sharding"], "spec", ())
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "sharding_constraint"
    )
    return any(TENSOR in spec_axes(spec) for spec in specs)


def has_auto_tensor() -> bool:
    """Return whether the mesh under trace leaves its tensor axis to the partitioner."""
    return TENSOR in mesh_under_trace().auto_axes


def constrain_tensor(leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]) -> Arrays:
    """Constrain local arrays to their `specs` over tensor, if tensor is left to the partitioner."""
    if not has_auto_tensor():
        return list(leaves)
    return [
        jax.lax.with_sharding_constraint(x, spec) for x, spec in zip(leaves, specs, strict=True)
    ]


def all_reduce(
    leaves: Sequence[jax.Array], axes: Sequence[str], specs: Sequence[PartitionSpec] | None = None
) -> Arrays:
    """Sum local arrays over mesh axes.

    Args:
      leaves: local arrays.
      axes: mesh axis names; if one device has all shares, the leaves are returned as they are.
      specs: how each leaf is sharded over the tensor axis; by default not at all.
    """
    # XLA:CPU copies an array that it sums over one device, and waits for it on another thread
    if not axes or jax.lax.axis_size(tuple(axes)) == 1:
        return list(leaves)
    specs = [PartitionSpec()] * len(leaves) if specs is None else specs
    return shard_by_shard(lambda xs: all_reduce_buckets(xs, tuple(axes)), leaves, specs)


def shard_by_shard(
    f: Callable[[Arrays], Arrays], leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]
) -> Arrays:
    """Apply a collective to leaves in a nested region that is manual over the tensor axis as well.

    The partitioner does not split a manual collective over an axis that is left to it: it would
    first gather the operand over tensor. XLA:CPU also aborts on a half-precision sum while some
    axis is left to the partitioner. If tensor is manual already, as it mostly is at size 1, the
    collective is called directly.

    Args:
      f: maps arrays to as many arrays, and does not change how tensor splits them.
      leaves: local arrays.
      specs: how each leaf is sharded over the tensor axis.
    """
    if not leaves:
        return []
    if not has_auto_tensor():
        return f(list(leaves))
    inner = jax.shard_map(
        lambda *xs: f(list(xs)),
        in_specs=tuple(specs),
        out_specs=list(specs),
        axis_names={TENSOR},
        check_vma=False,
    )
    return inner(*leaves)
