"""How one sender writes its values, and any receiver reads them: the part of a reducer that needs no axis."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardopt.core.types import PyTree
from shardopt.reducers.buckets import plan_buckets
from shardopt.reducers.two_phase import Codec


def _no_state(params: PyTree) -> PyTree:
    return ()


class Code(NamedTuple):
    """Functions over lists of real arrays, fp32 or wider; a complex leaf [...] comes as [..., 2].

    Attributes:
      write: `write(values, dtypes, state) -> (message, state)`: any tree of compact arrays. Dtypes are those of the
        leaves, real parts of complex ones.
      read: `read(message, shapes, dtypes) -> values`; `shapes` are values or `jax.ShapeDtypeStruct`s like them.
      init: `init(params) -> state`.
      correct: `correct(values, state) -> (values, state)`, run before what was not sent is added; None for nothing.
      feedback: whether what a message does not say is remembered.
    """

    write: Callable[[list[Any], list[Any], PyTree], tuple[PyTree, PyTree]]
    read: Callable[[PyTree, list[Any], list[Any]], list[Any]]
    init: Callable[[PyTree], PyTree] = _no_state
    correct: Callable[[list[Any], PyTree], tuple[list[Any], PyTree]] | None = None
    feedback: bool = False


def cast_code(travels: Callable[[Any], Any]) -> Code:
    """Return the code that rounds each value to `travels(dtype of its leaf)`."""

    def write(values, dtypes, state):
        return [value.astype(travels(dtype)) for value, dtype in zip(values, dtypes, strict=True)], state

    def read(message, shapes, dtypes):
        return [part.astype(like.dtype) for part, like in zip(message, shapes, strict=True)]

    return Code(write, read)


def block_code(codec: Codec) -> Code:
    """Return the code that sends flat buckets through a codec, each as one row."""

    def write(values, dtypes, state):
        message = []
        for bucket in _buckets(values):
            pieces = [values[i].reshape(-1) for i in bucket.members]
            flat = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
            length = codec.length(bucket.size)
            row = jnp.pad(flat, (0, length - bucket.size))[None]
            message.append(codec.encode(row, (jnp.arange(length) < bucket.size)[None]))
        return message, state

    def read(message, shapes, dtypes):
        values = [jnp.zeros(like.shape, like.dtype) for like in shapes]
        for bucket, parts in zip(_buckets(shapes), message, strict=True):
            row, start = codec.decode(parts, codec.length(bucket.size), bucket.key)[0], 0
            for i, size in zip(bucket.members, bucket.sizes, strict=True):
                values[i] = row[start : start + size].reshape(shapes[i].shape)
                start += size
        return values

    return Code(write, read)


def _buckets(values: Sequence[Any]) -> list[Any]:
    return plan_buckets([value.size for value in values], [value.dtype for value in values])
