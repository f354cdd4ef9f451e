"""Where leaves live: which dim of a parameter is sharded over which axis, or why none is; optimizer state by likeness."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import KeyPath

from shardopt.core.block_model import BLOCKS
from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, Rules, leaves_with_paths
from shardopt.mesh import spec_axes
from shardopt.partition.rules import match_rules

COLUMNS = 1
"""The dim of a table [V, D] that its columns are."""
EXPERT = "expert"


class ShardAxes(NamedTuple):
    """The mesh axes, taken together, that a placement shards over.

    Attributes:
      names: data, and expert and context where there are such.
      size: how many devices these are.
    """

    names: tuple[str, ...]
    size: int

    def without(self, axis: str, sizes: Mapping[str, int]) -> "ShardAxes":
        """Return the others."""
        return shard_axes({name: sizes[name] for name in sizes if name != axis})

    @property
    def entry(self) -> str | tuple[str, ...]:
        """What stands for them in a `PartitionSpec`, and names them in a collective."""
        return self.names[0] if len(self.names) == 1 else self.names

    def __str__(self) -> str:
        return f"{' x '.join(self.names)}={self.size}"


def shard_axes(sizes: Mapping[str, int]) -> ShardAxes:
    """Return the axes to shard over, of a mesh whose axes have these sizes."""
    names = tuple(axis for axis in ("data", EXPERT, "context") if axis == "data" or axis in sizes)
    return ShardAxes(names, math.prod(sizes[axis] for axis in names))


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Where one parameter leaf can live. Not a pytree: a tree of plans mirrors the parameters.

    Attributes:
      path: its key path, "blocks/attention/qkv".
      shape: its global shape, with the stacked dim where there is one.
      dtype: its dtype.
      tensor: its spec over the tensor axis alone, one entry per dim.
      dim: the dim that is sharded over `axes` wherever a placement shards it; None if it stays replicated.
      reason: why `dim` is None; empty otherwise.
      stacked: whether dim 0 counts blocks.
      trainable: whether the optimizer updates it.
      pipelined: whether dim 0, which counts blocks, is sharded over the pipeline axis.
      spread: the dim of a stacked leaf that is sharded over pipeline where stages have unequally many blocks; None if none is.
      axes: the axes that a placement shards over, as in a `PartitionSpec`; of a leaf of experts all but expert.
      experts: whether the first dim (of a block) counts experts and is sharded over the expert axis.
      owned: where optimizer state and update live if that is on whole matrices; None: where `spec` says.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    tensor: PartitionSpec
    dim: int | None
    reason: str
    stacked: bool
    trainable: bool
    pipelined: bool = False
    axes: str | tuple[str, ...] = "data"
    experts: bool = False
    owned: PartitionSpec | None = None
    spread: int | None = None

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes that a placement shards over."""
        return (self.axes,) if isinstance(self.axes, str) else self.axes

    def state_spec(self, *, sharded: bool) -> PartitionSpec:
        """Return where optimizer state of its shape, and the update, live: on owners, or where the leaf itself would."""
        return self.owned if sharded and self.owned is not None else self.spec(sharded=sharded)

    def spec(self, *, sharded: bool) -> PartitionSpec:
        """Return the full spec: tensor, pipeline and expert, and what a placement shards over as well if `sharded`."""
        return PartitionSpec(*map(_either, self.tensor, self.data_spec(sharded=sharded)))

    def of_block(self) -> "LeafPlan":
        """Return the plan of one block of a stacked leaf, without the stacked dim."""
        dim = None if self.dim is None else self.dim - 1
        here = {"shape": self.shape[1:], "tensor": PartitionSpec(*self.tensor[1:]), "dim": dim}
        return dataclasses.replace(self, **here, stacked=False, pipelined=False, spread=None)

    def data_spec(self, *, sharded: bool) -> PartitionSpec:
        """Return the spec over all but tensor, for the per-device view."""
        entries = [self.axes if sharded and dim == self.dim else None for dim in range(len(self.shape))]
        if self.pipelined:
            entries[0] = "pipeline"
        if self.spread is not None:
            entries[self.spread] = "pipeline"
        if self.experts:
            entries[int(self.stacked)] = EXPERT
        return PartitionSpec(*entries)


def _either(one: str | None, other: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    return other if one is None else one


def plan_leaves(
    abstract_params: PyTree,
    *,
    who: str,
    mesh: Mesh,
    rules: Rules,
    stacked: bool,
    pipelined: bool = False,
    even: bool = True,
    min_shard_elements: int,
    is_trainable: Callable[[str], bool],
    tables: Sequence[str] = (),
    expert_leaves: Sequence[str] = (),
) -> PyTree:
    """Plan every leaf: rules place tensor, and data takes the largest dim it divides, of a leaf of experts the first one.

    Kernels of grouped products read [E, D, F] as it lies: gathered along F, it would be transposed before each.

    Args:
      abstract_params: the parameters, of which only shape and dtype are read.
      who: the function that the user called, for messages.
      mesh: the mesh.
      rules: see `match_rules`; for stacked leaves they speak of one block.
      stacked: whether the leaves of "blocks" are stacked along dim 0.
      pipelined: whether the stacked leaves are sharded over the pipeline axis.
      even: whether its stages have equally many blocks; if not, it takes a free dim of a block, the largest that it divides.
      min_shard_elements: leaves (one block of a stacked leaf) with fewer elements stay replicated over data.
      is_trainable: whether a floating leaf with this key path is trained.
      tables: key paths of leaves [V, D] of which data takes the columns, if it divides them and tensor does not take them.
      expert_leaves: regexes of key paths of leaves whose first dim (of a block) counts experts.

    Returns:
      A tree like the parameters, of `LeafPlan`.

    Raises:
      ValueError: if rules do not fit, a dim named by a rule is not divisible by the axis size, or the tensor
        axis is above 1 and no leaf is sharded over it; likewise of experts and the expert axis.
    """
    leaves = leaves_with_paths(abstract_params)
    is_stacked = [stacked and path.split("/")[0] == BLOCKS for path, _ in leaves]
    shapes = [leaf.shape[1:] if one else leaf.shape for (_, leaf), one in zip(leaves, is_stacked, strict=True)]
    paths = [path for path, _ in leaves]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        what = f"{plural(len(twice), 'key path')} written alike belong to several leaves."
        raise ValueError(format_error(who, what, twice, "rename a key; '/' in a key reads as nesting."))
    specs = match_rules(rules, list(zip(paths, shapes, strict=True)), who=who)
    _check_tensor(who, paths, shapes, specs, mesh.shape.get("tensor", 1))
    experts = _experts(who, paths, shapes, specs, expert_leaves, mesh.shape.get(EXPERT))
    plans, every = [], shard_axes(mesh.shape)
    for (path, leaf), shape, spec, block in zip(leaves, shapes, specs, is_stacked, strict=True):
        axes = every.without(EXPERT, mesh.shape) if path in experts else every
        of_experts = any(re.search(one, path) for one in expert_leaves)
        if of_experts and mesh.shape.get("tensor", 1) == 1:
            # one device splits nothing, and its dim may be the first that is free
            spec = PartitionSpec(*[None] * len(shape))
        taken = PartitionSpec(EXPERT, *spec[1:]) if path in experts else spec
        dim, reason = data_dim(shape, taken, axes, min_shard_elements)
        if dim is not None and of_experts:
            dim = min(divisible_dims(shape, axes.size, tuple(entry is not None for entry in taken)))
        if path in tables and dim is not None and spec[COLUMNS] is None and shape[COLUMNS] % axes.size == 0:
            dim = COLUMNS
        spread = None
        if block and pipelined and not even and math.prod(shape) >= min_shard_elements:
            used = tuple(entry is not None or at == dim for at, entry in enumerate(taken))
            spread = largest_divisible_dim(shape, mesh.shape["pipeline"], used)
        plans.append(
            LeafPlan(
                path=path,
                shape=leaf.shape,
                dtype=leaf.dtype,
                tensor=PartitionSpec(*([None] if block else []), *spec),
                dim=None if dim is None else dim + block,
                reason=reason,
                stacked=block,
                trainable=jnp.issubdtype(leaf.dtype, jnp.inexact) and is_trainable(path),
                pipelined=block and pipelined and even,
                axes=axes.entry,
                experts=path in experts,
                spread=None if spread is None else spread + 1,
            )
        )
    return jax.tree.unflatten(jax.tree.structure(abstract_params), plans)


def largest_divisible_dim(shape: tuple[int, ...], size: int, taken: tuple[bool, ...]) -> int | None:
    """Return the largest free dim divisible by an axis size, the first of equals; None if there is none."""
    return max(divisible_dims(shape, size, taken), key=lambda dim: shape[dim], default=None)


def divisible_dims(shape: tuple[int, ...], size: int, taken: tuple[bool, ...]) -> list[int]:
    """Return the free dims divisible by an axis size."""
    return [dim for dim, length in enumerate(shape) if length and length % size == 0 and not taken[dim]]


def data_dim(shape: tuple[int, ...], spec: PartitionSpec, axes: ShardAxes, least: int) -> tuple[int | None, str]:
    """Return the dim that the axes take and "", or None and why the leaf stays replicated."""
    elements = math.prod(shape)
    taken = tuple(entry is not None for entry in spec)
    if elements < least:
        return None, f"{plural(elements, 'element')}, fewer than min_shard_elements={least}"
    dim = largest_divisible_dim(shape, axes.size, taken)
    if dim is not None:
        return dim, ""
    if largest_divisible_dim(shape, axes.size, (False,) * len(shape)) is not None:
        names = " and ".join(dict.fromkeys(spec_axes(spec)))
        return None, f"shape {shape}: the only dim divisible by {axes} is split over {names}"
    return None, f"shape {shape}: no dim is divisible by {axes}"


def _experts(
    who: str,
    paths: list[str],
    shapes: list[tuple[int, ...]],
    specs: list[PartitionSpec],
    patterns: Sequence[str],
    size: int | None,
) -> frozenset[str]:
    """Return the leaves whose first dim is sharded over the expert axis: those that are named, where there is such an axis."""
    if idle := [repr(one) for one in patterns if not any(re.search(one, path) for path in paths)]:
        what = f"{plural(len(idle), 'pattern')} of expert_leaves matched no parameter."
        fix = f"match a key path, such as: {', '.join(paths[:8])}."
        raise ValueError(format_error(who, what, idle, fix))
    if size is None:
        return frozenset()
    uneven, taken, found = [], [], []
    for path, shape, spec in zip(paths, shapes, specs, strict=True):
        if any(re.search(one, path) for one in patterns):
            found.append(path)
            if not shape or shape[0] % size:
                left = f"dim 0 is {shape[0]}, remainder {shape[0] % size}" if shape else "no dim counts experts"
                uneven.append(f"{path}: shape {shape}; {left}")
            elif spec[0] is not None:
                taken.append(f"{path}: shape {shape}")
    axis = f"mesh axis 'expert' (size {size})"
    if uneven:
        fix = "name in expert_leaves only leaves [experts, ...], or choose a size that divides the experts."
        raise ValueError(
            format_error(who, f"{plural(len(uneven), 'leaf')} of experts cannot be split over {axis}.", uneven, fix)
        )
    if taken:
        what = f"rules split the first dim of {plural(len(taken), 'leaf')} of experts, which {axis} splits."
        raise ValueError(format_error(who, what, taken, "let the rules name other dims of these leaves."))
    if size > 1 and not found:
        what = f"{axis} is above 1, but no leaf is split over it."
        fix = "name the leaves whose first dim counts experts, expert_leaves=[regex, ...], or make the mesh with expert=1."
        raise ValueError(format_error(who, what, fix=fix))
    return frozenset(found)


def _check_tensor(
    who: str, paths: list[str], shapes: list[tuple[int, ...]], specs: list[PartitionSpec], size: int
) -> None:
    uneven, used = [], False
    for path, shape, spec in zip(paths, shapes, specs, strict=True):
        for dim, entry in enumerate(spec):
            if entry is not None:
                used = True
                if shape[dim] % size:
                    uneven.append(f"{path}: shape {shape}; dim {dim} is {shape[dim]}, remainder {shape[dim] % size}")
    if uneven:
        what = f"{plural(len(uneven), 'parameter leaf')} cannot be split over mesh axis 'tensor' (size {size})."
        raise ValueError(
            format_error(who, what, uneven, "pad the dim, change the rule, or choose another tensor size.")
        )
    if size > 1 and not used:
        what = f"mesh axis 'tensor' (size {size}) is above 1, but nothing is split over it."
        fix = "give rules=[(regex, PartitionSpec), ...] that name 'tensor', or make the mesh with tensor=1."
        raise ValueError(format_error(who, what, fix=fix))


def state_specs(
    abstract_state: PyTree,
    plans: Sequence[tuple[KeyPath, LeafPlan]],
    *,
    sharded: bool,
    axes: ShardAxes,
    sizes: Mapping[str, int],
    min_shard_elements: int,
) -> PyTree:
    """Give every leaf of an optimizer state its `PartitionSpec`.

    A leaf whose key path ends in that of a parameter of the same shape (a moment) lives as the parameter would.
    So does one with as many dims, each of them cut as evenly (the scale of every 64 numbers of a moment). One that belongs to
    a parameter on owners, and has its blocks (a preconditioner [L, m, m]), lives with it.
    Any other leaf (Adafactor's factored moments, SM3's accumulators, a count) is a leaf of its own: sharded over
    data on the largest dim that it divides. The update runs in the global view, so this choice never changes
    the numbers, only the bytes.

    Args:
      abstract_state: the state, of which only shapes are read.
      plans: the trainable parameters' key paths (as jax gives them) and plans.
      sharded: whether the placement shards optimizer state over data.
      axes: what the placement shards over.
      sizes: mesh axis name -> size.
      min_shard_elements: leaves with fewer elements stay replicated.

    Returns:
      A tree like the state, of `PartitionSpec`.
    """
    by_path = {tuple(path): plan for path, plan in plans}

    def place(path, leaf):
        for start in range(len(path) + 1):  # the longest ending first
            plan = by_path.get(tuple(path[start:]))
            if plan is not None and (plan.shape == leaf.shape or _is_coarser(leaf.shape, plan, sharded, sizes)):
                return plan.state_spec(sharded=sharded)
        ends = range(len(path), 0, -1) if sharded and leaf.shape else ()
        for plan in (by_path.get(tuple(path[start:end])) for end in ends for start in range(end)):
            if plan is not None and plan.owned is not None and leaf.shape[0] % plan.shape[0] == 0:
                return PartitionSpec(plan.owned[0], *[None] * (len(leaf.shape) - 1))
        free = PartitionSpec(*[None] * len(leaf.shape))
        dim, _ = data_dim(leaf.shape, free, axes, min_shard_elements) if sharded else (None, "")
        return PartitionSpec(*(axes.entry if one == dim else None for one in range(len(leaf.shape))))

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def _is_coarser(shape: tuple[int, ...], plan: LeafPlan, sharded: bool, sizes: Mapping[str, int]) -> bool:
    """Return whether a leaf has one number for each tile of a parameter, and is cut where tiles end."""
    if len(shape) != len(plan.shape) or not all(
        n and length % n == 0 for length, n in zip(plan.shape, shape, strict=True)
    ):
        return False
    spec = plan.state_spec(sharded=sharded)
    return math.prod(shape) > 1 and all(
        n % math.prod(sizes[axis] for axis in spec_axes((entry,))) == 0 for n, entry in zip(shape, spec, strict=False)
    )
