"""The values that strategies take and return: train state, losses and metrics, and helpers for
their trees.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

PyTree = Any
Arrays = list[jax.Array]
Devices = Sequence[jax.Device]
_Leaf = TypeVar("_Leaf")
_State = TypeVar("_State")
TreeDef = Any
"""The structure of a pytree: `jax.tree_util.PyTreeDef`, which type checkers do not accept as a
type.
"""
PlaceLeaf = Callable[[str, tuple[int, ...]], PartitionSpec | None]
LeafRole = PartitionSpec | Literal["frozen", "experts", "if_divisible"]
"""What holds of a leaf: how tensor splits it, that it is not trained, that dim 0 counts experts, that
it stays whole where tensor does not divide it.
"""
Rule = tuple[str | re.Pattern[str], LeafRole] | PlaceLeaf
"""What holds of the leaves whose key path a regex is found in, or a function that places a leaf."""
Rules = Sequence[Rule] | PlaceLeaf
"""`[(regex, PartitionSpec | "frozen" | "experts" | "if_divisible"), ...]`. A rule, or all of `rules`, may also be a
function `(path, shape) -> PartitionSpec | None`.
"""


class TrainState(NamedTuple):
    """All values that a training run passes from one step to the next.

    Attributes:
      step: int32 scalar, the number of steps taken.
      params: the parameter pytree, with trainable and frozen leaves.
      opt_state: the state of the wrapped optax transformation, for the trainable leaves.
      rng: uint32 key data; step `n` uses `fold_in(rng, n)`.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    rng: Any


class Weighted(NamedTuple):
    """A loss (or metric) as a total and the weight that divides it, or as several such pairs.

    The loss of a step is `sum(total) / sum(weight)` over the whole global batch, for any number of
    devices and micro-batches. So padded or masked tokens count exactly. With tuples of K totals and
    K weights it is the sum of K quotients:

        sum_k sum(total_k) / sum(weight_k)

    Weights are treated as constants: they must not depend on the parameters. Several weights are
    summed before the loss is differentiated. With micro-batches this evaluates the computation of
    the weights once more. The parameter server accepts a single pair only.

    Attributes:
      total: a scalar, or a tuple of scalars.
      weight: a scalar, or a tuple of the same length. Its sum over the global batch must be above
        0.

    Example:
      >>> import jax.numpy as jnp
      >>> mask = jnp.array([1.0, 1.0, 0.0])
      >>> Weighted(total=(jnp.array([2.0, 4.0, 9.0]) * mask).sum(), weight=mask.sum())
      Weighted(total=Array(6., dtype=float32), weight=Array(2., dtype=float32))
      >>> masked, z_loss = jnp.array([2.0, 4.0, 9.0]) * mask, jnp.array([0.1, 0.2, 0.3])
      >>> _ = Weighted(total=(masked.sum(), z_loss.sum()), weight=(mask.sum(), 3.0))  # a masked mean plus a mean
    """

    total: Any
    weight: Any


class Sum(NamedTuple):
    """A metric that is summed over the rows of the batch: `aux = {"tokens":
    so.losses.Sum(mask.sum())}`.

    With v_i the value of device and micro-batch i, `metrics` holds sum_i v_i; `evaluation` also
    sums over batches.

    If replicas train separately (`local_sgd`, `diloco`), the sum covers the replicas of this
    process only, so that no process waits for others. In the `history` of an asynchronous run it
    covers the gradients of the update. The same holds for `Max` and `Min`.

    Example:
      >>> import jax.numpy as jnp
      >>> Sum(jnp.array([True, True, False]).sum())
      Sum(value=Array(2, dtype=int32))
    """

    value: Any


class Max(NamedTuple):
    """A metric that reports its largest value: `aux = {"longest": so.losses.Max(lengths.max())}`.

    With v_i the value of device and micro-batch i, `metrics` holds max_i v_i; `evaluation` takes
    the largest of all batches.

    Example:
      >>> import jax.numpy as jnp
      >>> Max(jnp.array([3, 5]).max())
      Max(value=Array(5, dtype=int32))
    """

    value: Any


class Min(NamedTuple):
    """A metric that reports its smallest value: `aux = {"margin": so.losses.Min(margins.min())}`.

    With v_i the value of device and micro-batch i, `metrics` holds min_i v_i; `evaluation` takes
    the smallest of all batches.

    Example:
      >>> import jax.numpy as jnp
      >>> Min(jnp.array([3, 5]).min())
      Min(value=Array(3, dtype=int32))
    """

    value: Any


Metric = Weighted | Sum | Max | Min
"""A metric with a rule for how the values of devices and micro-batches are combined."""


Loss = jax.Array | Weighted | tuple[jax.Array | Weighted, dict[str, Any]]
"""The result of a loss: a scalar or `Weighted`, or a pair of it and an aux dict of metrics.

Each metric is an array (its mean is taken), `Weighted`, `Sum`, `Max` or `Min`.
"""


class Updated(NamedTuple):
    """New values for frozen leaves (batch statistics, counters), returned by a loss in its aux
    dict.

    `values` is a nested dict with the structure of the parameters, but only with the leaves that
    change: `aux = {"accuracy": acc, "stats": so.losses.Updated({"batch_stats": new_stats})}`. A
    floating leaf becomes the mean over devices and micro-batches, an integer leaf the maximum.
    """

    values: PyTree


class AverageParamsState(NamedTuple):
    """The state of `so.transforms.average_params`.

    It lives with the parameters, not at owners of matrices.

    Attributes:
      num_steps: int32, the number of updates.
      num_averaged: int32, the number of parameters that the average has taken in.
      average: the average of the trained parameters, in fp32 at least.
    """

    num_steps: jax.Array
    num_averaged: jax.Array
    average: PyTree


def states_of(kind: type[_State], opt_state: PyTree) -> list[_State]:
    """Return the states of one transformation in the state of an optimizer, by their type."""

    def is_state(node):
        return isinstance(node, kind)

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(node)]


def is_average(node: object) -> bool:
    """Return whether a node of an optimizer state is the state of `average_params`."""
    return isinstance(node, AverageParamsState)


def in_averages(opt_state: PyTree) -> list[bool]:
    """Return, for each leaf of an optimizer state, whether it belongs to an average of the
    parameters.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=is_average)
    return [is_average(node) for node in nodes for _ in jax.tree.leaves(node)]


def path_text(path: KeyPath) -> str:
    """Return a key path as names joined by slashes: `params["blocks"]["attention"]` gives
    "blocks/attention".
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_with_paths(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Return the leaves of a tree, each with its key path as text."""
    return [
        (path_text(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    ]


def is_array_like(leaf: object) -> bool:
    """Return whether a leaf has a shape and a dtype, as numpy, jax and abstract arrays have."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_inexact(leaf: Any) -> bool:
    """Return whether a leaf has floating or complex numbers."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def inexact_indices(leaves: Sequence[Any]) -> list[int]:
    """Return the indices of the leaves that have gradients: those of floating or complex numbers."""
    return [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]


def is_floating(leaf: Any) -> bool:
    """Return whether a leaf has floating numbers."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is a typed random key."""
    return is_array_like(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def num_bytes(leaf: Any) -> int:
    """Return the bytes of a leaf, which may be abstract."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def with_leaves(tree: PyTree, leaves: Iterable[Any]) -> PyTree:
    """Return a tree of the same structure with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def replaced(
    leaves: Sequence[_Leaf], positions: Iterable[int], new_leaves: Iterable[_Leaf]
) -> list[_Leaf]:
    """Return the leaves with `new_leaves` at the indices `positions`."""
    result = list(leaves)
    for i, leaf in zip(positions, new_leaves, strict=True):
        result[i] = leaf
    return result


def abstract(tree: PyTree) -> PyTree:
    """Return the tree with `jax.ShapeDtypeStruct` leaves, with the dtypes that jax would store.

    No data is read.
    """

    def abstract_leaf(leaf):
        if not is_array_like(leaf):
            leaf = np.asarray(leaf)
        dtype = leaf.dtype
        # typed random keys have an extended dtype
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree.map(abstract_leaf, tree)


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype for sums of many values of a dtype: at least fp32, and complex for complex
    values.

    `jnp.promote_types` would do this, but raises an error under
    `jax_numpy_dtype_promotion="strict"`.
    """
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32)


def widened(x: jax.Array) -> jax.Array:
    """Return an array in its `wide_dtype`."""
    return cast(x, wide_dtype(x.dtype))


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return an array in a dtype. One that has it is returned as is, such as a random key."""
    return x if x.dtype == dtype else x.astype(dtype)


def wide_zeros(tree: PyTree) -> PyTree:
    """Return zeros with the shapes of a tree, which may be abstract, in dtypes wide enough for
    sums.
    """
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide_dtype(leaf.dtype)), tree)


def merge_replicas(stacked: jax.Array, axis: int = 0) -> jax.Array:
    """Return one value for the values of several replicas, for when the number of replicas changes.

    - Floating and complex leaves: the mean, computed in at least fp32. Replicas agree on it. For
      error-feedback memories the next reduction adds this mean to the mean of the gradients, so no
      gradient is lost.
    - Integers and booleans: the maximum, as in `Updated`. Counts of steps are equal in all
      replicas.
    - Typed random keys, which have no order: the first.

    Args:
      stacked: the values of the replicas, stacked along `axis`.
      axis: the dim of the replicas, which is removed.

    Example:
      >>> import jax.numpy as jnp
      >>> merge_replicas(jnp.array([[1.0, 2.0], [3.0, 6.0]])).tolist(), int(merge_replicas(jnp.array([4, 5])))
      ([2.0, 4.0], 5)
    """
    if is_inexact(stacked):
        return jnp.mean(stacked, axis, dtype=wide_dtype(stacked.dtype)).astype(stacked.dtype)
    if is_key(stacked):
        return jax.lax.index_in_dim(stacked, 0, axis, keepdims=False)
    return jnp.max(stacked, axis)
