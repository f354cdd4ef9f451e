"""`error_feedback`: what was not sent is sent later; `warm_up`: exact means first, compressed ones later."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract
from shardopt.reducers.axis import agreeing_cond
from shardopt.reducers.device_state import ErrorFeedback
from shardopt.reducers.mean import exact
from shardopt.reducers.reducer import Reducer, check_leaves, check_reducer, keep_if_finite, zeros_like


class ErrorFeedbackState(NamedTuple):
    """The state of `error_feedback`.

    Attributes:
      memory: what this device has not sent, like the gradients, in fp32 at least. Differs between devices.
      inner: the state of the wrapped reducer.
    """

    memory: ErrorFeedback
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
      >>> first, second = jax.jit(jax.vmap(two_calls, axis_name="data"))(jnp.array([[3.0, 2.0]]))
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
        raise ValueError(format_error("error_feedback", what, fix="wrap a reducer once."))

    def init(params):
        check_leaves(name, params)
        return ErrorFeedbackState(ErrorFeedback(zeros_like(abstract(params))), reducer.init(params))

    def reduce(grads, state, axis_name):
        mean, left, inner = reducer.transmit(grads, state.memory.value, state.inner, axis_name)
        return mean, keep_if_finite(mean, ErrorFeedbackState(ErrorFeedback(left), inner), state)

    def transmit(grads, memory, state, axis_name):
        raise ValueError(format_error(name, "what it does not send is in its state, there is nothing to hand on."))

    codec = None if reducer.codec is None else reducer.codec._replace(feedback=True)
    return Reducer(name, init, reduce, reducer.wire_bytes, transmit, codec)


class WarmUpState(NamedTuple):
    """The state of `warm_up`.

    Attributes:
      step: how many calls there were, int32.
      inner: the state of the wrapped reducer.
    """

    step: jax.Array
    inner: PyTree


def warm_up(reducer: Reducer, steps: int) -> Reducer:
    """Send exact means for some steps, and let another reducer take over from there.

    Gradients are largest, and the moments of an optimizer such as Adam furthest from what they settle at, when
    training begins: what compression loses or delays then costs most. Put `error_feedback` outside of it.

    **Equivalence**: that of `exact` before call number `steps` (from 0), that of `reducer` from it on.

    **Placement**: that of `reducer`, whose state stands still at first (the velocity of `top_k` too), and a count.

    **Communication**: that of `exact` at first, which is not in `wire_bytes`; later that of `reducer`. One program
    holds both, and runs one of them.

    Args:
      reducer: any reducer of this package but `error_feedback`.
      steps: how many calls send exact means, at least 0.

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if `reducer` is not a `Reducer` or `steps` not an integer.
      ValueError: if `steps` is negative, or the reducer has error feedback.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.error_feedback(so.reducers.warm_up(so.reducers.top_k(density=0.5), steps=1))
      >>> def two_calls(g):
      ...     first, state = reducer.reduce(g, reducer.init(g), "data")
      ...     return first, reducer.reduce(g, state, "data")[0]
      >>> first, second = jax.jit(jax.vmap(two_calls, axis_name="data"))(jnp.array([[3.0, 2.0]]))
      >>> print(first, second)
      [[3. 2.]] [[3. 0.]]

    References:
      Lin et al., "Deep Gradient Compression", 2018, section 3.3, which raises the density step by step; Tang et al.,
      "1-bit Adam", 2021, section 4, which begins with uncompressed Adam.
    """
    check_reducer("warm_up", reducer)
    check_count("warm_up", "steps", steps, least=0)
    if reducer.name.startswith("error_feedback("):
        what = f"{reducer.name} has error feedback, which must see both what is sent at first and later."
        raise ValueError(format_error("warm_up", what, fix="use error_feedback(warm_up(...)), the other way round."))
    plain = exact()

    def init(params):
        return WarmUpState(jnp.zeros((), jnp.int32), reducer.init(params))

    def transmit(grads, memory, state, axis_name):
        def at_first(grads, memory, inner):
            mean, left, _ = plain.transmit(grads, memory, (), axis_name)
            return mean, left, inner

        def later(grads, memory, inner):
            return reducer.transmit(grads, memory, inner, axis_name)

        mean, left, inner = agreeing_cond(state.step < steps, at_first, later, grads, memory, state.inner)
        return mean, left, WarmUpState(state.step + 1, inner)

    def reduce(grads, state, axis_name):
        mean, _, state = transmit(grads, None, state, axis_name)
        return mean, state

    return Reducer(f"warm_up({reducer.name}, steps={steps})", init, reduce, reducer.wire_bytes, transmit)
