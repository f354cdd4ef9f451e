"""What a reducer is, and how one is made of a function over lists of real arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import complaint
from shardopt.core.types import PyTree, abstract, wide_dtype
from shardopt.partition.paths import leaves_with_paths
from shardopt.reducers.axis import axis_size, check_not_summed
from shardopt.reducers.code import Code
from shardopt.reducers.leaves import check_alike, check_leaves, narrow, real_dtype, widen


class Reducer(NamedTuple):
    """How a mean of gradients crosses the wire: pure functions, and a statement of the bytes.

    `reduce` runs where the axis is bound: in `jax.shard_map` (over this axis manual), `jax.pmap` or
    `jax.vmap(axis_name=...)`, with one result. Leaves are floating or complex; others are refused.

    Attributes:
      name: as it is written, such as "int8(block_size=256)".
      init: `init(params) -> state`; only shapes and dtypes are read, so they may be abstract. What differs between
        devices is marked as `PerDevice` or `ErrorMemory`; see `shardopt.reducers.device_state`.
      reduce: `reduce(grads, state, axis_name) -> (mean, state)`: the mean over the axis of each device's gradients,
        in their dtypes and bit for bit the same on all devices. `axis_name` is a string, or a tuple of them.
      wire_bytes: `wire_bytes(abstract_params, axis_size) -> int`: what each device sends in a call, counted as
        `so.audit` does (rings). Sends in the warm-up of a reducer that has one are not in it.
      transmit: `transmit(grads, memory, state, axis_name) -> (mean, left, state)`: as `reduce`, with this device's
        `memory` (a tree like the gradients, or None) added before anything is sent. `left` is what this device must
        add next time for nothing to be lost: N mean + sum of left over devices = sum of (grads + memory).
      code: how a single sender writes its gradients, for `shardopt.reducers.encoding`; None for a reducer that has no
        such form.
    """

    name: str
    init: Callable[[PyTree], PyTree]
    reduce: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree]]
    wire_bytes: Callable[[PyTree, int], int]
    transmit: Callable[[PyTree, PyTree, PyTree, Any], tuple[PyTree, PyTree, PyTree]]
    code: Code | None = None


def make_reducer(
    name: str,
    *,
    send: Callable[..., tuple[list[Any], list[Any], PyTree]],
    count: Callable[[PyTree, int], int],
    init: Callable[[PyTree], PyTree] = lambda params: (),
    correct: Callable[[list[Any], PyTree], tuple[list[Any], PyTree]] | None = None,
    code: Code | None = None,
) -> Reducer:
    """Make a reducer of functions over lists of real arrays.

    Args:
      name: as it is written.
      send: `send(values, dtypes, state, axis_name) -> (means, lefts, state)`. Values are real and at least fp32, a
        complex leaf [...] comes as [..., 2]; dtypes are those of the leaves, real parts of complex ones.
      count: `count(abstract_params, axis_size)`, the bytes sent.
      init: makes the state.
      correct: `correct(values, state) -> (values, state)`, run before the memory is added.
      code: how a single sender writes; `init` and `correct` are put into it.
    """
    code = None if code is None else code._replace(init=init, correct=correct)

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
        # What rounding to the dtype of the gradients loses is lost alike on all devices, so all keep it.
        lefts = [left + (wide - rounded) for left, wide, rounded in zip(lefts, means, widen(mean), strict=True)]
        kept = narrow(lefts, [wide_dtype(leaf.dtype) for leaf in leaves])
        return treedef.unflatten(mean), treedef.unflatten(kept), keep_if_finite(mean, sent_state, before)

    def reduce(grads, state, axis_name):
        mean, _, state = transmit(grads, None, state, axis_name)
        return mean, state

    def checked_init(params):
        check_leaves(name, params)
        return init(abstract(params))

    return Reducer(name, checked_init, reduce, counter(name, count), transmit, code)


def counter(name: str, count: Callable[[PyTree, int], int]) -> Callable[[PyTree, int], int]:
    """Return `wire_bytes` with its arguments checked."""

    def wire_bytes(abstract_params, axis_size):
        check_size(name, "axis_size", axis_size)
        check_leaves(name, abstract_params)
        return count(abstract(abstract_params), int(axis_size))

    return wire_bytes


def keep_if_finite(mean: PyTree, after: PyTree, before: PyTree) -> PyTree:
    """Return the new state, or the old one where the mean has a NaN or inf: it must not poison later calls.

    The mean is the same on all devices, so they agree.
    """
    found = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(mean)]
    if not found or not jax.tree.leaves(after):
        return after
    finite = jnp.all(jnp.stack(found))
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)


def check_reducer(who: str, reducer: Any) -> None:
    """Refuse what is not a reducer.

    Raises:
      TypeError: if it is not a `Reducer`.
    """
    if not isinstance(reducer, Reducer):
        shown = getattr(reducer, "__name__", type(reducer).__name__)
        fix = "pass one such as so.reducers.int8(), called."
        raise TypeError(complaint(who, f"reducer must be a Reducer, got {shown}.", fix=fix))


def check_number(who: str, what: str, value: Any) -> None:
    """Refuse what is not a real number.

    Raises:
      TypeError: if it is neither an integer nor a float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(complaint(who, f"{what} must be a number, got {value!r} ({type(value).__name__})."))


def check_size(who: str, what: str, size: Any) -> None:
    """Refuse what is not a positive integer.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if it is below 1.
    """
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(complaint(who, f"{what} must be an integer, got {size!r} ({type(size).__name__})."))
    if size < 1:
        raise ValueError(complaint(who, f"{what} must be at least 1, got {size}."))


def check_count(who: str, what: str, count: Any) -> None:
    """Refuse what is not an integer from 0.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if it is negative.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(complaint(who, f"{what} must be an integer, got {count!r}."))
    if count < 0:
        raise ValueError(complaint(who, f"{what} must not be negative, got {count}."))
