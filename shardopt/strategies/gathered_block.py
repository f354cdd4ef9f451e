"""A block whose weights are whole only while it runs, forwards and again backwards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.block_model import BlockModel, call, checkpointed
from shardopt.core.errors import complaint
from shardopt.core.types import PyTree
from shardopt.pipeline.keeping import keeping_little


def gathered_block(who: str, model: BlockModel, gather: Callable[[PyTree], PyTree]) -> Callable[..., PyTree]:
    """Return `run(one_block, index, rng, x) -> x`, the block of a model on weights that are gathered for the moment.

    Args:
      who: the strategy, for errors.
      model: whose block it is; what its `remat` recomputes is recomputed, and in any case what follows from weights.
      gather: makes the weights of one block whole.
    """

    def run(one_block: PyTree, index: Any, rng: Any, x: PyTree) -> PyTree:
        given, given_treedef = jax.tree.flatten((one_block, index, rng))
        inputs, treedef = jax.tree.flatten(x)

        def block(given: list[Any], leaves: list[Any]) -> list[Any]:
            one_block, index, rng = given_treedef.unflatten(given)
            run_one = checkpointed(model, lambda whole, x: call(model.block, rng, index, whole, x))
            return leaves_like(who, inputs, treedef, run_one(gather(one_block), treedef.unflatten(leaves)))

        return treedef.unflatten(keeping_little(block, given, inputs))

    return run


def leaves_like(who: str, shapes: list[Any], treedef: Any, y: PyTree) -> list[Any]:
    """Return the leaves of what a block returned.

    Raises:
      ValueError: if they are not of the structure, shapes and dtypes of what it was given.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, y))  # of numbers as well
    if structure == treedef and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(leaves, shapes, strict=True)
    ):
        return leaves
    show = lambda leaves: ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"  # noqa: E731
    given, returned = (show(shapes), show(leaves)) if show(shapes) != show(leaves) else (treedef, structure)
    what = f"a block must return what it is given, {given}; it returned {returned}."
    fix = "let embed bring its result to the shape and dtype that blocks return, or cast at the end of the block."
    raise ValueError(complaint(who, what, fix=fix))
