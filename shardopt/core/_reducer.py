"""The `Reducer` record: how gradients are averaged over an axis. `shardopt.reducers` makes them."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from shardopt.core._axis import AxisName
from shardopt.core._errors import type_error
from shardopt.core._types import PyTree

Values = list[jax.Array]
"""Real arrays, fp32 or wider; a complex leaf [...] comes as [..., 2]."""
Dtypes = list[np.dtype]
"""The dtypes of the leaves; for a complex leaf, the dtype of its real part."""


class MessageCodec(NamedTuple):
    """Functions by which one sender writes its values and any receiver reads them, without an axis.

    Attributes:
      write: `write(values, dtypes, state) -> (message, state)`. The message is any tree of compact
        arrays.
      read: `read(message, shapes, dtypes) -> values`. `shapes` are values, or
        `jax.ShapeDtypeStruct`s like them.
      init: `init(params) -> state`.
      error_feedback: whether the residual of a message is added to the next message.
    """

    write: Callable[[Values, Dtypes, PyTree], tuple[PyTree, PyTree]]
    read: Callable[[PyTree, Sequence[jax.Array | jax.ShapeDtypeStruct], Dtypes], Values]
    init: Callable[[PyTree], PyTree] = lambda params: ()
    error_feedback: bool = False


class Reducer(NamedTuple):
    """Pure functions that average gradients over an axis, and that count the bytes sent.

    `reduce` and `transmit` run where the axis is bound: in `jax.shard_map` (manual over this axis),
    `jax.pmap` or `jax.vmap(axis_name=...)`. All three give the same result. Leaves must be floating
    or complex, else an error is raised.

    Attributes:
      name: the call that makes the reducer, such as "int8(block_size=256)".
      init: `init(params) -> state`. It reads only shapes and dtypes, so `params` may be abstract.
        State that differs between devices is marked as `PerDevice` or `ErrorFeedback`; see
        `shardopt.core._device_state`.
      wire_bytes: `wire_bytes(abstract_params, axis_size) -> int`: the bytes that each device sends
        in a call, counted as `so.hlo.audit` does (ring collectives). The calls of a warm-up are not
        counted.
      transmit: `transmit(grads, memory, state, axis_name) -> (mean, residual, state)`. The mean is
        the mean of `reduce`, but this device's `memory` (a tree like the gradients, or None) is
        added before anything is sent. The next call must add `residual`, so that nothing is lost: N
        mean + sum of residuals over devices = sum of (grads + memory).
      codec: the functions by which a single sender writes its gradients, for
        `so.reducers.compressor`; None for a reducer that a single sender cannot use.
      is_exact: whether nothing but a cast changes the mean, so that a reduce-scatter can compute it.
      dtype: the dtype on the wire of a reducer that is exact; None for the dtype of each leaf.
      tile_rows: the rows of a tile of a reducer that is exact and gives the same bits on every
        mesh.
    """

    name: str
    init: Callable[[PyTree], PyTree]
    wire_bytes: Callable[[PyTree, int], int]
    transmit: Callable[[PyTree, PyTree, PyTree, AxisName], tuple[PyTree, PyTree, PyTree]]
    codec: MessageCodec | None = None
    is_exact: bool = False
    dtype: np.dtype | None = None
    tile_rows: int | None = None

    def reduce(self, grads: PyTree, state: PyTree, axis_name: AxisName) -> tuple[PyTree, PyTree]:
        """Return the mean over the axis of each device's gradients, and the new state.

        The mean has the dtypes of the gradients, and is the same on all devices bit for bit.
        `axis_name` is a string or a tuple of strings.
        """
        mean, _, state = self.transmit(grads, None, state, axis_name)
        return mean, state


def check_reducer(reducer: object) -> None:
    """Raise TypeError if this is not a `Reducer`."""
    if not isinstance(reducer, Reducer):
        type_name = getattr(reducer, "__name__", type(reducer).__name__)
        fix = "pass one such as so.reducers.int8(), called."
        raise type_error(f"reducer must be a Reducer, got {type_name}.", fix=fix)


def grouped(reducer: Reducer, keys: Sequence[Hashable], paths: Sequence[str]) -> Reducer:
    """Return a reducer of lists of leaves that puts leaves with different keys into different
    buffers.

    Leaves in one buffer can share the scale of a block. A leaf that is sharded over another mesh
    axis must not share a scale with a leaf that is replicated over it: each shard would scale the
    replicated leaf differently.

    Args:
      reducer: any reducer.
      keys: the key of each leaf.
      paths: the key path of each leaf in the parameters, all different. Some reducers treat a leaf
        by its path.

    Returns:
      A `Reducer`. Its state is a tuple with one state of the wrapped reducer per group, over dicts
      by key path.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> from shardopt.core._reducer import grouped
      >>> reducer = grouped(so.reducers.int8(block_size=4), ["sharded", "replicated"], ["kernel", "bias"])
      >>> leaves = [jnp.array([[127.0]]), jnp.array([[1.0, 2.0]])]
      >>> mean, _ = jax.jit(jax.vmap(lambda g: reducer.reduce(g, reducer.init(g), "data"), axis_name="data"))(leaves)
      >>> print(mean[1][0])
      [1.007874 2.      ]
    """
    groups = [
        [i for i, leaf_key in enumerate(keys) if leaf_key == key] for key in dict.fromkeys(keys)
    ]
    functions = _Grouped(reducer, groups, paths)
    return Reducer(reducer.name, functions.init, functions.wire_bytes, functions.transmit)


class _Grouped(NamedTuple):
    """The functions of `grouped`.

    Attributes:
      reducer: the wrapped reducer.
      groups: the indices of the leaves of each group.
      paths: the key path of each leaf.
    """

    reducer: Reducer
    groups: list[list[int]]
    paths: Sequence[str]

    def split(self, leaves: Sequence[PyTree]) -> list[dict[str, PyTree]]:
        """Return the leaves of each group, by key path."""
        return [{self.paths[i]: leaves[i] for i in group} for group in self.groups]

    def merge(self, groups: Sequence[dict[str, PyTree]]) -> list[PyTree]:
        """Return the leaves of all groups in their order."""
        leaf_by_path = {path: leaf for group in groups for path, leaf in group.items()}
        return [leaf_by_path[path] for path in self.paths]

    def init(self, params: Sequence[PyTree]) -> tuple[PyTree, ...]:
        return tuple(map(self.reducer.init, self.split(params)))

    def transmit(
        self,
        grads: Sequence[PyTree],
        memory: Sequence[PyTree] | None,
        state: tuple[PyTree, ...],
        axis_name: AxisName,
    ) -> tuple[PyTree, PyTree, tuple[PyTree, ...]]:
        memories = [None] * len(self.groups) if memory is None else self.split(memory)
        results = [
            self.reducer.transmit(group, group_memory, group_state, axis_name)
            for group, group_memory, group_state in zip(
                self.split(grads), memories, state, strict=True
            )
        ]
        means, residuals, states = zip(*results, strict=True) if results else ((), (), ())
        return self.merge(means), self.merge(residuals), states

    def wire_bytes(self, abstract_params: Sequence[PyTree], axis_size: int) -> int:
        return sum(
            self.reducer.wire_bytes(group, axis_size) for group in self.split(abstract_params)
        )
