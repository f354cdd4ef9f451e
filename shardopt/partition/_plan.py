"""Plan the sharding of leaves: which axis shards which dim of a parameter, or why none does, and of
optimizer state.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import KeyPath

from shardopt.core import (
    PyTree,
    Rules,
    in_averages,
    is_inexact,
    leaves_with_paths,
    plural,
    value_error,
    with_leaves,
)
from shardopt.core._block_model import BLOCKS
from shardopt.mesh import size_along, spec_axes
from shardopt.partition._divisible import not_divided, sizes_that_divide
from shardopt.partition._rules import match_rules, matches, patterns_of

Shape = tuple[int, ...]
COLUMNS = 1
"""The dim of the columns of a table [V, D]."""
EXPERT = "expert"


class ShardAxes(NamedTuple):
    """The mesh axes that a placement shards over; together they act as one axis.

    Attributes:
      names: data, and expert and context if the mesh has them.
      size: the number of devices along these axes.
    """

    names: tuple[str, ...]
    size: int

    def without(self, axis: str, sizes: Mapping[str, int]) -> "ShardAxes":
        """Return the axes except one."""
        return shard_axes({name: sizes[name] for name in sizes if name != axis})

    @property
    def entry(self) -> str | tuple[str, ...]:
        """The axes as an entry of a `PartitionSpec`, and as the axis of a collective."""
        return self.names[0] if len(self.names) == 1 else self.names

    def __str__(self) -> str:
        return f"{' x '.join(self.names)}={self.size}"


def shard_axes(sizes: Mapping[str, int]) -> ShardAxes:
    """Return the axes to shard over on a mesh with these axis sizes."""
    names = tuple(axis for axis in ("data", EXPERT, "context") if axis == "data" or axis in sizes)
    return ShardAxes(names, size_along(sizes, names))


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """The possible shardings of one parameter leaf.

    Not a pytree: a tree of plans mirrors the parameters.

    Attributes:
      path: the key path, such as "blocks/attention/qkv".
      shape: the global shape, including the stacked dim if there is one.
      dtype: the dtype.
      tensor: the spec over the tensor axis alone, one entry per dim.
      dim: the dim that is sharded over `axes` if a placement shards the leaf; None if it stays
        replicated.
      reason: why `dim` is None; empty otherwise.
      stacked: whether dim 0 counts blocks.
      trainable: whether the optimizer updates the leaf.
      pipelined: whether dim 0, which counts blocks, is sharded over the pipeline axis.
      axes: the axes that a placement shards over, as in a `PartitionSpec`; for a leaf of experts
        all of them but expert.
      experts: whether the first dim (of a block) counts experts and is sharded over the expert
        axis.
      owned: the spec of optimizer state and update if they are sharded by whole matrices; None if
        they use `spec`.
      spread: the dim of a stacked leaf that is sharded over pipeline if stages have unequal numbers
        of blocks; else None.
      whole: why tensor does not split the leaf although a rule says so; else empty.
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
    whole: str = ""

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes that a placement shards the leaf over, as a tuple."""
        return (self.axes,) if isinstance(self.axes, str) else self.axes

    def state_spec(self, *, sharded: bool) -> PartitionSpec:
        """Return the spec of the update, and of optimizer state with the shape of the leaf: `owned`
        if set, else `spec`.
        """
        return self.owned if sharded and self.owned is not None else self.spec(sharded=sharded)

    def spec(self, *, sharded: bool) -> PartitionSpec:
        """Return the full spec: tensor, pipeline and expert.

        If `sharded`, also the axes of the placement.
        """
        entries = zip(self.tensor, self.data_spec(sharded=sharded), strict=True)
        return PartitionSpec(*(data if tensor is None else tensor for tensor, data in entries))

    def of_block(self) -> "LeafPlan":
        """Return the plan of one block of a stacked leaf, without the stacked dim."""
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            tensor=PartitionSpec(*self.tensor[1:]),
            dim=None if self.dim is None else self.dim - 1,
            stacked=False,
            pipelined=False,
            spread=None,
        )

    def data_spec(self, *, sharded: bool) -> PartitionSpec:
        """Return the spec over all axes but tensor, for the per-device view."""
        entries = [
            self.axes if sharded and dim == self.dim else None for dim in range(len(self.shape))
        ]
        if self.pipelined:
            # Dim 0 counts blocks: a stage holds the blocks that it stores, and no block is gathered
            # over pipeline.
            entries[0] = "pipeline"
        if self.spread is not None:
            entries[self.spread] = "pipeline"
        if self.experts:
            entries[int(self.stacked)] = EXPERT
        return PartitionSpec(*entries)


class LeafPlanOptions(NamedTuple):
    """The part of a strategy's options that decides how leaves are sharded.

    Attributes:
      rules: see `match_rules`; for stacked leaves rules describe one block.
      stacked: whether the leaves of "blocks" are stacked along dim 0.
      min_shard_elements: leaves (one block of a stacked leaf) with fewer elements stay replicated
        over data.
      is_trainable: whether a floating leaf with this key path is trained.
      pipelined: whether the stacked leaves are sharded over the pipeline axis.
      even: whether all pipeline stages have equally many blocks. If not, pipeline shards the
        largest free dim of a block that it divides.
      tables: key paths of leaves [V, D] that data shards by columns, if it divides the columns and
        tensor does not shard them.
    """

    rules: Rules
    stacked: bool
    min_shard_elements: int
    is_trainable: Callable[[str], bool]
    pipelined: bool = False
    even: bool = True
    tables: Sequence[str] = ()


class _Leaf(NamedTuple):
    """A parameter leaf before it is planned.

    Attributes:
      path: its key path.
      array: its shape and dtype.
      is_block: whether dim 0 counts blocks.
      shape: the shape, of one block if dim 0 counts blocks.
      spec: the spec by the rules, of `shape`.
      counts_experts: whether the first dim (of a block) counts experts, by the rules.
      whole: why tensor does not split the leaf although a rule says so; else empty.
    """

    path: str
    array: jax.ShapeDtypeStruct
    is_block: bool
    shape: Shape
    spec: PartitionSpec
    counts_experts: bool
    whole: str = ""


def plan_leaves(abstract_params: PyTree, mesh: Mesh, options: LeafPlanOptions) -> PyTree:
    """Plan every leaf: rules place tensor, and data shards the largest dim that it divides (see
    `largest_divisible_dim`).

    For expert leaves data shards the first dim that it divides. Kernels of grouped products read
    expert weights [E, D, F] as they are stored. If the weights were gathered along F, they would be
    transposed before each product.

    Args:
      abstract_params: the parameters; only shapes and dtypes are read.
      mesh: the mesh.
      options: see `LeafPlanOptions`.

    Returns:
      A tree like the parameters, of `LeafPlan`.

    Raises:
      ValueError: if rules do not fit, or the axis size does not divide a dim that a rule names. If
        the tensor axis is above 1 and shards no leaf. If the expert axis has the same problems with
        expert leaves.
    """
    tensor_size = mesh.shape.get("tensor", 1)
    whole_patterns = patterns_of(options.rules, "if_divisible")
    leaves = [
        _whole_if_indivisible(leaf, tensor_size, whole_patterns)
        for leaf in _ruled_leaves(abstract_params, options)
    ]
    _check_tensor(leaves, tensor_size, whole_patterns)
    if EXPERT in mesh.shape:
        _check_experts(leaves, mesh.shape[EXPERT])
    plans = [_plan_leaf(leaf, mesh, options) for leaf in leaves]
    return with_leaves(abstract_params, plans)


def _ruled_leaves(abstract_params: PyTree, options: LeafPlanOptions) -> list[_Leaf]:
    arrays = leaves_with_paths(abstract_params)
    paths = [path for path, _ in arrays]
    repeated = sorted({path for path in paths if paths.count(path) > 1})
    if repeated:
        problem = f"{plural(len(repeated), 'key path')} written alike belong to several leaves."
        raise value_error(problem, repeated, "rename a key; '/' in a key reads as nesting.")
    is_block = {path: options.stacked and path.split("/")[0] == BLOCKS for path in paths}
    shapes = {path: array.shape[1:] if is_block[path] else array.shape for path, array in arrays}
    specs = match_rules(options.rules, list(shapes.items()))
    experts = patterns_of(options.rules, "experts")
    return [
        _Leaf(path, array, is_block[path], shapes[path], spec, matches(experts, path))
        for (path, array), spec in zip(arrays, specs, strict=True)
    ]


def _whole_if_indivisible(
    leaf: _Leaf, size: int, patterns: Sequence[str | re.Pattern[str]]
) -> _Leaf:
    """Return the leaf without the dims that tensor does not divide, if a rule allows it."""
    dims = [i for i, entry in enumerate(leaf.spec) if entry is not None and leaf.shape[i] % size]
    if not dims or not matches(patterns, leaf.path):
        return leaf
    reason = not_divided(dims[0], leaf.shape[dims[0]], "tensor", size)
    entries = [None if i in dims else entry for i, entry in enumerate(leaf.spec)]
    return leaf._replace(spec=PartitionSpec(*entries), whole=reason)


def _plan_leaf(leaf: _Leaf, mesh: Mesh, options: LeafPlanOptions) -> LeafPlan:
    spec = leaf.spec
    if mesh.shape.get("tensor", 1) == 1:
        # a tensor axis of size 1 splits nothing, so data may take the dim that it would split
        spec = PartitionSpec(*[None] * len(leaf.shape))
    spec_with_expert = spec
    axes = shard_axes(mesh.shape)
    experts = leaf.counts_experts and EXPERT in mesh.shape
    if experts:
        spec_with_expert = PartitionSpec(EXPERT, *spec[1:])
        # Devices along expert hold different experts already, so there is no copy left to shard.
        axes = axes.without(EXPERT, mesh.shape)
    dim, reason = data_dim(leaf.shape, spec_with_expert, axes, options.min_shard_elements)
    if dim is not None:
        dim = _preferred_dim(leaf, spec_with_expert, axes.size, options.tables, dim)
    num_leading = int(leaf.is_block)
    is_staged = leaf.is_block and options.pipelined
    spread = None
    if is_staged and not options.even and math.prod(leaf.shape) >= options.min_shard_elements:
        # Pipeline gets a dim that neither tensor, expert nor data takes.
        taken = _with_entry(spec_with_expert, dim, axes)
        spread = largest_divisible_dim(leaf.shape, mesh.shape["pipeline"], taken)
    return LeafPlan(
        path=leaf.path,
        shape=leaf.array.shape,
        dtype=leaf.array.dtype,
        tensor=PartitionSpec(*[None] * num_leading, *spec),
        dim=None if dim is None else num_leading + dim,
        reason=reason,
        stacked=leaf.is_block,
        trainable=is_inexact(leaf.array) and options.is_trainable(leaf.path),
        pipelined=is_staged and options.even,
        axes=axes.entry,
        experts=experts,
        spread=None if spread is None else num_leading + spread,
        whole=leaf.whole,
    )


def _preferred_dim(
    leaf: _Leaf, spec: PartitionSpec, size: int, tables: Sequence[str], largest_dim: int
) -> int:
    """Return the dim of a leaf that data shards, one that data divides."""
    dims = divisible_dims(leaf.shape, size, spec)
    if leaf.path in tables and COLUMNS in dims:
        return COLUMNS
    # of experts the first, because kernels of grouped products read weights as they are stored
    return min(dims) if leaf.counts_experts else largest_dim


def _with_entry(spec: PartitionSpec, dim: int | None, axes: ShardAxes) -> PartitionSpec:
    """Return the spec with the axes on one dim, or unchanged."""
    return PartitionSpec(*(axes.entry if i == dim else entry for i, entry in enumerate(spec)))


def largest_divisible_dim(shape: Shape, size: int, taken: Iterable[object]) -> int | None:
    """Return the largest free dim divisible by an axis size (the first of equal dims), or None.

    A dim is free if `taken`, the entries of a `PartitionSpec`, has None for it.

    In large leaves, dims come first whose shards fill the tiles of TPUs, and next the dims whose
    shards fill parts of tiles.
    """
    is_large = math.prod(shape) >= _LARGE

    def preference(dim: int) -> tuple[int, int]:
        rows = shape[dim] // size
        # -rows % 16: the rows of padding in the last tile.
        fills_tiles = -rows % _TILE_ROWS <= rows * _MOST_PADDING
        return _TILE_ROWS if fills_tiles or not is_large else math.gcd(rows, _TILE_ROWS), shape[dim]

    return max(divisible_dims(shape, size, taken), key=preference, default=None)


_LARGE = 2**20
_TILE_ROWS = 16
_MOST_PADDING = 0.05
"""The elements of a leaf that is large, the rows of a tile of 2-byte numbers, and the part of them
that may be padding. XLA:TPU copies other shards before it sends them, or sends all-reduces of
padded buffers. 56 rows of [28672, 8192] on each of 512 devices (v5p:8x8x8) took 500 ms of a step of
Llama 3 70B, and 28 rows of [14336, 4096] took 70 ms of 8B."""


def divisible_dims(shape: Shape, size: int, taken: Iterable[object]) -> list[int]:
    """Return the free dims divisible by an axis size."""
    return [
        dim
        for dim, (length, axes) in enumerate(zip(shape, taken, strict=True))
        if length and length % size == 0 and axes is None
    ]


def data_dim(
    shape: Shape, spec: PartitionSpec, axes: ShardAxes, min_elements: int
) -> tuple[int | None, str]:
    """Return the dim that the axes shard and "", or None and the reason why the leaf stays
    replicated.
    """
    elements = math.prod(shape)
    if elements < min_elements:
        return None, f"{plural(elements, 'element')}, fewer than min_shard_elements={min_elements}"
    dim = largest_divisible_dim(shape, axes.size, spec)
    if dim is not None:
        return dim, ""
    # Asked again as if tensor took no dim: only the message needs to know.
    if divisible_dims(shape, axes.size, [None] * len(shape)):
        names = " and ".join(dict.fromkeys(spec_axes(spec)))
        return None, f"shape {shape}: the only dim divisible by {axes} is split over {names}"
    return None, f"shape {shape}: no dim is divisible by {axes}"


def _check_experts(leaves: Sequence[_Leaf], size: int) -> None:
    """Refuse, by a ValueError, leaves of experts that an expert axis of this size cannot split."""
    expert_leaves = [leaf for leaf in leaves if leaf.counts_experts]
    indivisible = [
        f"{leaf.path}: shape {leaf.shape}; {_remainder_of_experts(leaf.shape, size)}"
        for leaf in expert_leaves
        if not leaf.shape or leaf.shape[0] % size
    ]
    already_split = [
        f"{leaf.path}: shape {leaf.shape}"
        for leaf in expert_leaves
        if leaf.shape and leaf.spec[0] is not None
    ]
    axis = f"mesh axis 'expert' (size {size})"
    if indivisible:
        numbers = {leaf.shape[0] for leaf in expert_leaves if leaf.shape}
        fix = (
            f"choose {sizes_that_divide(EXPERT, numbers)}, or let rules name only leaves"
            " [experts, ...] as experts."
        )
        raise value_error(
            f"{plural(len(indivisible), 'leaf')} of experts cannot be split over {axis}.",
            indivisible,
            fix,
        )
    if already_split:
        problem = (
            f"rules split the first dim of {plural(len(already_split), 'leaf')} of experts, which"
            f" {axis} splits."
        )
        raise value_error(problem, already_split, "let the rules name other dims of these leaves.")
    if size > 1 and not expert_leaves:
        fix = (
            "name the leaves whose first dim counts experts, rules=[(regex, 'experts'), ...], or"
            " make the mesh with expert=1."
        )
        raise value_error(f"{axis} is above 1, but no leaf is split over it.", fix=fix)


def _remainder_of_experts(shape: Shape, size: int) -> str:
    if not shape:
        return "no dim counts experts"
    return not_divided(0, shape[0], EXPERT, size)


def _check_tensor(
    leaves: Sequence[_Leaf], size: int, whole_patterns: Sequence[str | re.Pattern[str]]
) -> None:
    indivisible = []
    lengths = set()
    is_split = False
    for leaf in leaves:
        may_be_whole = matches(whole_patterns, leaf.path)
        for dim, entry in enumerate(leaf.spec):
            if entry is None:
                continue
            is_split = True
            length = leaf.shape[dim]
            if not may_be_whole:
                lengths.add(length)
            if length % size:
                reason = not_divided(dim, length, "tensor", size)
                indivisible.append(f"{leaf.path}: shape {leaf.shape}; {reason}")
    if indivisible:
        problem = (
            f"{plural(len(indivisible), 'parameter leaf')} cannot be split over mesh axis 'tensor'"
            f" (size {size})."
        )
        fix = f"choose {sizes_that_divide('tensor', lengths)}, pad the dim, or change the rule."
        raise value_error(problem, indivisible, fix)
    if size > 1 and not is_split:
        problem = f"mesh axis 'tensor' (size {size}) is above 1, but nothing is split over it."
        fix = (
            "give rules=[(regex, PartitionSpec), ...] that name 'tensor', or make the mesh with"
            " tensor=1."
        )
        raise value_error(problem, fix=fix)


def state_specs(
    abstract_state: PyTree,
    plans: Sequence[tuple[KeyPath, LeafPlan]],
    *,
    sharded: bool,
    axes: ShardAxes,
    sizes: Mapping[str, int],
    min_shard_elements: int,
) -> PyTree:
    """Return the `PartitionSpec` of every leaf of an optimizer state.

    - A leaf whose key path ends in the path of a parameter of the same shape (a moment) is sharded
      like the parameter. So is a leaf with as many dims, if each dim is cut equally evenly (one
      scale for every 64 numbers of a moment).
    - A leaf that belongs to a parameter on owners and has its blocks (a preconditioner [L, m, m])
      is sharded by owners too. If data shards the matrices of the parameter, data shards the
      largest other dim of the leaf that it divides.
    - An average of the parameters (`average_params`) is never at owners: a step adds the parameters
      to it.
    - Any other leaf (Adafactor's factored moments, SM3's accumulators, a count) is sharded over
      data on the largest dim that data divides.

    The update runs in the global view, so this choice never changes the numbers, only the bytes.

    Args:
      abstract_state: the state; only shapes are read.
      plans: the key paths (as jax returns them) and plans of the trainable parameters.
      sharded: whether the placement shards optimizer state over data.
      axes: the axes that the placement shards over.
      sizes: mesh axis name -> size.
      min_shard_elements: leaves with fewer elements stay replicated.

    Returns:
      A tree like the state, of `PartitionSpec`.
    """
    by_path = {tuple(path): plan for path, plan in plans}

    def place(path, leaf, in_average):
        shape = leaf.shape
        plan = _plan_of_moment(path, shape, by_path, sharded, sizes)
        if plan is not None and in_average:
            return plan.spec(sharded=sharded)
        if plan is not None:
            return plan.state_spec(sharded=sharded)
        spec = PartitionSpec(*[None] * len(shape))
        if not sharded or not shape:
            return spec
        owned_plan = _plan_of_stack(path, shape, by_path)
        if owned_plan is None:
            return _with_data(spec, shape, axes, min_shard_elements)
        return _spec_of_stack(shape, owned_plan, axes, sizes, min_shard_elements)

    in_average = jax.tree.structure(abstract_state).unflatten(in_averages(abstract_state))
    return jax.tree_util.tree_map_with_path(place, abstract_state, in_average)


def _plan_of_moment(
    path: KeyPath,
    shape: Shape,
    plans: Mapping[KeyPath, LeafPlan],
    sharded: bool,
    sizes: Mapping[str, int],
) -> LeafPlan | None:
    """Return the plan of the parameter whose shape a leaf of the state has, or has more coarsely."""
    # the longest ending first: "kernel" may be a parameter next to "head/kernel"
    for start in range(len(path) + 1):
        plan = plans.get(path[start:])
        if plan is not None and (plan.shape == shape or _is_coarser(shape, plan, sharded, sizes)):
            return plan
    return None


def _plan_of_stack(
    path: KeyPath, shape: Shape, plans: Mapping[KeyPath, LeafPlan]
) -> LeafPlan | None:
    """Return the plan of the parameter on owners whose blocks a leaf of the state has."""
    # Any part of the path: a preconditioner may be below the path of its leaf, at .../kernel/0.
    ends = range(len(path), 0, -1)
    for plan in (plans.get(path[start:end]) for end in ends for start in range(end)):
        if plan is not None and plan.owned is not None and shape[0] % plan.shape[0] == 0:
            return plan
    return None


def _with_data(
    spec: PartitionSpec, shape: Shape, axes: ShardAxes, min_shard_elements: int
) -> PartitionSpec:
    """Return the spec with the axes on the largest free dim that they divide, if there is one."""
    dim, _ = data_dim(shape, spec, axes, min_shard_elements)
    return _with_entry(spec, dim, axes)


def _spec_of_stack(
    shape: Shape, plan: LeafPlan, axes: ShardAxes, sizes: Mapping[str, int], min_shard_elements: int
) -> PartitionSpec:
    """Return the spec of state that has the blocks of a parameter on owners."""
    assert plan.owned is not None
    spec = PartitionSpec(plan.owned[0], *[None] * (len(shape) - 1))
    if set(plan.shard_axes) <= set(spec_axes(spec)):
        return spec
    if plan.experts:
        axes = axes.without(EXPERT, sizes)
    return _with_data(spec, shape, axes, min_shard_elements)


def _is_coarser(shape: Shape, plan: LeafPlan, sharded: bool, sizes: Mapping[str, int]) -> bool:
    """Return whether a leaf has one number for each tile of a parameter, and shard borders fall
    between tiles.
    """
    if len(shape) != len(plan.shape) or not all(
        n and length % n == 0 for length, n in zip(plan.shape, shape, strict=True)
    ):
        return False
    spec = plan.state_spec(sharded=sharded)
    return math.prod(shape) > 1 and all(
        n % size_along(sizes, spec_axes((entry,))) == 0
        for n, entry in zip(shape, spec, strict=False)
    )
