"""A block whose weights are gathered only while it runs, forwards and again backwards."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from shardopt.core.block_model import BlockModel, call
from shardopt.core.block_remat import checkpointed
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract
from shardopt.remat.split_backward import Arrays, Passes, Shapes, floating, replaced, split_backward


def gathered_block(who: str, model: BlockModel, gather: Callable[[PyTree], PyTree]) -> Callable[..., PyTree]:
    """Return `run(one_block, index, rng, x) -> x`, the block of a model on weights that are gathered while it runs.

    Args:
      who: the strategy, for errors.
      model: whose block it is; what its `remat` recomputes is recomputed, and in any case what follows from weights.
      gather: gathers the weights of one block.
    """

    def run(one_block: PyTree, index: jax.Array | int, rng: jax.Array | None, x: PyTree) -> PyTree:
        given, given_treedef = jax.tree.flatten((one_block, index, rng))
        inputs, treedef = jax.tree.flatten(x)

        def block(given: Arrays, leaves: Arrays) -> Arrays:
            one_block, index, rng = given_treedef.unflatten(given)
            run_one = checkpointed(model.remat, lambda weights, x: call(model.block, rng, index, weights, x))
            return leaves_like(who, inputs, treedef, run_one(gather(one_block), treedef.unflatten(leaves)))

        return treedef.unflatten(min_cut_remat(block, given, inputs))

    return run


def min_cut_remat(f: Callable[[Arrays, Arrays], Arrays], given: Arrays, x: Arrays) -> Arrays:
    """Return `f(given, x)`, keeping for the backward pass only the residuals of `split_backward`.

    So what follows from `given` alone, gathers and casts of weights, is computed again there, and what elementwise
    operations make of a residual; a `jax.checkpoint` within f is heeded. A policy of `jax.checkpoint` around it all
    could not say that: it sees one primitive at a time, not what it depends on, and overrules those within.

    Args:
      f: of lists of arrays; its result has the shapes and dtypes of x.
      given: weights, indices, keys.
      x: the input.
    """
    trained, moving = floating(given), floating(x)
    given_shapes, x_shapes = abstract((given, x))

    # Traced here, where the stack leads to the user's lines: whoever differentiates has another, and a copy keeps its places.
    traced = jax.make_jaxpr(f)(given, x)

    def copy(given: Arrays, x: Arrays) -> Arrays:
        return jaxpr_as_fun(traced)(*given, *x)

    @functools.cache
    def passes() -> Passes:
        return split_backward(copy, given_shapes, x_shapes, trained=trained)

    def forward(given: Arrays, x: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
        y, residuals = passes().forward(given, x)
        return y, (given, residuals)

    def backward(left: tuple[Arrays, Arrays], dy: Arrays) -> tuple[list[jax.Array | None], list[jax.Array | None]]:
        given, residuals = left
        dy = [dy[i] for i in moving]
        # Or a compiler that sees both passes at once would keep what the first one gathered.
        weights, dy = jax.lax.optimization_barrier(([given[i] for i in trained], dy))
        dx, dw = passes().both(replaced(given, trained, weights), residuals, dy)
        return replaced([None] * len(given), trained, dw), replaced([None] * len(x_shapes), moving, dx)

    run = jax.custom_vjp(copy)
    run.defvjp(forward, backward)
    return run(given, x)


def leaves_like(who: str, shapes: Shapes, treedef: PyTree, y: PyTree) -> Arrays:
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
    raise ValueError(format_error(who, what, fix=fix))
