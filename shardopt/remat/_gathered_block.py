"""A block that may gather its weights when it runs, in both passes, and that chooses the values to
keep for its backward pass.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardopt.core import Arrays, PyTree, format_error, inexact_indices
from shardopt.core._block_model import BlockModel, call_block
from shardopt.core._block_remat import checkpointed
from shardopt.low_precision._reads import reading_in_products
from shardopt.remat._unread import stopped, unread_leaves
from shardopt.trace._parts import Shapes


class BlockRemat(Protocol):
    """A choice of the values that a block keeps for its backward pass."""

    def __call__(
        self, block: ClosedJaxpr, arguments: Arrays, x: Arrays, *, gathers: bool
    ) -> Arrays:
        """Return the results of `block`, a traced function of arguments and x.

        Args:
          block: the trace.
          arguments: weights, indices and keys.
          x: the input, with the shapes and dtypes of the results.
          gathers: whether the block gathers its arguments.
        """
        ...


def kept_by_jax(block: ClosedJaxpr, arguments: Arrays, x: Arrays, *, gathers: bool) -> Arrays:
    """Be a `BlockRemat` that leaves the choice to jax: it keeps all that derivatives read."""
    del gathers
    return jaxpr_as_fun(block)(*arguments, *x)


def block_with_remat(
    caller: str,
    model: BlockModel,
    gather: Callable[[PyTree], PyTree] | None,
    remat: BlockRemat,
    *,
    loss: Callable[[PyTree], PyTree] | None,
) -> Callable[..., PyTree]:
    """Return `run(one_block, index, rng, x) -> x`, which runs a block with gathered weights.

    Args:
      caller: the strategy, for errors.
      model: the model with the block. The backward pass recomputes values by `model.remat` too.
      gather: gathers the weights of one block; None if they are whole.
      remat: chooses the values that a block keeps.
      loss: the value of the loss as a function of the last block's result. None if nothing is
        differentiated.
    """

    def run(one_block: PyTree, index: jax.Array | int, rng: jax.Array | None, x: PyTree) -> PyTree:
        def block(one_block: PyTree, index: jax.Array, rng: jax.Array | None, x: PyTree) -> PyTree:
            of_user = reading_in_products(
                caller, lambda weights, x: call_block(model, rng, index, weights, x)
            )
            weights = one_block if gather is None else gather(one_block)
            y = checkpointed(model.remat, of_user)(weights, x)
            return jax.tree.map(jnp.asarray, y)  # Python numbers too

        # Trace now, while the stack contains the user's lines: the stack of the differentiation does
        # not. The copies of `remat` keep the source lines.
        traced, y = jax.make_jaxpr(block, return_shape=True)(one_block, index, rng, x)
        inputs, treedef = jax.tree.flatten(x)
        arguments = jax.tree.leaves((one_block, index, rng))
        leaves, structure = jax.tree.flatten(y)
        gathers = gather is not None
        if not _is_like(inputs, treedef, leaves, structure):
            if gathers:
                raise _unlike(caller, inputs, treedef, leaves, structure)
            # `jax.lax.scan` promotes numbers, or refuses the block
            return structure.unflatten(kept_by_jax(traced, arguments, inputs, gathers=False))
        of_loss = remat if loss is None else _stopping_unread(remat, loss, treedef)
        return treedef.unflatten(of_loss(traced, arguments, inputs, gathers=gathers))

    return run


def _stopping_unread(
    remat: BlockRemat, loss: Callable[[PyTree], PyTree], treedef: PyTree
) -> BlockRemat:
    """Return a `BlockRemat` that stops the gradients of the values that `loss` does not read."""

    def run(block: ClosedJaxpr, arguments: Arrays, x: Arrays, *, gathers: bool) -> Arrays:
        # One floating leaf that the loss does not read has no gradient at all: jax skips the scan.
        if len(inexact_indices(x)) < 2:
            return remat(block, arguments, x, gathers=gathers)
        unread = unread_leaves(
            lambda leaves: loss(treedef.unflatten(leaves)), x, lambda: (block, arguments)
        )
        if not unread:
            return remat(block, arguments, x, gathers=gathers)

        def stopping(arguments: Arrays, x: Arrays) -> Arrays:
            return stopped(jaxpr_as_fun(block)(*arguments, *stopped(x, unread)), unread)

        # Inside of the block, because `remat` may differentiate all of it, and outside, because
        # then all its results have tangents.
        stopping_block = jax.make_jaxpr(stopping)(arguments, x)
        return stopped(
            remat(stopping_block, arguments, stopped(x, unread), gathers=gathers), unread
        )

    return run


def leaves_like(caller: str, shapes: Shapes, treedef: PyTree, y: PyTree) -> Arrays:
    """Return the leaves of a block's result `y`.

    Raises:
      ValueError: if their structure, shapes or dtypes differ from the block's input.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, y))  # Python numbers too
    if not _is_like(shapes, treedef, leaves, structure):
        raise _unlike(caller, shapes, treedef, leaves, structure)
    return leaves


def _is_like(shapes: Shapes, treedef: PyTree, leaves: Shapes, structure: PyTree) -> bool:
    """Return whether a block's result has the structure, shapes and dtypes of its input."""
    return structure == treedef and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(leaves, shapes, strict=True)
    )


def _unlike(
    caller: str, shapes: Shapes, treedef: PyTree, leaves: Shapes, structure: PyTree
) -> ValueError:
    """Return the error about a result that differs from the input."""

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
    return ValueError(format_error(caller, problem, fix=fix))
