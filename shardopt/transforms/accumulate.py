"""`accumulate`: several gradients, one update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.arguments import check_count, check_transformation
from shardopt.core.types import PyTree
from shardopt.reducers import PerDevice
from shardopt.reducers.axis import agreeing_cond
from shardopt.reducers.reducer import check_alike, check_leaves, zeros_like


class AccumulateState(NamedTuple):
    """The state of `accumulate`.

    Attributes:
      mini_step: int32, gradients added up since the last real step.
      total: their sum, in fp32 at least. Differs between devices.
      inner: the state of the wrapped transformation.
    """

    mini_step: jax.Array
    total: PerDevice
    inner: PyTree


def accumulate(inner: optax.GradientTransformation, every: int) -> optax.GradientTransformationExtraArgs:
    """Add up gradients without talking to anybody, and let `inner` see their mean once in `every` steps.

    On step t = every, 2 every, ...: update = inner(mean of the last `every` gradients); zero on all other steps, on
    which the state of `inner` stays as it is.

    **Equivalence**: equal to `inner` on the union of `every` equal batches, up to summation order.

    **Placement**: the sum is local to each device, as large as its gradients in fp32.

    **Communication**: that of `inner`, once a real step. It stands in a branch that other steps do not take; but
    where `jax.vmap` maps over the state, both branches are computed.

    Args:
      inner: what is done with the mean, such as `optax.chain(so.transforms.average_gradients("data"), ...)`.
      every: gradients a real step.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind; in `update`, if a gradient is not floating.
      ValueError: if `every` is below 1; in `update`, if the gradients are not like the parameters that `init` saw.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.accumulate(optax.sgd(1.0), every=2)
      >>> state = tx.init(jnp.zeros(()))
      >>> for gradient in (1.0, 3.0):
      ...     update, state = tx.update(jnp.array(gradient), state)
      ...     print(update)
      0.0
      -2.0
    """
    who = "accumulate"
    tx = check_transformation(who, "inner", inner)
    check_count(who, "every", every, allow_array=True)

    def init(params):
        check_leaves(who, params)
        return AccumulateState(jnp.zeros((), jnp.int32), PerDevice(zeros_like(params)), tx.init(params))

    def update(updates, state, params=None, **extra_args: PyTree):
        check_leaves(who, updates)
        check_alike(who, "the parameters that init saw", updates, state.total.value)
        total = jax.tree.map(lambda kept, g: kept + g.astype(kept.dtype), state.total.value, updates)

        def step(total, inner_state):
            mean = jax.tree.map(lambda x, g: (x / jnp.asarray(every, x.real.dtype)).astype(g.dtype), total, updates)
            found, inner_state = tx.update(mean, inner_state, params, **extra_args)
            return found, jax.tree.map(jnp.zeros_like, total), inner_state

        def wait(total, inner_state):
            shapes = jax.eval_shape(step, total, inner_state)[0]
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), total, inner_state

        if isinstance(every, int) and every == 1:
            found, total, inner_state = step(total, state.inner)
        else:
            is_last = state.mini_step + 1 >= every
            found, total, inner_state = agreeing_cond(is_last, step, wait, total, state.inner)
        return found, AccumulateState((state.mini_step + 1) % every, PerDevice(total), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
