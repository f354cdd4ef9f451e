"""A worker's side of a reducer: gradients become messages, and what these do not say stays with the worker."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.parameter_server.updates import Update
from shardopt.reducers import Encoding, Memory, encoding
from shardopt.reducers.reducer import check_reducer


class Encoder(NamedTuple):
    """How workers write their updates.

    Attributes:
      header: what the log keeps of it.
      begin: `begin(worker)`, at each join: nothing is remembered.
      encode: `encode(worker, update) -> update` with a message in place of the gradient.
    """

    header: dict[str, Any]
    begin: Callable[[int], None]
    encode: Callable[[int, Update], Update]


def check_encoding(who: str, reducer: Any, sparse: Any = ()) -> Encoding | None:
    """Return the encoding of a reducer, None for none.

    Raises:
      TypeError: if it is not a reducer.
      ValueError: if one sender cannot write in its way, or leaves are sparse.
    """
    if reducer is None:
        return None
    check_reducer(who, reducer)
    found = encoding(reducer)
    if sparse:
        what = f"reducer={found.name} and sparse={tuple(sparse)} cannot be combined: sparse rows travel as they are."
        raise ValueError(format_error(who, what, fix="leave one of them out."))
    return found


def make_encoder(code: Encoding | None) -> Encoder:
    """Return what encodes the updates of workers, each with a memory of its own, on the device of its gradient.

    Without a code updates travel as they are.
    """
    if code is None:
        return Encoder({}, lambda worker: None, lambda worker, update: update)
    memories: dict[int, Memory] = {}
    start, write = _programs(code)

    def begin(worker: int) -> None:
        memories.pop(worker, None)

    def encode(worker: int, update: Update) -> Update:
        memory = memories.pop(worker, None)
        memory = start(update.grads) if memory is None else memory
        found, memories[worker] = write(update._replace(rows=None), memory)
        return found._replace(rows=update.rows)

    return Encoder({"reducer": code.name}, begin, encode)


@functools.lru_cache(maxsize=16)
def _programs(code: Encoding) -> tuple[Callable[[PyTree], Memory], Callable[..., tuple[Update, Memory]]]:
    """Return the compiled start of a memory, and the compiled encoding of an update; kept from run to run."""

    def write(update: Update, memory: Memory) -> tuple[Update, Memory]:
        message, memory = code.encode(update.grads, memory)
        read = code.decode(message, update.grads)
        # What is finite may still be too large for the dtype that travels.
        finite = [jnp.ones(2, bool), *(jnp.isfinite(leaf).all()[None] for leaf in jax.tree.leaves(read))]
        unsent = _norm(memory.unsent) / jnp.maximum(_norm(update.grads), jnp.finfo(jnp.float32).tiny)
        return update._replace(grads=message, sound=update.sound & jnp.concatenate(finite), unsent=unsent), memory

    return jax.jit(code.init), jax.jit(write, donate_argnums=1)


def _norm(tree: PyTree) -> jax.Array:
    squares = [jnp.sum(jnp.square(jnp.abs(leaf)).astype(jnp.float32)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))
