"""Fragments of the parameters that are pushed, updated and pulled one at a time (Streaming DiLoCo), on one server."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.block_model import BLOCKS
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, leaves_with_paths
from shardopt.local_updates.state import deal_out
from shardopt.parameter_server.apply import Applied, Mathematics, copied, own
from shardopt.parameter_server.updates import Update, check_params


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["number"])
@dataclasses.dataclass(frozen=True)
class Part:
    """What belongs to one fragment.

    Attributes:
      tree: like the parameters, None for leaves that have no part in it; or the message of a reducer.
      number: f, from 0.
    """

    tree: PyTree
    number: int


class Fragments(NamedTuple):
    """How parameters are dealt out to fragments, as `diloco` does: blocks f, f + P, f + 2P, ..., other leaves in turn.

    Attributes:
      num_fragments: P.
      stacked: whether the leaves of "blocks" are stacked along dim 0.
      frozen: regexes of the leaves that are not trained.
    """

    num_fragments: int
    stacked: bool
    frozen: tuple[str, ...]

    def numbers(self, params: PyTree) -> list[int | None]:
        """Return of each leaf its fragment; -1 of a stacked leaf, which has a part in all; None of one that has no part."""

        def stacked(path: str, leaf: jax.Array) -> bool | None:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact) or any(re.search(one, path) for one in self.frozen):
                return None
            return self.stacked and path.split("/")[0] == BLOCKS

        return deal_out((stacked(*one) for one in leaves_with_paths(params)), self.num_fragments)

    def take(self, params: PyTree, number: int) -> PyTree:
        """Return what belongs to a fragment; None for other leaves."""

        def one(leaf: jax.Array, of: int | None) -> jax.Array | None:
            if of == -1:
                return leaf[number :: self.num_fragments] if number < leaf.shape[0] else None
            return leaf if of == number else None

        leaves, treedef = jax.tree.flatten(params)
        return treedef.unflatten(map(one, leaves, self.numbers(params)))

    def put(self, params: PyTree, number: int, part: PyTree) -> PyTree:
        """Return the parameters with a fragment replaced."""
        leaves, treedef = jax.tree.flatten(params)
        parts = treedef.flatten_up_to(part)

        def one(leaf: jax.Array, of: int | None, new: jax.Array | None) -> jax.Array:
            if new is None:
                return leaf
            return leaf.at[number :: self.num_fragments].set(new) if of == -1 else new

        return treedef.unflatten(map(one, leaves, self.numbers(params), parts))

    def untrained(self, params: PyTree) -> dict[str, jax.Array]:
        """Return the leaves that belong to no fragment, by path."""
        pairs = zip(leaves_with_paths(params), self.numbers(params), strict=True)
        return {path: leaf for (path, leaf), of in pairs if of is None}


def check_fragments(fragments: Fragments, who: str, params: PyTree) -> None:
    """Refuse parameters that `check_params` refuses, and those of which a fragment would get nothing.

    Raises:
      TypeError: if a leaf is not an array or a number.
      ValueError: if nothing is trained, or there are more fragments than leaves and blocks to deal out.
    """
    check_params(who, params)
    params = jax.eval_shape(lambda params: params, params)
    numbers, leaves = fragments.numbers(params), jax.tree.leaves(params)
    blocks = max((leaf.shape[0] for leaf, of in zip(leaves, numbers, strict=True) if of == -1), default=0)
    most = max(blocks, sum(of is not None and of >= 0 for of in numbers))
    if fragments.num_fragments > most:
        what = f"fragments={fragments.num_fragments}, but {most} blocks or leaves can be dealt out."
        raise ValueError(format_error(who, what, fix=f"use at most {most}."))


def on_fragments(inner: Mathematics, fragments: Fragments) -> Mathematics:
    """Return the mathematics of one server that takes pushes of fragments, each with an optimizer state of its own.

    Args:
      inner: what is done to one fragment, as if it were all parameters.
      fragments: how parameters are dealt out.
    """
    take = jax.jit(fragments.take, static_argnums=1)
    put = jax.jit(fragments.put, static_argnums=1)

    def begin(params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        begun = [inner.begin(fragments.take(params, number))[1:] for number in range(fragments.num_fragments)]
        return (
            jax.tree.map(own, params),
            tuple(opt_state for opt_state, _ in begun),
            tuple(rule_state for _, rule_state in begun),
        )

    def check(update: Update | None, params: PyTree, worker: int) -> Update:
        if not (isinstance(update, Update) and isinstance(update.grads, Part)):
            what = f"worker {worker} must push an Update of a fragment, got {type(update).__name__}."
            raise TypeError(format_error("parameter_server", what))
        inner.check(_of_tree(update), part(update, params), worker)
        return update

    def part(update: Update, params: PyTree) -> PyTree:
        return take(params, update.grads.number)

    def apply(
        params: PyTree, opt_state: PyTree, rule_state: PyTree, updates: Sequence[Update], pulled: PyTree, delay: int
    ) -> Applied:
        number = updates[0].grads.number
        kept = None if pulled is None else take(pulled, number)
        states = opt_state[number], rule_state[number]
        new = inner.apply(take(params, number), *states, [_of_tree(one) for one in updates], kept, delay)
        return Applied(
            put(params, number, new.params),
            (*opt_state[:number], new.opt_state, *opt_state[number + 1 :]),
            (*rule_state[:number], new.rule_state, *rule_state[number + 1 :]),
            new.metrics,
        )

    same = lambda params: params  # noqa: E731
    return Mathematics(begin, lambda *states: states, same, same, check, apply, copied, part=part)


def _of_tree(update: Update) -> Update:
    return update._replace(grads=update.grads.tree)
