"""`local_updates`: each device by itself, parameters averaged now and then."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.arguments import check_count, check_params, check_transformation
from shardopt.core.types import PyTree, wide_dtype
from shardopt.reducers import PerDevice, exact
from shardopt.reducers.axis import AxisName, agreeing_cond, axis_names, axis_size


class LocalUpdatesState(NamedTuple):
    """The state of `local_updates`.

    Attributes:
      since_sync: int32, updates since parameters were averaged.
      inner: the state of the wrapped transformation. Differs between devices.
    """

    since_sync: jax.Array
    inner: PerDevice


def local_updates(
    inner: optax.GradientTransformation, axis_name: AxisName, sync_every: int
) -> optax.GradientTransformationExtraArgs:
    """Update each device's parameters with its own gradients, and average parameters every `sync_every` steps.

    u_d = inner(g_d); on step t = sync_every, 2 sync_every, ...: u_d = mean_d(p_d + u_d) - p_d.

    **Equivalence**: Local SGD. Parameters are equal on all devices after a synchronised update is applied, up to
    rounding of p + (mean - p), which the next one evens out. With `sync_every` 1 and SGD: average the gradients.

    **Placement**: parameters and the state of `inner` differ between devices, so both are [N, ...] outside of the
    axis; `so.reducers.init_state` and its neighbours do that for the state.

    **Communication**: an all-reduce of the parameters every `sync_every` steps, in a branch that other steps do not
    take; but where `jax.vmap` maps over the state, both branches are computed.

    Args:
      inner: the optimizer of each device; it must not average gradients itself.
      axis_name: the axis, or a tuple of axes, of the `shard_map`, `pmap` or `vmap` around `update`.
      sync_every: H, updates between averages.

    Returns:
      An optax transformation; `update` needs the parameters.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `sync_every` is below 1; in `update`, if the axis is not bound or parameters are not given.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.local_updates(optax.sgd(1.0), "data", sync_every=2)
      >>> def two_steps(p, g):
      ...     update, state = tx.update(g, tx.init(p), p)
      ...     halfway = p + update
      ...     return halfway, halfway + tx.update(g, state, halfway)[0]
      >>> halfway, end = jax.vmap(two_steps, axis_name="data")(jnp.zeros(2), jnp.array([1.0, 3.0]))
      >>> print(halfway, end)
      [-1. -3.] [-4. -4.]

    References:
      Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020, equation 2.
    """
    who = "local_updates"
    tx = check_transformation(who, "inner", inner)
    axis_names(who, axis_name)
    check_count(who, "sync_every", sync_every, allow_array=True)

    def init(params):
        return LocalUpdatesState(jnp.zeros((), jnp.int32), PerDevice(tx.init(params)))

    def update(updates, state, params=None, **extra_args: PyTree):
        axis_size(who, axis_name)
        known = check_params(who, params)
        found, inner_state = tx.update(updates, state.inner.value, params, **extra_args)
        # in a wide dtype, in which p + (mean - p) is the mean for half-precision parameters
        found = jax.tree.map(lambda u, p: u.astype(wide_dtype(p.dtype)), found, known)

        def synchronise(found):
            mean, _ = exact().reduce(optax.apply_updates(known, found), (), axis_name)
            return jax.tree.map(lambda m, p, u: m.astype(u.dtype) - p.astype(u.dtype), mean, known, found)

        if isinstance(sync_every, int) and sync_every == 1:
            found = synchronise(found)
        else:
            is_last = state.since_sync + 1 >= sync_every
            found = agreeing_cond(is_last, synchronise, lambda found: found, found)
        return found, LocalUpdatesState((state.since_sync + 1) % sync_every, PerDevice(inner_state))

    return optax.GradientTransformationExtraArgs(init, update)
