"""A block that stores few of its values, and computes the others again in its backward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from shardopt.core import Arrays, abstract, replaced
from shardopt.remat._split_backward import Passes, Shapes, floating, split_backward


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
        trained = floating(self.arguments)
        differentiable = floating(self.x)
        dy = [dy[i] for i in differentiable]
        # Without the barrier, a compiler that sees both passes would keep the gathered weights of
        # the forward pass.
        weights, dy = jax.lax.optimization_barrier(([arguments[i] for i in trained], dy))
        dx, dw = self.passes.both(replaced(arguments, trained, weights), residuals, dy)
        return replaced([None] * len(arguments), trained, dw), replaced(
            [None] * len(self.x), differentiable, dx
        )
