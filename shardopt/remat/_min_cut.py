"""A block that stores few of its values, and computes the others again in its backward pass."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters.ad import primitive_jvps

from shardopt.core import Arrays, abstract, inexact_indices, is_inexact, replaced
from shardopt.remat._gathered_block import kept_by_jax
from shardopt.remat._split_backward import Passes, Shapes, called_back, split_backward
from shardopt.trace._jaxprs import CUSTOM, called_jaxprs
from shardopt.trace._parts import (
    Atom,
    Trace,
    abstract_value,
    inputs_of,
    part_of,
    reached_from,
    slice_of,
    trace_of,
)


def min_cut_remat(block: ClosedJaxpr, arguments: Arrays, x: Arrays, *, gathers: bool) -> Arrays:
    """Return the results of a block that stores only the residuals of `split_backward` for the
    backward pass, which computes all others again.

    A `jax.checkpoint` inside the block stays in effect. A policy of one `jax.checkpoint` around it
    cannot do that. It sees one primitive at a time without its inputs, and overrides the policies
    inside the block.

    Only arrays with a tangent are differentiated, as without it. So an operation without a derivative,
    such as a callback, may read frozen weights and numbers of the batch. One thing differs: all
    floating results that depend on weights have tangents, for the next block and for the loss. jax
    may refuse to differentiate an operation that reads them. So a block that gathers nothing keeps
    what jax keeps, if it has several such results, or an operation without a derivative.

    Args:
      block: the trace of a function of arguments and x.
      arguments: weights, indices, keys.
      x: the input, with the shapes and dtypes of the results.
      gathers: whether the block gathers its arguments, see `split_backward`.
    """
    # `jax.custom_vjp` differentiates arguments alone, and a block may close over weights.
    operands = [*block.consts, *arguments]
    inputs = [*block.jaxpr.constvars, *block.jaxpr.invars]
    trace = trace_of(block)._replace(jaxpr=block.jaxpr.replace(constvars=[]), consts=[])
    of_weights = _indices_of_weights(trace, inputs, operands)
    results = trace.jaxpr.outvars
    differentiated = [
        i for i in of_weights if is_inexact(x[i]) and not _is_stopped(trace, results[i])
    ]
    differs_from_jax = len(differentiated) > 1 or not _has_derivative(block.jaxpr)
    if not of_weights or (differs_from_jax and not gathers):
        return kept_by_jax(block, arguments, x, gathers=gathers)
    # All floating results of `jax.custom_vjp` have tangents. So numbers that blocks hand on, and
    # compute from each other alone, are computed apart from it.
    handed_on = [i for i in range(len(x)) if i not in of_weights]
    handed_on_vars = [results[i] for i in handed_on]
    needed, _ = slice_of(trace, handed_on_vars, stop=set())
    hand_on = part_of(trace, needed, inputs, handed_on_vars)
    y = replaced(list(x), handed_on, hand_on(*operands, *x))
    # Every equation, also one that no result needs: a derivative rule may refuse it.
    every = set(range(len(trace.jaxpr.eqns)))
    copy = part_of(trace, every, inputs, [results[i] for i in of_weights])
    x_shapes = abstract(list(x))
    y_shapes = [x_shapes[i] for i in of_weights]
    functions = _MinCut(copy, abstract(operands), x_shapes, y_shapes, gathers)
    run = jax.custom_vjp(functions.run)
    run.defvjp(functions.forward, lambda backward, dy: backward(dy), symbolic_zeros=True)
    return replaced(y, of_weights, run(operands, list(x)))


def _indices_of_weights(trace: Trace, inputs: Sequence[Var], operands: Arrays) -> list[int]:
    """Return the indices of the results that depend on weights or callbacks.

    `operands` are the values of the first inputs, without x.
    """
    weights = [
        var
        for var, value in zip(inputs, operands, strict=False)
        if is_inexact(value) and isinstance(value, jax.core.Tracer)
    ]
    start = [*weights, *called_back(trace.jaxpr)]
    dependent = reached_from(trace.jaxpr, start, every=False)
    results = trace.jaxpr.outvars
    return [i for i, var in enumerate(results) if isinstance(var, Var) and var in dependent]


def _is_stopped(trace: Trace, result: Atom) -> bool:
    """Return whether a result has its gradient stopped."""
    producer = trace.producers.get(result) if isinstance(result, Var) else None
    return producer is not None and trace.jaxpr.eqns[producer].primitive.name == "stop_gradient"


def _has_derivative(jaxpr: ClosedJaxpr | Jaxpr) -> bool:
    """Return whether jax has a derivative, backwards, for each operation."""
    return all(map(_is_differentiable, jaxpr.eqns))


def _is_differentiable(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name in CUSTOM or not any(is_inexact(abstract_value(var)) for var in inputs_of(eqn)):
        return True
    if name == "while" or "callback" in name:
        return False
    called = called_jaxprs(eqn)
    return all(map(_has_derivative, called)) if called else eqn.primitive in primitive_jvps


@dataclasses.dataclass(frozen=True, eq=False)
class _MinCut:
    """The functions of `min_cut_remat`.

    Attributes:
      copy: of the block, as a function of all its arrays.
      arguments: the shapes of its arguments.
      x: the shapes of its input.
      y: the shapes of its results.
      gathers: whether it gathers its arguments.
    """

    copy: Callable[..., Arrays]
    arguments: Shapes
    x: Shapes
    y: Shapes
    gathers: bool

    def run(self, arguments: Arrays, x: Arrays) -> Arrays:
        """Return the results."""
        return self.copy(*arguments, *x)

    def forward(self, arguments: Sequence[Any], x: Sequence[Any]) -> tuple[Arrays, Any]:
        """Return the results, and the backward pass with its residuals, of arguments that say
        whether they have a tangent.
        """
        trained = [i for i in inexact_indices(self.arguments) if arguments[i].perturbed]
        differentiated = [i for i in inexact_indices(self.x) if x[i].perturbed]
        passes = split_backward(
            self.run,
            self.arguments,
            self.x,
            trained=trained,
            differentiated=differentiated,
            y=self.y,
            gathers=self.gathers,
        )
        values = [argument.value for argument in arguments]
        y, residuals = passes.forward(values, [leaf.value for leaf in x])
        backward = functools.partial(self.backward, passes, trained, differentiated)
        return y, jax.tree_util.Partial(backward, values, residuals)

    def backward(
        self,
        passes: Passes,
        trained: Sequence[int],
        differentiated: Sequence[int],
        arguments: Arrays,
        residuals: Arrays,
        dy: Sequence[jax.Array | SymbolicZero],
    ) -> tuple[list[jax.Array | None], list[jax.Array | None]]:
        """Return the gradients of arguments and input; None for those without a tangent."""
        of_results = [
            jnp.zeros(y.shape, y.dtype) if isinstance(cotangent, SymbolicZero) else cotangent
            for cotangent, y in zip(dy, self.y, strict=True)
            if is_inexact(y)
        ]
        # Without the barrier, a compiler that sees both passes would keep the gathered weights of
        # the forward pass.
        weights, of_results = jax.lax.optimization_barrier(
            ([arguments[i] for i in trained], of_results)
        )
        dx, dw = passes.both(replaced(arguments, trained, weights), residuals, of_results)
        return replaced([None] * len(arguments), trained, dw), replaced(
            [None] * len(self.x), differentiated, dx
        )
