"""`average_gradients`: data parallelism as an optax transformation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core import PyTree, abstract, calling, value_error
from shardopt.core._axis import AxisName, axis_names, axis_size
from shardopt.core._device_state import DeviceNumber, differs_by_device
from shardopt.core._reducer import check_reducer
from shardopt.reducers import Reducer, exact
from shardopt.reducers._reducer import check_leaves
from shardopt.transforms._local_gradients import check_not_changed
from shardopt.transforms._state_form import (
    check_form,
    nan_for_state_of_another_device,
    number_of_device,
)


class AverageGradientsState(NamedTuple):
    """The state of `average_gradients`.

    Attributes:
      reducer: the state of its reducer.
      device: the number of the device that it belongs to; None if all devices have the same.
    """

    reducer: PyTree
    device: DeviceNumber | None = None


@calling("average_gradients")
def average_gradients(
    axis_name: AxisName, reducer: Reducer | None = None
) -> optax.GradientTransformationExtraArgs:
    """Replace each device's gradients by their mean over an axis.

    g = mean_d g_d, computed by the reducer. Later transformations in the chain see the same
    gradients on all devices. Earlier ones see the gradients of one device: put a clip after it. A
    clip before it is refused where the update is traced by `jax.jit` or `jax.pmap`.

    Args:
      axis_name: the axis, or a tuple of axes, of the `shard_map`, `pmap` or `vmap` around `update`.
      reducer: the reducer that averages the gradients; by default `so.reducers.exact()`.

    Returns:
      An optax transformation. Its `update` takes `weight=`, the weight of this device: the number
      of valid rows, if its loss is a mean over valid rows. The mean is then weighted.
      A device with weight 0 does not count, not even with NaN.

    Raises:
      TypeError: if `axis_name` is not a name or `reducer` not a `Reducer`; in `update`, if a
        gradient is not floating.
      ValueError: in `update`, if the axis is not bound, or the weight is no scalar. If the types
        show that the gradients are summed already, or a trace that they were clipped or averaged.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> tx = optax.chain(so.transforms.average_gradients("data"), optax.sgd(1.0))
      >>> update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
      >>> print(update(jnp.array([1.0, 3.0])))
      [-2. -2.]

    **Equivalence**: without a reducer, equal to one device on the union batch, up to summation
    order, if all devices have equally many examples. With a reducer, see the reducer.

    **Placement**: the state is the reducer's state. Error memories differ between devices:
    `so.transforms.on_mesh` carries them in and out of `shard_map`. A device that gets the memory of
    another one, after an unreplicate and a replicate, returns NaN.

    **Communication**: the communication of the reducer; by default an all-reduce of the gradients.
    With a state that differs between devices, an all-reduce of one number.
    """
    axis_names(axis_name)
    gradient_reducer = exact() if reducer is None else reducer
    check_reducer(gradient_reducer)

    def init(params: PyTree) -> PyTree:
        state = gradient_reducer.init(params)
        device = number_of_device(axis_name) if differs_by_device(state) else None
        return AverageGradientsState(state, device)

    @calling("average_gradients")
    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        weight: jax.Array | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, PyTree]:
        num_devices = axis_size(axis_name)
        check_leaves(updates)
        check_not_changed(updates, axis_name)
        if weight is not None:
            if jnp.size(weight) != 1:
                problem = f"weight is one number of this device, got shape {jnp.shape(weight)}."
                raise value_error(problem, fix="pass a scalar, such as mask.sum().")
            own_weight = jnp.reshape(weight, ())
            factor = num_devices * own_weight / jax.lax.psum(own_weight, axis_name)
            # without valid rows a mean is NaN, and counts nothing
            updates = jax.tree.map(
                lambda g: jnp.where(own_weight == 0, 0, g * factor).astype(g.dtype), updates
            )
        check_form(state.reducer, jax.eval_shape(gradient_reducer.init, abstract(updates)))
        mean, reducer_state = gradient_reducer.reduce(updates, state.reducer, axis_name)
        if state.device is None:
            return mean, AverageGradientsState(reducer_state)
        mean = nan_for_state_of_another_device(state.device, axis_name, mean)
        return mean, AverageGradientsState(reducer_state, number_of_device(axis_name))

    return optax.GradientTransformationExtraArgs(init, update)
