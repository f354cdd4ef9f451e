"""Compress the gradient of a single sender, for a server: no mesh axis averages it."""

from typing import NamedTuple

import jax

from shardopt.core import PyTree, abstract, calling, num_bytes, value_error, wide_dtype, wide_zeros
from shardopt.core._reducer import MessageCodec, Reducer, check_reducer
from shardopt.reducers._reducer import (
    check_leaves,
    keep_if_finite,
    narrow,
    real_dtype,
    real_form,
    widen,
)


class CompressorState(NamedTuple):
    """The state of a sender between its messages.

    Attributes:
      unsent: the residual that earlier messages left out, a tree like the gradients in fp32 or
        wider; () without `error_feedback`.
      state: the state of the reducer itself, such as the factors of `power_sgd`.
    """

    unsent: PyTree
    state: PyTree


class Compressor(NamedTuple):
    """Pure functions by which one sender encodes gradients and any receiver decodes them.

    See `compressor`.

    Attributes:
      name: the name of the reducer.
      codec: the functions of the reducer.
    """

    name: str
    codec: MessageCodec

    def init(self, params: PyTree) -> CompressorState:
        """Return the first state; only shapes and dtypes are read."""
        with calling(self.name):
            check_leaves(params)
        unsent = wide_zeros(abstract(params)) if self.codec.error_feedback else ()
        return CompressorState(unsent, self.codec.init(abstract(params)))

    def encode(self, grads: PyTree, memory: CompressorState) -> tuple[PyTree, CompressorState]:
        """Return the message, a tree of compact arrays, and the memory for the next message."""
        with calling(self.name):
            check_leaves(grads)
        codec = self.codec
        leaves, treedef = jax.tree.flatten(grads)
        values = widen(leaves)
        if codec.error_feedback:
            unsent = widen(jax.tree.leaves(memory.unsent))
            values = [value + residual for value, residual in zip(values, unsent, strict=True)]
        message, state = codec.write(
            values, [real_dtype(leaf.dtype) for leaf in leaves], memory.state
        )
        # The sender decodes its own message: the receiver sees exactly this, so the rest is unsent.
        decoded_grads = self.decode(message, grads)
        unsent = ()
        if codec.error_feedback:
            residuals = [
                value - decoded
                for value, decoded in zip(
                    values, widen(jax.tree.leaves(decoded_grads)), strict=True
                )
            ]
            unsent = treedef.unflatten(
                narrow(residuals, [wide_dtype(leaf.dtype) for leaf in leaves])
            )
        return message, keep_if_finite(
            (grads, decoded_grads), CompressorState(unsent, state), memory
        )

    def decode(self, message: PyTree, like: PyTree) -> PyTree:
        """Return the gradients of a message; `like` is a tree of their shapes and dtypes."""
        leaves, treedef = jax.tree.flatten(like)
        forms = list(map(real_form, leaves))
        values = self.codec.read(message, forms, [real_dtype(leaf.dtype) for leaf in leaves])
        return treedef.unflatten(narrow(values, [leaf.dtype for leaf in leaves]))

    def message(self, abstract_params: PyTree) -> PyTree:
        """Return the message as `jax.ShapeDtypeStruct`s."""
        return jax.eval_shape(
            lambda grads: self.encode(grads, self.init(grads))[0], abstract(abstract_params)
        )

    def nbytes(self, abstract_params: PyTree) -> int:
        """Return the bytes of a message."""
        return sum(map(num_bytes, jax.tree.leaves(self.message(abstract_params))))


@calling("compressor")
def compressor(reducer: Reducer) -> Compressor:
    """Return the functions by which a single sender compresses gradients in the way of a reducer.

    A reducer averages over an axis, but a worker that pushes to a server sends alone. Its message
    holds the same arrays as the first phase of the mean:

    - `exact`: rounded numbers;
    - `int8` and `sign`: 8-bit codes or signs, with their scales;
    - `top_k`: the largest entries, with their indices;
    - `power_sgd`: the two factors of the sender's own power iteration.

    Args:
      reducer: a reducer of this package, which may be wrapped in `error_feedback`.

    Returns:
      A `Compressor`.

    Raises:
      TypeError: if `reducer` is not a `Reducer`.
      ValueError: if a single sender cannot use the reducer: `warm_up`, or a custom reducer without
        a `codec`.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> compressor = so.reducers.compressor(so.reducers.error_feedback(so.reducers.top_k(density=0.5)))
      >>> grads = {"w": jnp.array([3.0, 2.0])}
      >>> memory = compressor.init(grads)
      >>> for _ in range(2):
      ...     message, memory = compressor.encode(grads, memory)
      ...     print(compressor.decode(message, grads)["w"], memory.unsent["w"], compressor.nbytes(grads))
      [3. 0.] [0. 2.] 8
      [0. 4.] [3. 0.] 8

    **Equivalence**: with `error_feedback` the sum is conserved: sum_t decode(message_t) + unsent =
    sum_t g_t, up to rounding of sums. A NaN or inf in a gradient makes the decoded leaf non-finite (for `int8` and `sign`
    its whole bucket). The memory stays as it was.

    **Placement**: the memory is local to the sender, and is lost with the sender.

    **Communication**: `nbytes` per message, for Psi elements of b bytes:

    - `exact(dtype)`: Psi times the bytes of the dtype;
    - `int8`: (1 + 4/block_size) Psi;
    - `sign`: (1/8 + 4/block_size) Psi;
    - `top_k`: density (4 + b) Psi;
    - `power_sgd`: 4 rank (rows + columns) for each matrix that it compresses.

    References:
      Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
      Distributed Training of Speech DNNs", 2014 (error feedback of one sender). Each reducer lists
      its own references.
    """
    check_reducer(reducer)
    codec = reducer.codec
    name = reducer.name
    if codec is None:
        fix = (
            "use exact, int8, sign, top_k or power_sgd, alone or in error_feedback, without a"
            " warm-up."
        )
        raise value_error(f"{name} has no form that a single sender can write.", fix=fix)
    return Compressor(name, codec)
