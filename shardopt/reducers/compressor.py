"""A gradient as the message of one sender: what crosses where there is no axis to average over, only a server."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract, wide_dtype
from shardopt.reducers.reducer import (
    Reducer,
    check_leaves,
    check_reducer,
    keep_if_finite,
    narrow,
    real_dtype,
    real_shape,
    widen,
    zeros_like,
)


class CompressorState(NamedTuple):
    """What a sender keeps between its messages.

    Attributes:
      unsent: what it has not sent yet, like the gradients, in fp32 at least; () without `error_feedback`.
      state: what the reducer itself keeps, such as the factors of `power_sgd`.
    """

    unsent: PyTree
    state: PyTree


class Compressor(NamedTuple):
    """How one sender writes gradients and any receiver reads them: pure functions; see `compressor`.

    Attributes:
      name: that of the reducer.
      init: `init(params) -> CompressorState`; only shapes and dtypes are read.
      encode: `encode(grads, memory) -> (message, memory)`: a tree of compact arrays, and what is kept for the next one.
      decode: `decode(message, like) -> grads`; `like` is a tree of the gradients' shapes and dtypes.
      message: `message(abstract_params) -> ` the message as `jax.ShapeDtypeStruct`s.
      nbytes: `nbytes(abstract_params) -> int`, the bytes of a message.
    """

    name: str
    init: Callable[[PyTree], CompressorState]
    encode: Callable[[PyTree, CompressorState], tuple[PyTree, CompressorState]]
    decode: Callable[[PyTree, PyTree], PyTree]
    message: Callable[[PyTree], PyTree]
    nbytes: Callable[[PyTree], int]


def compressor(reducer: Reducer) -> Compressor:
    """Return how a single sender writes gradients the way a reducer does.

    A reducer is a mean over an axis; whoever pushes to a server sends alone. Its message is what it would send in the
    first phase of the mean: rounded numbers, 8-bit codes or signs with their scales, the largest entries with their
    indices, or the two factors of its own power iteration.

    **Equivalence**: with `error_feedback` mass is conserved: sum_t decode(message_t) + unsent = sum_t g_t, up to
    rounding of sums (with the momentum of `top_k`, of the corrected gradients). A NaN or inf in a gradient makes the
    leaf that is read non-finite, or its whole bucket for `int8` and `sign`, and leaves the memory as it was.

    **Placement**: the memory is the sender's own. It is lost with the sender.

    **Communication**: `nbytes` a message, of Psi elements of b bytes: `exact(dtype)` Psi times its bytes; `int8`
    (1 + 4/block_size) Psi; `sign` (1/8 + 4/block_size) Psi; `top_k` density (4 + b) Psi; `power_sgd`
    4 rank (rows + columns) for each matrix that it compresses.

    Args:
      reducer: one of this package, also in `error_feedback`.

    Returns:
      A `Compressor`.

    Raises:
      TypeError: if `reducer` is not a `Reducer`.
      ValueError: if it has no such form: `warm_up`, or a reducer of one's own without one.

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

    References:
      Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
      Speech DNNs", 2014 (error feedback of one sender); see each reducer for its own.
    """
    check_reducer("compressor", reducer)
    codec, name = reducer.codec, reducer.name
    if codec is None:
        fix = "use exact, int8, sign, top_k or power_sgd, alone or in error_feedback, without a warm-up."
        raise ValueError(format_error("compressor", f"{name} has no form that a single sender can write.", fix=fix))

    def init(params):
        check_leaves(name, params)
        return CompressorState(zeros_like(abstract(params)) if codec.feedback else (), codec.init(abstract(params)))

    def encode(grads, memory):
        check_leaves(name, grads)
        leaves, treedef = jax.tree.flatten(grads)
        values, state = widen(leaves), memory.state
        if codec.correct is not None:
            values, state = codec.correct(values, state)
        if codec.feedback:
            unsent = widen(jax.tree.leaves(memory.unsent))
            values = [value + kept for value, kept in zip(values, unsent, strict=True)]
        message, state = codec.write(values, [real_dtype(leaf.dtype) for leaf in leaves], state)
        found, unsent = decode(message, grads), ()
        if codec.feedback:
            lefts = [value - read for value, read in zip(values, widen(jax.tree.leaves(found)), strict=True)]
            unsent = treedef.unflatten(narrow(lefts, [wide_dtype(leaf.dtype) for leaf in leaves]))
        return message, keep_if_finite((grads, found), CompressorState(unsent, state), memory)

    def decode(message, like):
        leaves, treedef = jax.tree.flatten(like)
        shapes = [jax.ShapeDtypeStruct(real_shape(x), real_dtype(wide_dtype(x.dtype))) for x in leaves]
        values = codec.read(message, shapes, [real_dtype(leaf.dtype) for leaf in leaves])
        return treedef.unflatten(narrow(values, [leaf.dtype for leaf in leaves]))

    def message(params):
        grads = abstract(params)
        return jax.eval_shape(lambda grads: encode(grads, init(grads))[0], grads)

    def nbytes(params):
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(message(params)))

    return Compressor(name, init, encode, decode, message, nbytes)
