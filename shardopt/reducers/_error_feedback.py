"""Two wrappers of reducers: `error_feedback` and `warm_up`.

`error_feedback` sends later what compression left out. `warm_up` sends exact means first and
compressed means later.
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
    format_error,
    value_error,
    wide_zeros,
)
from shardopt.core._axis import AxisName
from shardopt.core._device_state import ErrorFeedback
from shardopt.core._reducer import Reducer, check_reducer
from shardopt.reducers._axis import agreeing_cond
from shardopt.reducers._mean import exact
from shardopt.reducers._reducer import check_leaves, keep_if_finite


class ErrorFeedbackState(NamedTuple):
    """The state of `error_feedback`.

    Attributes:
      memory: the residual that this device has not sent, a tree like the gradients in fp32 or
        wider. It differs between devices.
      inner: the state of the wrapped reducer.
    """

    memory: ErrorFeedback
    inner: PyTree


@calling("error_feedback")
def error_feedback(reducer: Reducer) -> Reducer:
    """Add to each gradient the residual of earlier calls, and remember the residual of this call.

    With e_d the memory of device d, reduce g_d + e_d to a mean. The new memory is the residual that
    `reducer.transmit` returns. It contains all errors: the error of each device's own compression,
    and the error of the compressed mean, which the device that compressed the mean remembers.

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

    **Equivalence**: the sum is conserved: N sum_t mean_t + sum_d e_d = sum_t sum_d g_d, up to
    rounding of sums. A call whose mean is not finite returns that mean and leaves the state as it was, so skipping such a
    step loses nothing else.

    A value that the optimizer clips off the mean is not remembered. A mean can be larger than the
    gradients, because it includes residuals of earlier calls: do not clip it as tightly as exact
    means.

    **Placement**: the memory is local to each device, as large as its gradients in fp32. The file
    `shardopt.core._device_state` stores it, splits it over the axis, and carries it to another
    axis size.

    **Communication**: the communication of the wrapped reducer.

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      2019, algorithm 2; Tang et al., "DoubleSqueeze", 2019, for the errors of both phases.
    """
    check_reducer(reducer)
    name = f"error_feedback({reducer.name})"
    if reducer.name.startswith("error_feedback("):
        raise value_error(f"{reducer.name} has error feedback already.", fix="wrap a reducer once.")

    @calling(name)
    def init(params):
        check_leaves(params)
        return ErrorFeedbackState(ErrorFeedback(wide_zeros(abstract(params))), reducer.init(params))

    def transmit(grads, memory, state, axis_name):
        if memory is not None:
            raise ValueError(
                format_error(
                    name, "what it does not send is in its state, there is nothing to hand on."
                )
            )
        mean, residual, inner = reducer.transmit(grads, state.memory.value, state.inner, axis_name)
        # The memory of a step with a NaN would carry it into all later steps.
        new_state = keep_if_finite(mean, ErrorFeedbackState(ErrorFeedback(residual), inner), state)
        # Zeros: nothing is left for a wrapper outside of this one.
        return mean, wide_zeros(grads), new_state

    codec = None if reducer.codec is None else reducer.codec._replace(error_feedback=True)
    return Reducer(name, init, reducer.wire_bytes, transmit, codec)


class WarmUpState(NamedTuple):
    """The state of `warm_up`.

    Attributes:
      step: the number of earlier calls, int32.
      inner: the state of the wrapped reducer.
    """

    step: jax.Array
    inner: PyTree


@calling("warm_up")
def warm_up(reducer: Reducer, steps: int) -> Reducer:
    """Send exact means in the first `steps` calls, and use another reducer afterwards.

    Compression does the most harm when training begins. Gradients are largest then, and the moments
    of an optimizer such as Adam are furthest from their later values. Wrap the result in
    `error_feedback`, not the other way round.

    Args:
      reducer: any reducer of this package except `error_feedback`.
      steps: the number of calls that send exact means, at least 0.

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

    **Equivalence**: equal to `exact` before call number `steps` (counted from 0), and to `reducer`
    from then on.

    **Placement**: the state of `reducer`, and a counter. The state of `reducer` does not change
    during the first calls.

    **Communication**: the communication of `exact` at first, which `wire_bytes` does not count;
    later that of `reducer`. One program contains both, and each call runs one of them.

    References:
      Lin et al., "Deep Gradient Compression", 2018, section 3.3, which increases the sparsity step
      by step; Tang et al., "1-bit Adam", 2021, section 4, which begins with uncompressed Adam.
    """
    check_reducer(reducer)
    check_count("steps", steps, minimum=0)
    if reducer.name.startswith("error_feedback("):
        problem = (
            f"{reducer.name} has error feedback, which must see both what is sent at first and"
            " later."
        )
        raise value_error(problem, fix="use error_feedback(warm_up(...)), the other way round.")
    functions = _WarmUp(reducer, steps)
    return Reducer(
        f"warm_up({reducer.name}, steps={steps})",
        functions.init,
        reducer.wire_bytes,
        functions.transmit,
    )


class _WarmUp(NamedTuple):
    """The functions of `warm_up`."""

    reducer: Reducer
    steps: int

    def init(self, params: PyTree) -> WarmUpState:
        return WarmUpState(jnp.zeros((), jnp.int32), self.reducer.init(params))

    def transmit(
        self, grads: PyTree, memory: PyTree, state: WarmUpState, axis_name: AxisName
    ) -> tuple[PyTree, PyTree, WarmUpState]:
        def send_exact(grads, memory, inner):
            mean, residual, _ = exact().transmit(grads, memory, (), axis_name)
            return mean, residual, inner

        def send_compressed(grads, memory, inner):
            return self.reducer.transmit(grads, memory, inner, axis_name)

        mean, residual, inner = agreeing_cond(
            state.step < self.steps, send_exact, send_compressed, grads, memory, state.inner
        )
        return mean, residual, WarmUpState(jnp.asarray(optax.safe_increment(state.step)), inner)
