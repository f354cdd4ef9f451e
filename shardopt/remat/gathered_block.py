"""A block whose weights are whole only while it runs, forwards and again backwards."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.block_model import BlockModel, call, checkpointed
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract
from shardopt.remat.split_backward import floating, replaced, split_backward

# A block that keeps little of its forward pass for its backward pass, outside of any pipeline.


Arrays = list[Any]


def min_cut_remat(f: Callable[[Arrays, Arrays], Arrays], given: Arrays, x: Arrays) -> Arrays:
    """Return `f(given, x)`, keeping for the backward pass only what `take_apart` keeps.

    So what follows from `given` alone, gathers and casts of weights, is computed again there, and what elementwise
    operations make of something kept; a `jax.checkpoint` within f is heeded. A policy of `jax.checkpoint` around it all
    could not say that: it sees one primitive at a time, not what it depends on, and overrules those within.

    Args:
      f: of lists of arrays; its result has the shapes and dtypes of x.
      given: weights, indices, keys.
      x: the input.
    """
    trained, moving = floating(given), floating(x)
    passes = functools.cache(lambda: split_backward(f, given_shapes, x_shapes, trained=trained))
    given_shapes, x_shapes = abstract((given, x))

    def forward(given: Arrays, x: Arrays) -> tuple[Arrays, Any]:
        y, kept = passes().forward(given, x)
        return y, (given, kept)

    def backward(left: tuple[Arrays, Arrays], dy: Arrays) -> tuple[Arrays, Arrays]:
        given, kept = left
        dy = [dy[i] for i in moving]
        # Or a compiler that sees both passes at once would keep what the first one gathered.
        weights, dy = jax.lax.optimization_barrier(([given[i] for i in trained], dy))
        dx, dw = passes().both(replaced(given, trained, weights), kept, dy)
        return replaced([None] * len(given), trained, dw), replaced([None] * len(x), moving, dx)

    run = jax.custom_vjp(f)
    run.defvjp(forward, backward)
    return run(given, x)


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

        return treedef.unflatten(min_cut_remat(block, given, inputs))

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
    raise ValueError(format_error(who, what, fix=fix))
