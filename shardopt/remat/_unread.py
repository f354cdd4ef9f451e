"""Values that blocks hand on, and that no derivative of the loss reads, such as a metric."""

from collections.abc import Callable, Sequence

import jax
import jax.core
from jax.custom_derivatives import SymbolicZero
from jax.interpreters.partial_eval import dce_jaxpr

from shardopt.core import Arrays, PyTree, is_inexact, replaced
from shardopt.trace._parts import Shapes, abstract_value


def unread_leaves(
    block: Callable[[PyTree, PyTree], PyTree],
    loss: Callable[[PyTree], PyTree],
    weights: PyTree,
    x: PyTree,
) -> list[int]:
    """Return the indices of the floating leaves of x that no derivative of the loss reads, neither
    after this block nor after more of them.

    A block that is differentiated apart from the loss gets zeros as the gradient of such a leaf.
    Zero times an infinite derivative, as of the norm of zeros, is NaN. jax multiplies nothing there,
    since it drops what nobody reads. So a caller stops these gradients, by `stopped`.

    Args:
      block: a function of weights and x.
      loss: the value of the loss as a function of the last block's result. Both are traced, and
        only if x has several floating leaves.
      weights: of a block, or their shapes.
      x: its input, or the shapes.
    """
    leaves, treedef = jax.tree.flatten(x)
    inexact = {i for i, leaf in enumerate(leaves) if is_inexact(leaf)}
    if len(inexact) < 2:
        return []

    def loss_of_leaves(_, leaves: Arrays) -> Arrays:
        return jax.tree.leaves(loss(treedef.unflatten(leaves)))

    def read_results(weights: PyTree, leaves: Arrays) -> Arrays:
        y, structure = jax.tree.flatten(block(weights, treedef.unflatten(leaves)))
        # the caller refuses a block with another structure
        return [y[i] for i in read] if structure == treedef else y

    read = _reached(loss_of_leaves, None, leaves)
    while len(read) < len(inexact):
        reached = _reached(read_results, weights, leaves)
        if reached <= read:
            break
        read |= reached
    return sorted(inexact - read)


def stopped(x: PyTree, indices: Sequence[int]) -> PyTree:
    """Return x with the gradients of these leaves stopped."""
    leaves, treedef = jax.tree.flatten(x)
    stopped_leaves = [jax.lax.stop_gradient(leaves[i]) for i in indices]
    return treedef.unflatten(replaced(leaves, indices, stopped_leaves))


def _reached(f: Callable[[PyTree, Arrays], Arrays], weights: PyTree, x: Shapes) -> set[int]:
    """Return the indices of the leaves of x that get a gradient from the results of f."""
    flat_weights = jax.tree.leaves(weights)
    closed = jax.make_jaxpr(f)(weights, list(x))
    # jax may refuse the derivative of an operation that no floating result needs
    wanted = [is_inexact(abstract_value(result)) for result in closed.jaxpr.outvars]
    needed, _ = dce_jaxpr(closed.jaxpr, wanted, instantiate=True)

    def run(x: Arrays) -> Arrays:
        return jax.core.eval_jaxpr(needed, closed.consts, *flat_weights, *x)

    asked = [i for i, leaf in enumerate(x) if is_inexact(leaf)]
    return {i for i in asked if _gets_gradient(i, run, x)}


def _gets_gradient(i: int, f: Callable[[Arrays], Arrays], x: Shapes) -> bool:
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

    def gradient(x: Arrays) -> Arrays:
        results, vjp = jax.vjp(lambda leaf: f(replaced(x, [i], [watched(leaf)])), x[i])
        return vjp(results)

    try:
        jax.eval_shape(gradient, list(x))
    except Exception:  # so would the step, if it needed it
        return True
    return reaches
