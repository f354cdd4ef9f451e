"""Fragments of the parameters, which are pushed, updated and pulled one at a time (Streaming
DiLoCo).
"""

import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core._block_model import BLOCKS
from shardopt.core._errors import error_text
from shardopt.core._types import PyTree, leaves_with_paths
from shardopt.local_updates._state import deal_out
from shardopt.parameter_server._updates import check_params


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["number"])
@dataclasses.dataclass(frozen=True)
class FragmentTree:
    """The leaves, or slices of leaves, that belong to one fragment.

    Attributes:
      tree: like the parameters, with None for leaves outside of the fragment; or the message of a
        reducer.
      number: f, from 0.
    """

    tree: PyTree
    number: int


class FragmentPlan(NamedTuple):
    """The assignment of parameters to fragments, as in `diloco`: blocks f, f + P, f + 2P, ....

    Other leaves in turn.

    Attributes:
      num_fragments: P.
      stacked: whether the leaves of "blocks" are stacked along dim 0.
      frozen: regexes of the leaves that are not trained.
    """

    num_fragments: int
    stacked: bool
    frozen: tuple[str | re.Pattern[str], ...]

    def numbers(self, params: PyTree) -> list[int | None]:
        """Return the fragment number of each leaf: -1 for a stacked leaf, which is in all.

        None for one in no fragment.
        """

        def is_stacked(path: str, leaf: jax.Array) -> bool | None:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact) or any(
                re.search(regex, path) for regex in self.frozen
            ):
                return None
            return self.stacked and path.split("/")[0] == BLOCKS

        return deal_out(
            (is_stacked(*path_and_leaf) for path_and_leaf in leaves_with_paths(params)),
            self.num_fragments,
        )

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

        def put_leaf(
            leaf: jax.Array, leaf_number: int | None, new_leaf: jax.Array | None
        ) -> jax.Array:
            if new_leaf is None:
                return leaf
            return (
                leaf.at[number :: self.num_fragments].set(new_leaf)
                if leaf_number == -1
                else new_leaf
            )

        return treedef.unflatten(map(put_leaf, leaves, self.numbers(params), fragment_leaves))

    def untrained(self, params: PyTree) -> dict[str, jax.Array]:
        """Return the leaves that belong to no fragment, by path."""
        pairs = zip(leaves_with_paths(params), self.numbers(params), strict=True)
        return {path: leaf for (path, leaf), leaf_number in pairs if leaf_number is None}


take_fragment = jax.jit(FragmentPlan.take, static_argnums=(0, 2))
"""`take_fragment(plan, params, number)`, compiled."""
put_fragment = jax.jit(FragmentPlan.put, static_argnums=(0, 2))


def check_fragments(plan: FragmentPlan, params: PyTree) -> None:
    """Refuse parameters that `check_params` refuses, and plans with a fragment that gets no
    parameters.

    Raises:
      TypeError: if a leaf is not an array or a number.
      ValueError: if nothing is trained, or there are more fragments than leaves and blocks to deal
        out.
    """
    check_params(params)
    params = jax.eval_shape(lambda params: params, params)
    numbers, leaves = plan.numbers(params), jax.tree.leaves(params)
    num_blocks = max(
        (leaf.shape[0] for leaf, number in zip(leaves, numbers, strict=True) if number == -1),
        default=0,
    )
    max_fragments = max(num_blocks, sum(number is not None and number >= 0 for number in numbers))
    if plan.num_fragments > max_fragments:
        problem = (
            f"fragments={plan.num_fragments}, but {max_fragments} blocks or leaves can be dealt"
            " out."
        )
        raise ValueError(error_text(problem, fix=f"use at most {max_fragments}."))
