"""`make_reducer`, which makes a reducer from functions over lists of real arrays."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core import (
    Arrays,
    PyTree,
    abstract,
    calling,
    check_count,
    is_array_like,
    is_inexact,
    leaves_with_paths,
    plural,
    type_error,
    value_error,
    wide_dtype,
    widened,
)
from shardopt.core._axis import AxisName, axis_size
from shardopt.core._reducer import Dtypes, MessageCodec, Reducer, Values
from shardopt.reducers._axis import check_not_summed


def make_reducer(
    name: str,
    *,
    send: Callable[[Values, Dtypes, PyTree, AxisName], tuple[Values, Values, PyTree]],
    count_bytes: Callable[[PyTree, int], int],
    init: Callable[[PyTree], PyTree] = lambda params: (),
    codec: MessageCodec | None = None,
) -> Reducer:
    """Make a reducer from functions over lists of real arrays.

    Args:
      name: the call that makes the reducer, such as "int8(block_size=256)".
      send: `send(values, dtypes, state, axis_name) -> (means, residuals, state)`. `values` are real
        arrays, in fp32 or wider; a complex leaf [...] comes as [..., 2]. `dtypes` are the dtypes of
        the leaves, or of their real parts.
      count_bytes: `count_bytes(abstract_params, axis_size)`, the bytes that a device sends in a
        call.
      init: `init(params) -> state`.
      codec: the `write` and `read` of a single sender. Its field `init` is set here.
    """
    codec = None if codec is None else codec._replace(init=init)

    @calling(name)
    def transmit(grads, memory, state, axis_name):
        check_leaves(grads)
        axis_size(axis_name)
        leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, grads))
        check_not_summed(axis_name, [path for path, _ in leaves_with_paths(grads)], leaves)
        values = widen(leaves)
        if memory is not None:
            check_alike("the memory", grads, memory)
            values = [
                value + residual
                for value, residual in zip(values, widen(jax.tree.leaves(memory)), strict=True)
            ]
        # The memory is added before compression, so what is left out now is sent later.
        means, residuals, new_state = send(
            values, [real_dtype(leaf.dtype) for leaf in leaves], state, axis_name
        )
        # Nothing is sent of an empty leaf, so its type would say that devices differ.
        means = [mean if mean.size else jnp.zeros(mean.shape, mean.dtype) for mean in means]
        mean = narrow(means, [leaf.dtype for leaf in leaves])
        # Rounding the mean to the dtype of the gradients makes the same error on all N devices, so
        # each remembers it.
        residuals = [
            residual + (wide - rounded)
            for residual, wide, rounded in zip(residuals, means, widen(mean), strict=True)
        ]
        narrow_residuals = narrow(residuals, [wide_dtype(leaf.dtype) for leaf in leaves])
        return (
            treedef.unflatten(mean),
            treedef.unflatten(narrow_residuals),
            keep_if_finite(mean, new_state, state),
        )

    @calling(name)
    def checked_init(params):
        check_leaves(params)
        return init(abstract(params))

    @calling(name)
    def wire_bytes(abstract_params, axis_size):
        check_count("axis_size", axis_size)
        check_leaves(abstract_params)
        return count_bytes(abstract(abstract_params), int(axis_size))

    return Reducer(name, checked_init, wire_bytes, transmit, codec)


def keep_if_finite(mean: PyTree, new_state: PyTree, old_state: PyTree) -> PyTree:
    """Return the new state, or the old state if the mean has a NaN or inf, which must not reach
    later calls.

    The mean is equal on all devices, so all devices choose the same state.
    """
    leaves_are_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(mean)]
    if not leaves_are_finite or not jax.tree.leaves(new_state):
        return new_state
    is_finite = jnp.all(jnp.stack(leaves_are_finite))
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new_state, old_state)


# From gradient trees to lists of real arrays that are wide enough to be summed, and back.


def check_leaves(tree: PyTree) -> None:
    """Raise TypeError if a leaf is not a floating or complex array: only these have a mean."""
    wrong = [
        f"{path or 'the tree itself'}: {leaf.dtype if is_array_like(leaf) else type(leaf).__name__}"
        for path, leaf in leaves_with_paths(tree)
        if not is_array_like(leaf) or not is_inexact(leaf)
    ]
    if wrong:
        problem = (
            f"{plural(len(wrong), 'leaf')} cannot be reduced: a mean needs floating or complex"
            " arrays."
        )
        raise type_error(problem, wrong, "leave such leaves out, for instance with optax.masked.")


def check_alike(reference_name: str, tree: PyTree, reference: PyTree) -> None:
    """Raise ValueError if a tree of gradients does not have the structure and shapes of the
    reference tree.

    Args:
      reference_name: the name of the reference tree, for the message.
      tree: the gradients.
      reference: the tree that they must be like.
    """
    if jax.tree.structure(tree) != jax.tree.structure(reference):
        raise value_error(f"the gradients have another tree structure than {reference_name}.")
    pairs = zip(leaves_with_paths(tree), jax.tree.leaves(reference), strict=True)
    wrong = [
        f"{path}: {leaf.shape}, was {reference_leaf.shape}"
        for (path, leaf), reference_leaf in pairs
        if jnp.shape(leaf) != reference_leaf.shape
    ]
    if wrong:
        problem = (
            f"{plural(len(wrong), 'gradient leaf')} {'has' if len(wrong) == 1 else 'have'} "
            f"another shape than {reference_name}."
        )
        raise value_error(problem, wrong)


def widen(leaves: Sequence[jax.Array]) -> Arrays:
    """Return leaves as real arrays in dtypes wide enough for sums.

    A complex [...] becomes [..., 2].
    """
    return [_as_real(widened(leaf)) for leaf in leaves]


def narrow(values: Sequence[jax.Array], dtypes: Sequence[np.dtype]) -> Arrays:
    """Convert real arrays to leaves of these dtypes, the inverse of `widen`."""
    return [
        _as_complex(value, dtype).astype(dtype) for value, dtype in zip(values, dtypes, strict=True)
    ]


def real_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the real and imaginary parts of a complex dtype.

    A real dtype as it is.
    """
    return jnp.finfo(dtype).dtype


def real_form(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf after `widen`."""
    shape = (*leaf.shape, 2) if _is_complex(leaf.dtype) else leaf.shape
    return jax.ShapeDtypeStruct(shape, real_dtype(wide_dtype(leaf.dtype)))


def _is_complex(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _as_real(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1) if _is_complex(x.dtype) else x


def _as_complex(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.complex(x[..., 0], x[..., 1]) if _is_complex(dtype) else x
