"""Values that blocks hand on, and that no derivative of the loss reads, such as a metric."""

from collections.abc import Callable, Collection, Sequence

import jax
import jax.core
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from shardopt.core import Arrays, PyTree, inexact_indices, is_inexact, replaced
from shardopt.trace._parts import Shapes, abstract_value


def unread_leaves(
    loss: Callable[[Arrays], PyTree],
    x: Shapes,
    block: Callable[[], tuple[ClosedJaxpr, Shapes]],
) -> list[int]:
    """Return the indices of the floating leaves of x that no derivative of the loss reads, neither
    after the last block nor after more of them.

    A block that is differentiated apart from the loss gets zeros as the gradient of such a leaf.
    Zero times an infinite derivative, as of the norm of zeros, is NaN. jax multiplies nothing there,
    since it drops what nobody reads. So a caller stops these gradients, by `stopped`.

    Args:
      loss: the value of the loss as a function of the last block's result. It is traced.
      x: the leaves of the input and of the result of a block, or their shapes.
      block: returns the trace of a block, a function of arguments and x, and the arguments or their
        shapes. Called only if the loss does not read all leaves.
    """
    inexact = set(inexact_indices(x))
    traced_loss = jax.make_jaxpr(loss)(list(x))
    read = _reached(traced_loss, range(len(traced_loss.out_avals)), [], x)
    if read == inexact:
        return []
    traced_block, arguments = block()
    while True:
        reached = _reached(traced_block, read, arguments, x)
        if reached <= read:
            return sorted(inexact - read)
        read |= reached


def stopped(leaves: Sequence[jax.Array], indices: Sequence[int]) -> Arrays:
    """Return the leaves, those at the indices with their gradients stopped."""
    return replaced(leaves, indices, [jax.lax.stop_gradient(leaves[i]) for i in indices])


def _reached(
    traced: ClosedJaxpr, results: Collection[int], arguments: Shapes, x: Shapes
) -> set[int]:
    """Return the indices of the leaves of x that get a gradient from these results of a function of
    arguments and x.
    """
    # jax may refuse the derivative of an operation that no such result needs
    wanted = [
        i in results and is_inexact(abstract_value(result))
        for i, result in enumerate(traced.jaxpr.outvars)
    ]
    needed, _ = dce_jaxpr(traced.jaxpr, wanted, instantiate=True)

    def run(arguments: Arrays, x: Arrays) -> Arrays:
        return jax.core.eval_jaxpr(needed, traced.consts, *arguments, *x)

    return {i for i in inexact_indices(x) if _gets_gradient(i, run, arguments, x)}


def _gets_gradient(
    i: int, f: Callable[[Arrays, Arrays], Arrays], arguments: Shapes, x: Shapes
) -> bool:
    """Return whether a gradient of the results of f reaches leaf i of x, by jax's own rules, or
    whether jax refuses it.
    """
    reaches = False

    def backward(_, dy):
        nonlocal reaches
        reaches = not isinstance(dy, SymbolicZero)
        return (dy,)

    watched = jax.custom_vjp(lambda leaf: leaf)
    watched.defvjp(lambda primal: (primal.value, None), backward, symbolic_zeros=True)

    def gradient(arguments: Arrays, x: Arrays) -> Arrays:
        def f_of_leaf(leaf: jax.Array) -> Arrays:
            return f(arguments, replaced(x, [i], [watched(leaf)]))

        results, vjp = jax.vjp(f_of_leaf, x[i])
        return vjp(results)

    try:
        jax.eval_shape(gradient, list(arguments), list(x))
    except Exception:  # so would the step, if it needed it
        return True
    return reaches
