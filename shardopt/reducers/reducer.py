"""What a reducer is, and how one is made of a function over lists of real arrays."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, abstract, is_array_like, leaves_with_paths, wide_dtype
from shardopt.reducers.axis import AxisName, axis_size, check_not_summed

Values = list[jax.Array]
"""Real arrays, fp32 or wider; a complex leaf [...] comes as [..., 2]."""
Dtypes = list[np.dtype]
"""Those of the leaves; of the real parts of complex ones."""


class MessageCodec(NamedTuple):
    """How one sender writes its values, and any receiver reads them: the part of a reducer that needs no axis.

    Attributes:
      write: `write(values, dtypes, state) -> (message, state)`: any tree of compact arrays.
      read: `read(message, shapes, dtypes) -> values`; `shapes` are values or `jax.ShapeDtypeStruct`s like them.
      init: `init(params) -> state`.
      correct: `correct(values, state) -> (values, state)`, run before what was not sent is added; None for nothing.
      feedback: whether what a message leaves out is added to the next one.
    """

    write: Callable[[Values, Dtypes, PyTree], tuple[PyTree, PyTree]]
    read: Callable[[PyTree, Sequence[jax.Array | jax.ShapeDtypeStruct], Dtypes], Values]
    init: Callable[[PyTree], PyTree] = lambda params: ()
    correct: Callable[[Values, PyTree], tuple[Values, PyTree]] | None = None
    feedback: bool = False


class Reducer(NamedTuple):
    """How gradients are averaged over an axis: pure functions, and a statement of the bytes.

    `reduce` runs where the axis is bound: in `jax.shard_map` (over this axis manual), `jax.pmap` or
    `jax.vmap(axis_name=...)`, with one result. Leaves are floating or complex; others are refused.

    Attributes:
      name: as it is written, such as "int8(block_size=256)".
      init: `init(params) -> state`; only shapes and dtypes are read, so they may be abstract. What differs between
        devices is marked as `PerDevice` or `ErrorFeedback`; see `shardopt.reducers.device_state`.
      reduce: `reduce(grads, state, axis_name) -> (mean, state)`: the mean over the axis of each device's gradients,
        in their dtypes and bit for bit the same on all devices. `axis_name` is a string, or a tuple of them.
      wire_bytes: `wire_bytes(abstract_params, axis_size) -> int`: what each device sends in a call, counted as
        `so.audit` does (rings). Sends in the warm-up of a reducer that has one are not in it.
      transmit: `transmit(grads, memory, state, axis_name) -> (mean, left, state)`: as `reduce`, with this device's
        `memory` (a tree like the gradients, or None) added before anything is sent. `left` is what this device must
        add next time for nothing to be lost: N mean + sum of left over devices = sum of (grads + memory).
      codec: how a single sender writes its gradients, for `so.reducers.compressor`; None for a reducer that has no
        such form.
    """

    name: str
    init: Callable[[PyTree], PyTree]
    reduce: Callable[[PyTree, PyTree, AxisName], tuple[PyTree, PyTree]]
    wire_bytes: Callable[[PyTree, int], int]
    transmit: Callable[[PyTree, PyTree, PyTree, AxisName], tuple[PyTree, PyTree, PyTree]]
    codec: MessageCodec | None = None


def make_reducer(
    name: str,
    *,
    send: Callable[[Values, Dtypes, PyTree, AxisName], tuple[Values, Values, PyTree]],
    count: Callable[[PyTree, int], int],
    init: Callable[[PyTree], PyTree] = lambda params: (),
    correct: Callable[[Values, PyTree], tuple[Values, PyTree]] | None = None,
    codec: MessageCodec | None = None,
) -> Reducer:
    """Make a reducer of functions over lists of real arrays.

    Args:
      name: as it is written.
      send: `send(values, dtypes, state, axis_name) -> (means, lefts, state)`. Values are real and at least fp32, a
        complex leaf [...] comes as [..., 2]; dtypes are those of the leaves, real parts of complex ones.
      count: `count(abstract_params, axis_size)`, the bytes sent.
      init: makes the state.
      correct: `correct(values, state) -> (values, state)`, run before the memory is added.
      codec: how a single sender writes; `init` and `correct` are put into it.
    """
    codec = None if codec is None else codec._replace(init=init, correct=correct)

    def transmit(grads, memory, state, axis_name):
        check_leaves(name, grads)
        axis_size(name, axis_name)
        leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, grads))
        check_not_summed(name, axis_name, [path for path, _ in leaves_with_paths(grads)], leaves)
        values, before = widen(leaves), state
        if correct is not None:
            values, state = correct(values, state)
        if memory is not None:
            check_alike(name, "the memory", grads, memory)
            values = [value + kept for value, kept in zip(values, widen(jax.tree.leaves(memory)), strict=True)]
        means, lefts, sent_state = send(values, [real_dtype(leaf.dtype) for leaf in leaves], state, axis_name)
        mean = narrow(means, [leaf.dtype for leaf in leaves])
        # rounding to the dtype of the gradients loses the same on all devices, so all keep it
        lefts = [left + (wide - rounded) for left, wide, rounded in zip(lefts, means, widen(mean), strict=True)]
        kept = narrow(lefts, [wide_dtype(leaf.dtype) for leaf in leaves])
        return treedef.unflatten(mean), treedef.unflatten(kept), keep_if_finite(mean, sent_state, before)

    def reduce(grads, state, axis_name):
        mean, _, state = transmit(grads, None, state, axis_name)
        return mean, state

    def checked_init(params):
        check_leaves(name, params)
        return init(abstract(params))

    def wire_bytes(abstract_params, axis_size):
        check_count(name, "axis_size", axis_size)
        check_leaves(name, abstract_params)
        return count(abstract(abstract_params), int(axis_size))

    return Reducer(name, checked_init, reduce, wire_bytes, transmit, codec)


def keep_if_finite(mean: PyTree, after: PyTree, before: PyTree) -> PyTree:
    """Return the new state, or the old one where the mean has a NaN or inf: it must not poison later calls.

    The mean is the same on all devices, so they agree.
    """
    found = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(mean)]
    if not found or not jax.tree.leaves(after):
        return after
    finite = jnp.all(jnp.stack(found))
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)


def check_reducer(who: str, reducer: object) -> None:
    """Refuse what is not a reducer."""
    if not isinstance(reducer, Reducer):
        shown = getattr(reducer, "__name__", type(reducer).__name__)
        fix = "pass one such as so.reducers.int8(), called."
        raise TypeError(format_error(who, f"reducer must be a Reducer, got {shown}.", fix=fix))


def grouped(reducer: Reducer, keys: Sequence[Hashable], paths: Sequence[str]) -> Reducer:
    """Return a reducer of lists of leaves, in which leaves with different keys share no buffer.

    Leaves in one buffer can share the scale of a block. That must not happen between a leaf that is sharded over some
    other mesh axis and one that is replicated over it: each shard would scale the replicated one differently.

    Args:
      reducer: any reducer.
      keys: of each leaf.
      paths: of each leaf, its key path in the parameters, which tells some reducers how to see it. All different.

    Returns:
      A `Reducer` whose state is a tuple, one of the wrapped reducer's states a group, of dicts by key path.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> from shardopt.reducers.reducer import grouped
      >>> reducer = grouped(so.reducers.int8(block_size=4), ["sharded", "replicated"], ["kernel", "bias"])
      >>> leaves = [jnp.array([[127.0]]), jnp.array([[1.0, 2.0]])]
      >>> mean, _ = jax.jit(jax.vmap(lambda g: reducer.reduce(g, reducer.init(g), "data"), axis_name="data"))(leaves)
      >>> print(mean[1][0])
      [1.007874 2.      ]
    """
    groups = {key: [i for i, own in enumerate(keys) if own == key] for key in dict.fromkeys(keys)}

    def pick(leaves: Sequence[PyTree]) -> list[dict[str, PyTree]]:
        return [{paths[i]: leaves[i] for i in members} for members in groups.values()]

    def put_back(parts: Sequence[dict[str, PyTree]]) -> list[PyTree]:
        found = {path: leaf for part in parts for path, leaf in part.items()}
        return [found[path] for path in paths]

    def init(params):
        return tuple(reducer.init(part) for part in pick(params))

    def reduce(grads, state, axis_name):
        done = [reducer.reduce(part, own, axis_name) for part, own in zip(pick(grads), state, strict=True)]
        return put_back([mean for mean, _ in done]), tuple(own for _, own in done)

    def transmit(grads, memory, state, axis_name):
        memories = [None] * len(groups) if memory is None else pick(memory)
        each = zip(pick(grads), memories, state, strict=True)
        means, lefts, states = [], [], []
        for mean, left, own in (reducer.transmit(part, kept, own, axis_name) for part, kept, own in each):
            means.append(mean)
            lefts.append(left)
            states.append(own)
        return put_back(means), put_back(lefts), tuple(states)

    def wire_bytes(abstract_params, axis_size):
        return sum(reducer.wire_bytes(part, axis_size) for part in pick(abstract_params))

    return Reducer(reducer.name, init, reduce, wire_bytes, transmit)


# Gradient trees as lists of real arrays that are wide enough to be summed, and back.


def check_leaves(who: str, tree: PyTree) -> None:
    """Refuse leaves that have no mean."""
    wrong = [
        f"{path or 'the tree itself'}: {leaf.dtype if is_array_like(leaf) else type(leaf).__name__}"
        for path, leaf in leaves_with_paths(tree)
        if not is_array_like(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        what = f"{plural(len(wrong), 'leaf')} cannot be reduced: a mean needs floating or complex arrays."
        raise TypeError(format_error(who, what, wrong, "leave such leaves out, for instance with optax.masked."))


def check_alike(who: str, what: str, tree: PyTree, reference: PyTree) -> None:
    """Refuse a tree that does not have the structure and shapes of another."""
    if jax.tree.structure(tree) != jax.tree.structure(reference):
        raise ValueError(format_error(who, f"the gradients have another tree structure than {what}."))
    pairs = zip(leaves_with_paths(tree), jax.tree.leaves(reference), strict=True)
    wrong = [
        f"{path}: {leaf.shape}, was {known.shape}" for (path, leaf), known in pairs if jnp.shape(leaf) != known.shape
    ]
    if wrong:
        what = (
            f"{plural(len(wrong), 'gradient leaf')} {'has' if len(wrong) == 1 else 'have'} another shape than {what}."
        )
        raise ValueError(format_error(who, what, wrong))


def zeros_like(tree: PyTree) -> PyTree:
    """Return zeros of the shapes of a tree, abstract or not, in the dtypes that sums are kept in."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide_dtype(leaf.dtype)), tree)


def widen(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Return leaves as real arrays of the dtypes that sums are kept in; a complex [...] becomes [..., 2]."""
    return [_as_real(leaf.astype(wide_dtype(leaf.dtype))) for leaf in leaves]


def narrow(values: Sequence[jax.Array], dtypes: Sequence[np.dtype]) -> list[jax.Array]:
    """Undo `widen`: return arrays of these dtypes."""
    return [_as_complex(value, dtype).astype(dtype) for value, dtype in zip(values, dtypes, strict=True)]


def real_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the real and imaginary parts, or the dtype itself where it is real."""
    return jnp.finfo(dtype).dtype


def real_shape(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Return the shape that a leaf has as a real array."""
    return (*leaf.shape, 2) if _is_complex(leaf.dtype) else tuple(leaf.shape)


def _is_complex(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _as_real(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1) if _is_complex(x.dtype) else x


def _as_complex(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.complex(x[..., 0], x[..., 1]) if _is_complex(dtype) else x
