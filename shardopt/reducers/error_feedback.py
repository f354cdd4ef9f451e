"""`error_feedback`: what was not sent is sent later."""

from typing import NamedTuple

from shardopt.core.errors import complaint
from shardopt.core.types import PyTree, abstract
from shardopt.reducers.device_state import ErrorMemory
from shardopt.reducers.leaves import check_leaves, zeros_like
from shardopt.reducers.reducer import Reducer, check_reducer, keep_if_finite


class ErrorFeedbackState(NamedTuple):
    """The state of `error_feedback`.

    Attributes:
      memory: what this device has not sent, like the gradients, in fp32 at least. Differs between devices.
      inner: the state of the wrapped reducer.
    """

    memory: ErrorMemory
    inner: PyTree


def error_feedback(reducer: Reducer) -> Reducer:
    """Add to each gradient what earlier calls did not send, and remember what this one does not.

    With e_d the memory of device d, reduce g_d + e_d to a mean, and keep what `reducer.transmit` says is left. All
    errors are in it: those of each device's own compression, and that of the compressed mean, which is remembered by
    the device that made it.

    **Equivalence**: mass is conserved: N sum_t mean_t + sum_d e_d = sum_t sum_d g_d, up to rounding of sums. (With
    the momentum of `top_k`, what is conserved are the corrected gradients.) A call whose mean is not finite leaves
    the state as it was, and gives that mean: whoever skips such a step loses nothing else. What an optimizer clips off
    the mean is not remembered, and means are larger than gradients where they bring what waited: do not clip them as
    tightly as exact ones.

    **Placement**: the memory is local to each device, as large as its gradients in fp32; see
    `shardopt.reducers.device_state` for how it is stored, split over the axis, and carried to another axis size.

    **Communication**: that of the wrapped reducer.

    Args:
      reducer: any reducer of this package.

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if `reducer` is not a `Reducer`.
      ValueError: if it has error feedback already.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.error_feedback(so.reducers.top_k(density=0.5))
      >>> def two_calls(g):
      ...     first, state = reducer.reduce(g, reducer.init(g), "data")
      ...     return first, reducer.reduce(g, state, "data")[0]
      >>> first, second = jax.vmap(two_calls, axis_name="data")(jnp.array([[3.0, 2.0]]))
      >>> print(first, second)
      [[3. 0.]] [[0. 4.]]

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019, algorithm 2;
      Tang et al., "DoubleSqueeze", 2019, for errors on both ways.
    """
    check_reducer("error_feedback", reducer)
    name = f"error_feedback({reducer.name})"
    if reducer.name.startswith("error_feedback("):
        what = f"{reducer.name} has error feedback already."
        raise ValueError(complaint("error_feedback", what, fix="wrap a reducer once."))

    def init(params):
        check_leaves(name, params)
        return ErrorFeedbackState(ErrorMemory(zeros_like(abstract(params))), reducer.init(params))

    def reduce(grads, state, axis_name):
        mean, left, inner = reducer.transmit(grads, state.memory.value, state.inner, axis_name)
        return mean, keep_if_finite(mean, ErrorFeedbackState(ErrorMemory(left), inner), state)

    def transmit(grads, memory, state, axis_name):
        raise ValueError(complaint(name, "what it does not send is in its state, there is nothing to hand on."))

    code = None if reducer.code is None else reducer.code._replace(feedback=True)
    return Reducer(name, init, reduce, reducer.wire_bytes, transmit, code)
