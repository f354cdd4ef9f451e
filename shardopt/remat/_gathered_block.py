"""A block that gathers its weights when it runs, in the forward pass and again in the backward
pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from shardopt.core._block_model import BlockModel, call
from shardopt.core._block_remat import checkpointed
from shardopt.core._errors import format_error
from shardopt.core._types import PyTree, abstract, replaced
from shardopt.low_precision._reads import reading_in_products
from shardopt.remat._split_backward import Arrays, Passes, Shapes, floating, split_backward


def gathered_block(
    caller: str, model: BlockModel, gather: Callable[[PyTree], PyTree]
) -> Callable[..., PyTree]:
    """Return `run(one_block, index, rng, x) -> x`, which gathers the weights of a block and runs
    it.

    Args:
      caller: the strategy, for errors.
      model: the model with the block. The backward pass recomputes values by `model.remat`, and
        always recomputes values that depend on weights alone.
      gather: gathers the weights of one block.
    """

    def run(one_block: PyTree, index: jax.Array | int, rng: jax.Array | None, x: PyTree) -> PyTree:
        arguments, arguments_treedef = jax.tree.flatten((one_block, index, rng))
        inputs, treedef = jax.tree.flatten(x)

        def block(arguments: Arrays, leaves: Arrays) -> Arrays:
            one_block, index, rng = arguments_treedef.unflatten(arguments)
            of_user = reading_in_products(
                caller, lambda weights, x: call(model.block, rng, index, weights, x)
            )
            run_block = checkpointed(model.remat, of_user)
            return leaves_like(
                caller, inputs, treedef, run_block(gather(one_block), treedef.unflatten(leaves))
            )

        return treedef.unflatten(min_cut_remat(block, arguments, inputs))

    return run


def min_cut_remat(f: Callable[[Arrays, Arrays], Arrays], arguments: Arrays, x: Arrays) -> Arrays:
    """Return `f(arguments, x)`, and store only the residuals of `split_backward` for the backward
    pass.

    The backward pass computes two kinds of values again: values that depend on `arguments` alone,
    such as gathers and casts of weights, and results of elementwise operations on residuals. A
    `jax.checkpoint` inside f stays in effect. A policy of one `jax.checkpoint` around f cannot do
    that. It sees one primitive at a time without its inputs, and overrides the policies inside f.

    Args:
      f: function of two lists of arrays; its result has the shapes and dtypes of x.
      arguments: weights, indices, keys.
      x: the input.
    """
    # Trace now, while the stack contains the user's lines: the stack of the differentiation does
    # not. A copy of the trace keeps the source lines.
    functions = _MinCut(jax.make_jaxpr(f)(arguments, x), *abstract((arguments, x)))
    run = jax.custom_vjp(functions.copy)
    run.defvjp(functions.forward, functions.backward)
    return run(arguments, x)


@dataclasses.dataclass(frozen=True, eq=False)
class _MinCut:
    """The functions of `min_cut_remat`.

    Attributes:
      traced: the jaxpr of f.
      arguments: the shapes of the arguments of f.
      x: the shapes of its input.
    """

    traced: Any
    arguments: Shapes
    x: Shapes

    @functools.cached_property
    def passes(self) -> Passes:
        """The passes, split when the function is differentiated."""
        return split_backward(self.copy, self.arguments, self.x, trained=floating(self.arguments))

    def copy(self, arguments: Arrays, x: Arrays) -> Arrays:
        return jaxpr_as_fun(self.traced)(*arguments, *x)

    def forward(self, arguments: Arrays, x: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
        y, residuals = self.passes.forward(arguments, x)
        return y, (arguments, residuals)

    def backward(
        self, saved: tuple[Arrays, Arrays], dy: Arrays
    ) -> tuple[list[jax.Array | None], list[jax.Array | None]]:
        arguments, residuals = saved
        trained, differentiable = floating(self.arguments), floating(self.x)
        dy = [dy[i] for i in differentiable]
        # Without the barrier, a compiler that sees both passes would keep the gathered weights of
        # the forward pass.
        weights, dy = jax.lax.optimization_barrier(([arguments[i] for i in trained], dy))
        dx, dw = self.passes.both(replaced(arguments, trained, weights), residuals, dy)
        return replaced([None] * len(arguments), trained, dw), replaced(
            [None] * len(self.x), differentiable, dx
        )


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
