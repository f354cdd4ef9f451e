"""`local_updates`: each device trains on its own gradients, and parameters are averaged every few
steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core import (
    PyTree,
    abstract,
    calling,
    check_count,
    check_params,
    check_transformation,
    leaves_with_paths,
    value_error,
    wide_dtype,
)
from shardopt.core._axis import AxisName, axis_names, axis_size
from shardopt.core._device_state import DeviceNumber
from shardopt.reducers import PerDevice, exact
from shardopt.reducers._axis import agreeing_cond, check_not_summed
from shardopt.transforms._state_form import (
    check_form,
    nan_for_state_of_another_device,
    number_of_device,
)


class LocalUpdatesState(NamedTuple):
    """The state of `local_updates`.

    Attributes:
      since_sync: int32, the number of updates since parameters were averaged.
      inner: the state of the wrapped transformation. It differs between devices.
      device: the number of the device that it belongs to.
      shared_params: the parameters after the last synchronization, the same on all devices; None
        without an outer optimizer.
      outer: the state of the outer optimizer; None without one.
    """

    since_sync: jax.Array
    inner: PerDevice
    device: DeviceNumber
    shared_params: PyTree = None
    outer: PyTree = None


@calling("local_updates")
def local_updates(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    sync_every: int,
    outer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Update each device's parameters with its own gradients, and average parameters every
    `sync_every` steps.

    u_d = inner(g_d). On steps t = sync_every, 2 sync_every, ...: u_d = mean_d(p_d + u_d) - p_d.
    With an outer optimizer (DiLoCo), theta are the parameters after the last synchronization,
    Delta = theta - mean_d(p_d + u_d), theta <- outer(theta, Delta), and u_d = theta - p_d.

    Args:
      inner: the optimizer of each device; it must not average gradients itself.
      axis_name: the axis, or a tuple of axes, of the `shard_map`, `pmap` or `vmap` around `update`.
      sync_every: H, the number of updates from one average to the next.
      outer: the outer optimizer of DiLoCo, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`;
        by default the average itself, which is Local SGD.

    Returns:
      An optax transformation; `update` needs the parameters.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `sync_every` is below 1; in `update`, if the axis is not bound, parameters are
        missing, there is a `weight`, or the types show that the gradients are means already.

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

    **Equivalence**: equal to Local SGD, and to DiLoCo with an outer optimizer. After a synchronised
    update, parameters are equal on all devices, up to the rounding of p + (mean - p), which the
    next synchronised update removes. With `sync_every` 1 and SGD it equals averaging the gradients.

    **Placement**: parameters and the state of `inner` differ between devices, so both are [N, ...]
    outside `shard_map`. `so.transforms.on_mesh` converts the state. Theta and the state of `outer`
    are the same on all devices. A device that gets the state of another one, after an unreplicate
    and a replicate, returns NaN.

    **Communication**: an all-reduce of the parameters every `sync_every` steps. It is in a branch
    that other steps do not take. Under a `jax.vmap` over the state, both branches are computed.

    References:
      Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020, equation 2; Douillard et al.,
      "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1.
    """
    tx = check_transformation("inner", inner)
    axis_names(axis_name)
    check_count("sync_every", sync_every, allow_array=True)
    outer_tx = None if outer is None else check_transformation("outer", outer)

    def init(params):
        state = LocalUpdatesState(
            jnp.zeros((), jnp.int32), PerDevice(tx.init(params)), number_of_device(axis_name)
        )
        if outer_tx is None:
            return state
        # A copy: a step that donates the parameters and the state must not get one buffer twice.
        shared_params = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        return state._replace(shared_params=shared_params, outer=outer_tx.init(params))

    @calling("local_updates")
    def update(updates, state, params=None, **extra_args: PyTree):
        axis_size(axis_name)
        if "weight" in extra_args:
            problem = "it takes no weight: the mean of parameters counts all devices alike."
            fix = "use as many valid rows on each device, or so.transforms.average_gradients."
            raise value_error(problem, fix=fix)
        leaves = leaves_with_paths(updates)
        check_not_summed(axis_name, [path for path, _ in leaves], [leaf for _, leaf in leaves])
        old_params = check_params(params)
        check_form(state, jax.eval_shape(init, abstract(params)))
        inner_updates, inner_state = tx.update(updates, state.inner.value, params, **extra_args)
        inner_updates = nan_for_state_of_another_device(
            state.device, axis_name, inner_updates, agreed=False
        )
        # In a wide dtype, p + (mean - p) equals the mean for half-precision parameters.
        inner_updates = jax.tree.map(
            lambda u, p: u.astype(wide_dtype(p.dtype)), inner_updates, old_params
        )

        def synchronise(inner_updates, shared_params, outer_state):
            # Parameters are averaged and not updates: devices have parted, and the mean brings them
            # together.
            mean, _ = exact().reduce(optax.apply_updates(old_params, inner_updates), (), axis_name)
            if outer_tx is None:
                new_params = mean
            else:
                delta = jax.tree.map(lambda shared, m: shared - m, shared_params, mean)
                outer_updates, outer_state = outer_tx.update(delta, outer_state, shared_params)
                new_params = shared_params = optax.apply_updates(shared_params, outer_updates)
            updates = jax.tree.map(
                lambda new, p, u: new.astype(u.dtype) - p.astype(u.dtype),
                new_params,
                old_params,
                inner_updates,
            )
            return updates, shared_params, outer_state

        # A branch and not a select: the collective of `synchronise` runs only on the steps that
        # need it.
        results = inner_updates, state.shared_params, state.outer
        if isinstance(sync_every, int) and sync_every == 1:
            results = synchronise(*results)
        else:
            is_last = state.since_sync + 1 >= sync_every
            results = agreeing_cond(is_last, synchronise, lambda *unchanged: unchanged, *results)
        synchronised_updates, shared_params, outer_state = results
        return synchronised_updates, LocalUpdatesState(
            (state.since_sync + 1) % sync_every,
            PerDevice(inner_state),
            number_of_device(axis_name),
            shared_params,
            outer_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)
