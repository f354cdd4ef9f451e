"""The trace of an optimizer update: each evaluation of the loss is a single equation in it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from shardopt.config._transformation import ExtraArgs, call_update
from shardopt.core import Arrays, PyTree
from shardopt.trace._marks import LOSS, marked
from shardopt.trace._parts import Trace, inlined, trace_of


def trace_of_update(
    tx: optax.GradientTransformation, params: PyTree, value: jax.ShapeDtypeStruct
) -> Trace:
    """Return the trace of `tx.update(grads, opt_state, params)`.

    Its first inputs are the gradients.

    Args:
      tx: the optimizer.
      params: the shapes of the trainable parameters.
      value: the shape of the loss.
    """
    return trace_update(*_update_of_shapes(tx, params, value))[0]


def _update_of_shapes(
    tx: optax.GradientTransformation, params: PyTree, value: jax.ShapeDtypeStruct
) -> tuple[Callable[..., PyTree], PyTree, PyTree, PyTree, PyTree]:
    def zeros(x):
        return jnp.zeros(x.shape, x.dtype)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array
    ) -> tuple[PyTree, PyTree]:
        extra_args = ExtraArgs(
            loss, grads, lambda _: zeros(value), lambda *_: jax.tree.map(zeros, params)
        )
        return call_update(tx, grads, opt_state, params, opaque(extra_args))

    return update, params, jax.eval_shape(tx.init, params), params, value


def trace_update(update: Callable[..., PyTree], *args: PyTree) -> tuple[Trace, PyTree]:
    """Return the trace of an update, with all calls inlined except the loss, and the shapes of its
    results.
    """
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*args)

    def flat(leaves: Arrays) -> Arrays:
        return inlined(closed.jaxpr, closed.consts, leaves, keep=(LOSS,))

    return trace_of(jax.make_jaxpr(flat)(jax.tree.leaves(args))), shapes


def opaque(extra_args: ExtraArgs) -> ExtraArgs:
    """Make each evaluation of the loss a single equation of the trace."""
    return extra_args._replace(
        value_fn=marked(LOSS, extra_args.value_fn), grad_fn=marked(LOSS, extra_args.grad_fn)
    )
