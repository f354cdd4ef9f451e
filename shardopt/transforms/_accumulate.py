"""`accumulate`: add up several gradients for one update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core._arguments import check_count, check_transformation
from shardopt.core._errors import calling
from shardopt.core._types import PyTree, wide_zeros
from shardopt.reducers import PerDevice
from shardopt.reducers._axis import agreeing_cond
from shardopt.reducers._reducer import check_alike, check_leaves


class AccumulateState(NamedTuple):
    """The state of `accumulate`.

    Attributes:
      mini_step: int32, the number of gradients added up since the last update of `inner`.
      total: the sum of these gradients, in fp32 or wider. It differs between devices.
      inner: the state of the wrapped transformation.
    """

    mini_step: jax.Array
    total: PerDevice
    inner: PyTree


@calling("accumulate")
def accumulate(
    inner: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Add up gradients on each device, and pass their mean to `inner` every `every` steps.

    On steps t = every, 2 every, ...: update = inner(mean of the last `every` gradients). On all
    other steps the update is zero, and the state of `inner` does not change.

    Args:
      inner: the transformation of the mean, such as
        `optax.chain(so.transforms.average_gradients("data"), ...)`.
      every: the number of gradients per update of `inner`.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind; in `update`, if a gradient is not floating.
      ValueError: if `every` is below 1; in `update`, if the gradients are not like the parameters
        that `init` saw.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.accumulate(optax.sgd(1.0), every=2)
      >>> state = tx.init(jnp.zeros(()))
      >>> for gradient in (1.0, 3.0):
      ...     update, state = tx.update(jnp.array(gradient), state)
      ...     print(update)
      0.0
      -2.0

    **Equivalence**: equal to `inner` on the union of `every` equal batches, up to summation order.

    **Placement**: the sum is local to each device, as large as its gradients in fp32.

    **Communication**: the communication of `inner`, once every `every` steps. It is in a branch
    that other steps do not take. Under a `jax.vmap` over the state, both branches are computed.
    """
    tx = check_transformation("inner", inner)
    check_count("every", every, allow_array=True)

    functions = _Accumulate(tx, every)
    return optax.GradientTransformationExtraArgs(functions.init, functions.update)


class _Accumulate(NamedTuple):
    """The functions of `accumulate`, with its arguments."""

    tx: optax.GradientTransformationExtraArgs
    every: int | jax.Array

    @calling("accumulate")
    def init(self, params: PyTree) -> AccumulateState:
        check_leaves(params)
        return AccumulateState(
            jnp.zeros((), jnp.int32), PerDevice(wide_zeros(params)), self.tx.init(params)
        )

    @calling("accumulate")
    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, AccumulateState]:
        check_leaves(updates)
        check_alike("the parameters that init saw", updates, state.total.value)
        total = jax.tree.map(
            lambda old_sum, g: old_sum + g.astype(old_sum.dtype), state.total.value, updates
        )

        def step(total, inner_state):
            mean = jax.tree.map(
                lambda x, g: (x / jnp.asarray(self.every, x.real.dtype)).astype(g.dtype),
                total,
                updates,
            )
            inner_updates, inner_state = self.tx.update(mean, inner_state, params, **extra_args)
            return inner_updates, jax.tree.map(jnp.zeros_like, total), inner_state

        def wait(total, inner_state):
            shapes = jax.eval_shape(step, total, inner_state)[0]
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), total, inner_state

        if isinstance(self.every, int) and self.every == 1:
            inner_updates, total, inner_state = step(total, state.inner)
        else:
            is_last = state.mini_step + 1 >= self.every
            inner_updates, total, inner_state = agreeing_cond(
                is_last, step, wait, total, state.inner
            )
        return inner_updates, AccumulateState(
            (state.mini_step + 1) % self.every, PerDevice(total), inner_state
        )
