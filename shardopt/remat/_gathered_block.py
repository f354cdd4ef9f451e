"""A block that gathers its weights when it runs, in the forward pass and again in the backward
pass.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardopt.core import Arrays, PyTree, format_error
from shardopt.core._block_model import BlockModel, call_block
from shardopt.core._block_remat import checkpointed
from shardopt.low_precision._reads import reading_in_products
from shardopt.trace._parts import Shapes

BlockRemat = Callable[[Callable[[Arrays, Arrays], Arrays], Arrays, Arrays], Arrays]
"""`remat(f, arguments, x) -> f(arguments, x)`, which chooses what f keeps for its backward pass."""


def gathered_block(
    caller: str, model: BlockModel, gather: Callable[[PyTree], PyTree], remat: BlockRemat
) -> Callable[..., PyTree]:
    """Return `run(one_block, index, rng, x) -> x`, which gathers the weights of a block and runs
    it.

    Args:
      caller: the strategy, for errors.
      model: the model with the block. The backward pass recomputes values by `model.remat`, and
        always recomputes values that depend on weights alone.
      gather: gathers the weights of one block.
      remat: chooses the values that a block keeps.
    """

    def run(one_block: PyTree, index: jax.Array | int, rng: jax.Array | None, x: PyTree) -> PyTree:
        arguments, arguments_treedef = jax.tree.flatten((one_block, index, rng))
        inputs, treedef = jax.tree.flatten(x)

        def block(arguments: Arrays, leaves: Arrays) -> Arrays:
            one_block, index, rng = arguments_treedef.unflatten(arguments)
            of_user = reading_in_products(
                caller, lambda weights, x: call_block(model, rng, index, weights, x)
            )
            run_block = checkpointed(model.remat, of_user)
            return leaves_like(
                caller, inputs, treedef, run_block(gather(one_block), treedef.unflatten(leaves))
            )

        return treedef.unflatten(remat(block, arguments, inputs))

    return run


def leaves_like(caller: str, shapes: Shapes, treedef: PyTree, y: PyTree) -> Arrays:
    """Return the leaves of a block's result `y`.

    Raises:
      ValueError: if their structure, shapes or dtypes differ from the block's input.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, y))  # Python numbers too
    if structure == treedef and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(leaves, shapes, strict=True)
    ):
        return leaves

    def show(leaves):
        return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"

    expected, returned = (
        (show(shapes), show(leaves)) if show(shapes) != show(leaves) else (treedef, structure)
    )
    problem = f"a block must return what it is given, {expected}; it returned {returned}."
    fix = (
        "let embed bring its result to the shape and dtype that blocks return, or cast at the end"
        " of the block."
    )
    raise ValueError(format_error(caller, problem, fix=fix))
