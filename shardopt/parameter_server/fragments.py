"""Fragments of the parameters, which are pushed, updated and pulled one at a time (Streaming DiLoCo), on one server."""

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
from shardopt.parameter_server.apply import Mathematics, ServerArrays, UpdateResult, copy_states, copy_without_weak_type
from shardopt.parameter_server.updates import Update, check_params


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["number"])
@dataclasses.dataclass(frozen=True)
class Fragment:
    """The leaves, or slices of leaves, that belong to one fragment.

    Attributes:
      tree: like the parameters, with None for leaves outside of the fragment; or the message of a reducer.
      number: f, from 0.
    """

    tree: PyTree
    number: int


class FragmentPlan(NamedTuple):
    """The assignment of parameters to fragments, as in `diloco`: blocks f, f + P, f + 2P, ...; other leaves in turn.

    Attributes:
      num_fragments: P.
      stacked: whether the leaves of "blocks" are stacked along dim 0.
      frozen: regexes of the leaves that are not trained.
    """

    num_fragments: int
    stacked: bool
    frozen: tuple[str, ...]

    def numbers(self, params: PyTree) -> list[int | None]:
        """Return the fragment number of each leaf: -1 for a stacked leaf, which is in all; None for one in no fragment."""

        def is_stacked(path: str, leaf: jax.Array) -> bool | None:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact) or any(re.search(regex, path) for regex in self.frozen):
                return None
            return self.stacked and path.split("/")[0] == BLOCKS

        return deal_out((is_stacked(*path_and_leaf) for path_and_leaf in leaves_with_paths(params)), self.num_fragments)

    def take(self, params: PyTree, number: int) -> PyTree:
        """Return the leaves of a fragment, with None for all other leaves."""

        def take_leaf(leaf: jax.Array, leaf_number: int | None) -> jax.Array | None:
            if leaf_number == -1:
                return leaf[number :: self.num_fragments] if number < leaf.shape[0] else None
            return leaf if leaf_number == number else None

        leaves, treedef = jax.tree.flatten(params)
        return treedef.unflatten(map(take_leaf, leaves, self.numbers(params)))

    def put(self, params: PyTree, number: int, fragment: PyTree) -> PyTree:
        """Return the parameters with the leaves of a fragment replaced."""
        leaves, treedef = jax.tree.flatten(params)
        fragment_leaves = treedef.flatten_up_to(fragment)

        def put_leaf(leaf: jax.Array, leaf_number: int | None, new_leaf: jax.Array | None) -> jax.Array:
            if new_leaf is None:
                return leaf
            return leaf.at[number :: self.num_fragments].set(new_leaf) if leaf_number == -1 else new_leaf

        return treedef.unflatten(map(put_leaf, leaves, self.numbers(params), fragment_leaves))

    def untrained(self, params: PyTree) -> dict[str, jax.Array]:
        """Return the leaves that belong to no fragment, by path."""
        pairs = zip(leaves_with_paths(params), self.numbers(params), strict=True)
        return {path: leaf for (path, leaf), leaf_number in pairs if leaf_number is None}


_take = jax.jit(FragmentPlan.take, static_argnums=(0, 2))
_put = jax.jit(FragmentPlan.put, static_argnums=(0, 2))


def check_fragments(plan: FragmentPlan, caller: str, params: PyTree) -> None:
    """Refuse parameters that `check_params` refuses, and plans with a fragment that gets no parameters.

    Raises:
      TypeError: if a leaf is not an array or a number.
      ValueError: if nothing is trained, or there are more fragments than leaves and blocks to deal out.
    """
    check_params(caller, params)
    params = jax.eval_shape(lambda params: params, params)
    numbers, leaves = plan.numbers(params), jax.tree.leaves(params)
    num_blocks = max((leaf.shape[0] for leaf, number in zip(leaves, numbers, strict=True) if number == -1), default=0)
    max_fragments = max(num_blocks, sum(number is not None and number >= 0 for number in numbers))
    if plan.num_fragments > max_fragments:
        problem = f"fragments={plan.num_fragments}, but {max_fragments} blocks or leaves can be dealt out."
        raise ValueError(format_error(caller, problem, fix=f"use at most {max_fragments}."))


@dataclasses.dataclass(frozen=True)
class FragmentMathematics:
    """The mathematics of one server that takes pushes of fragments, and has an optimizer state for each fragment.

    Attributes:
      inner: the mathematics of one fragment, as if it were all parameters.
      plan: the assignment of parameters to fragments.
    """

    inner: Mathematics
    plan: FragmentPlan
    adopt = full_params = staticmethod(lambda value: value)
    copy = staticmethod(copy_states)

    def begin(self, params: PyTree) -> ServerArrays:
        """Return copies of the parameters, and the initial states of each fragment."""
        states = [self.inner.begin(self.plan.take(params, number))[1:] for number in range(self.plan.num_fragments)]
        opt_states, rule_states = zip(*states, strict=True)
        return jax.tree.map(copy_without_weak_type, params), opt_states, rule_states

    def pushed_params(self, update: Update, params: PyTree) -> PyTree:
        """Return the leaves of the pushed fragment, with None for all other leaves."""
        return _take(self.plan, params, update.grads.number)

    def check(self, update: Update | None, params: PyTree, worker: int) -> Update:
        """Return the update, or refuse it if it is not of a fragment, or does not fit the fragment."""
        if not (isinstance(update, Update) and isinstance(update.grads, Fragment)):
            problem = f"worker {worker} must push an Update of a fragment, got {type(update).__name__}."
            raise TypeError(format_error("parameter_server", problem))
        self.inner.check(_with_tree(update), self.pushed_params(update, params), worker)
        return update

    def apply(self, arrays: ServerArrays, updates: Sequence[Update], pulled: PyTree, delay: int) -> UpdateResult:
        """Update one fragment and its states."""
        params, opt_state, rule_state = arrays
        number = updates[0].grads.number
        fragment = _take(self.plan, params, number), opt_state[number], rule_state[number]
        tree_updates = [_with_tree(update) for update in updates]
        result = self.inner.apply(
            fragment, tree_updates, None if pulled is None else _take(self.plan, pulled, number), delay
        )
        return UpdateResult(
            _put(self.plan, params, number, result.params),
            (*opt_state[:number], result.opt_state, *opt_state[number + 1 :]),
            (*rule_state[:number], result.rule_state, *rule_state[number + 1 :]),
            result.metrics,
        )


def _with_tree(update: Update) -> Update:
    """Return the update with the tree of its fragment as gradient."""
    return update._replace(grads=update.grads.tree)
