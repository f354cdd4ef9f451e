"""`average_gradients`: data parallelism as a link of an optax chain."""

from typing import NamedTuple

import optax

from shardopt.core.types import PyTree
from shardopt.reducers import Reducer, exact
from shardopt.reducers.axis import AxisName, axis_names, axis_size
from shardopt.reducers.reducer import check_reducer


class AverageGradientsState(NamedTuple):
    """The state of `average_gradients`: that of its reducer."""

    reducer: PyTree


def average_gradients(axis_name: AxisName, reducer: Reducer | None = None) -> optax.GradientTransformationExtraArgs:
    """Replace each device's gradients by their mean over an axis.

    g = mean_d g_d, as the reducer makes it; what comes later in the chain sees the same on all devices.

    **Equivalence**: with no reducer, equal to one device on the union batch if devices have equally many examples, up
    to summation order. Otherwise that of the reducer.

    **Placement**: the state is the reducer's. `so.reducers.init_state`, `state_specs`, `own_state` and `stored_state`
    carry error memories, which differ between devices, in and out of `shard_map`.

    **Communication**: that of the reducer; by default an all-reduce of the gradients.

    Args:
      axis_name: the axis, or a tuple of axes, of the `shard_map`, `pmap` or `vmap` around `update`.
      reducer: how gradients cross the wire; by default `so.reducers.exact()`.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if `axis_name` is no name or `reducer` no `Reducer`; in `update`, if a gradient is not floating.
      ValueError: in `update`, if the axis is not bound, or the gradients are known to be summed already.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> tx = optax.chain(so.transforms.average_gradients("data"), optax.sgd(1.0))
      >>> update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
      >>> print(update(jnp.array([1.0, 3.0])))
      [-2. -2.]
    """
    who = "average_gradients"
    axis_names(who, axis_name)
    chosen = exact() if reducer is None else reducer
    check_reducer(who, chosen)

    def init(params):
        return AverageGradientsState(chosen.init(params))

    def update(updates, state, params=None, **extra_args: PyTree):
        axis_size(who, axis_name)
        mean, reducer_state = chosen.reduce(updates, state.reducer, axis_name)
        return mean, AverageGradientsState(reducer_state)

    return optax.GradientTransformationExtraArgs(init, update)
