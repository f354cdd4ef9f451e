"""The per-device view, and the convention for what a gradient means in it.

Inside `per_device` **a gradient is local**: that of this device's own loss, whether the parameter is a copy or a
shard, and nothing is summed until somebody asks for it. Each gradient is then reduced exactly once: by `all_reduce`,
or by `reduce_scatter` (which is also what the backward pass of `all_gather` does).

`jax.shard_map` offers two conventions. With `check_vma=True` the gradient of a replicated parameter arrives already
summed, so a further `psum` makes it N times too large; with `check_vma=False` it arrives local. We take the second,
because the first also makes a type error of every user loss that scans with a constant initial carry (an RNN's
zeros), although the same loss runs on one device.
"""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from shardopt.collectives.buckets import all_reduce_buckets
from shardopt.core.jaxprs import equations
from shardopt.core.types import PyTree
from shardopt.mesh import mesh_under_trace, spec_axes, trace_without_mesh

TENSOR = "tensor"
_CONSTRAINED = "can only refer to Auto axes"  # jax's, of with_sharding_constraint
_MARKED = "Closure-converted function called with different dynamic arguments"  # equinox's, whose loops compare types


def per_device(f: Callable[..., PyTree], mesh: Mesh, *, in_specs: PyTree, out_specs: PyTree) -> Callable[..., PyTree]:
    """Return `f` in the per-device view of every mesh axis but tensor, which stays with the partitioner.

    A tensor axis of size 1 stays with it only where `f` constrains an array over tensor, as it would above 1. Else nothing
    is left to the partitioner: callbacks run, and jax finds the place of a NaN.

    Args:
      f: a function of local shards. Gradients taken inside it are local (see the module).
      mesh: the mesh.
      in_specs: how the arguments are sharded over the manual axes; tensor is not named.
      out_specs: likewise for the results. An axis that is not named must hold equal values along it.
    """

    def view(f: Callable[..., PyTree], manual: frozenset[str]) -> Callable[..., PyTree]:
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)

    every = frozenset(mesh.axis_names)
    if mesh.shape.get(TENSOR, 1) > 1:
        return view(f, every - {TENSOR})

    def run(*args: PyTree) -> PyTree:
        try:
            program, shapes = jax.make_jaxpr(view(f, every), return_shape=True)(*args)
        except ValueError as error:
            said = f"{error} {error.__cause__}"
        else:
            said = _CONSTRAINED if _constrains_tensor(program.jaxpr) else ""
            if not (said or jax.debug_nans.value or jax.debug_infs.value):  # these run the function itself
                return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(program)(*jax.tree.leaves(args)))
        if _CONSTRAINED in said:
            return view(f, every - {TENSOR})(*args)
        return view(trace_without_mesh(f) if _MARKED in said else f, every)(*args)

    return run


def _constrains_tensor(jaxpr: Jaxpr) -> bool:
    """Return whether a program constrains an array over tensor by a `NamedSharding`, which jax refuses when it lowers it."""
    specs = (
        getattr(eqn.params["sharding"], "spec", ())
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "sharding_constraint"
    )
    return any(TENSOR in spec_axes(spec) for spec in specs)


def has_auto_tensor() -> bool:
    """Return whether the mesh under trace leaves its tensor axis to the partitioner."""
    return TENSOR in mesh_under_trace().auto_axes


def constrain_tensor(leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]) -> list[jax.Array]:
    """Constrain local arrays to where `specs` place them over tensor, where that is left to the partitioner."""
    if not has_auto_tensor():
        return list(leaves)
    return [jax.lax.with_sharding_constraint(x, spec) for x, spec in zip(leaves, specs, strict=True)]


def all_reduce(
    leaves: Sequence[jax.Array], axes: Sequence[str], specs: Sequence[PartitionSpec] | None = None
) -> list[jax.Array]:
    """Sum local arrays over mesh axes.

    Args:
      leaves: local arrays.
      axes: mesh axis names; with none the leaves are returned as they are.
      specs: how each leaf is sharded over the tensor axis; by default none is.
    """
    if not axes:
        return list(leaves)
    specs = [PartitionSpec()] * len(leaves) if specs is None else specs
    return shard_by_shard(lambda xs: all_reduce_buckets(xs, tuple(axes)), leaves, specs)


def shard_by_shard(
    f: Callable[[list[jax.Array]], list[jax.Array]], leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]
) -> list[jax.Array]:
    """Apply a collective to leaves in a nested region that is manual over the tensor axis as well.

    The partitioner does not split a manual collective over an axis that is left to it: it would gather the operand
    over tensor first. (XLA:CPU moreover aborts on a half-precision sum while some axis is left to the partitioner.)
    Where tensor is manual already, as it mostly is at size 1, there is nothing to do.

    Args:
      f: maps arrays to as many arrays, not moving their tensor split.
      leaves: local arrays.
      specs: how each leaf is sharded over the tensor axis.
    """
    if not leaves:
        return []
    if not has_auto_tensor():
        return f(list(leaves))
    inner = jax.shard_map(
        lambda *xs: f(list(xs)), in_specs=tuple(specs), out_specs=list(specs), axis_names={TENSOR}, check_vma=False
    )
    return inner(*leaves)
