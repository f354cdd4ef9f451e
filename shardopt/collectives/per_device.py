"""The per-device view, and the convention for what a gradient means in it.

Inside `per_device` **a gradient is local**: that of this device's own loss, whether the parameter is a copy or a
shard, and nothing is summed until somebody asks for it. Each gradient is then reduced exactly once: by `sum_over`,
or by `scatter_sum` (which is also what the backward pass of `gather` does).

`jax.shard_map` offers two conventions. With `check_vma=True` the gradient of a replicated parameter arrives already
summed, so a further `psum` makes it N times too large; with `check_vma=False` it arrives local. We take the second,
because the first also makes a type error of every user loss that scans with a constant initial carry (an RNN's
zeros), although the same loss runs on one device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

TENSOR = "tensor"


def per_device(f: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `f` in the per-device view of every mesh axis but tensor, which stays with the partitioner.

    Args:
      f: a function of local shards. Gradients taken inside it are local (see the module).
      mesh: the mesh.
      in_specs: how the arguments are split over the manual axes; tensor is not named.
      out_specs: likewise for the results. An axis that is not named must hold equal values along it.
    """
    manual = frozenset(mesh.axis_names) - {TENSOR}
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)


def sum_over(leaves: Sequence[Any], axes: Sequence[str], specs: Sequence[PartitionSpec] | None = None) -> list[Any]:
    """Sum local arrays over mesh axes.

    Args:
      leaves: local arrays.
      axes: mesh axis names; with none the leaves are returned as they are.
      specs: how each leaf is split over the tensor axis; by default none is.
    """
    if not axes:
        return list(leaves)
    specs = [PartitionSpec()] * len(leaves) if specs is None else specs
    return with_tensor_shards(lambda xs, _: [jax.lax.psum(x, tuple(axes)) for x in xs], leaves, specs)


def with_tensor_shards(
    f: Callable[[list[Any], list[int]], list[Any]], leaves: Sequence[Any], specs: Sequence[PartitionSpec]
) -> list[Any]:
    """Apply a collective to leaves, those that are split over tensor shard by shard.

    The partitioner does not split a manual collective over an axis left to it: it gathers the operand over tensor
    first. So leaves that are split over tensor go through a nested region that is manual over tensor as well.

    Args:
      f: maps arrays, and their positions in `leaves`, to as many arrays.
      leaves: local arrays.
      specs: how each leaf is split over the tensor axis.
    """
    split = [i for i, spec in enumerate(specs) if names_tensor(spec)]
    whole = [i for i in range(len(leaves)) if i not in set(split)]
    results = dict(zip(whole, f([leaves[i] for i in whole], whole), strict=True))
    if split:
        split_specs = [specs[i] for i in split]
        inner = jax.shard_map(
            lambda *xs: f(list(xs), split),
            in_specs=tuple(split_specs),
            out_specs=split_specs,
            axis_names={TENSOR},
            check_vma=False,
        )
        results |= dict(zip(split, inner(*[leaves[i] for i in split]), strict=True))
    return [results[i] for i in range(len(leaves))]


def names_tensor(spec: PartitionSpec) -> bool:
    """Return whether a spec splits some dim over the tensor axis."""
    return any(entry == TENSOR or (isinstance(entry, tuple) and TENSOR in entry) for entry in spec)
