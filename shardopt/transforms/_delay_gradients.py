"""`delay_gradients`: a deterministic model of the delayed gradients of asynchronous training."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core._arguments import (
    check_count,
    check_is_number,
    check_params,
    check_transformation,
)
from shardopt.core._errors import calling, error_text
from shardopt.core._types import PyTree
from shardopt.reducers import PerDevice
from shardopt.reducers._axis import varying
from shardopt.reducers._reducer import check_alike, check_leaves


class DelayRule(NamedTuple):
    """How to correct a gradient that is tau updates late, as in `so.parameter_server.rules.StalenessRule`.

    w <- w + scale(tau) inner(gradient(g, ...)). Here w are the current parameters, and w_pulled the
    older parameters at which g was computed.

    Attributes:
      gradient: `gradient(grads, *, params, pulled, delay) -> grads`, run before the optimizer; None
        for no change.
      scale: `scale(delay) -> factor` of the update that the optimizer returns; None for 1.
      uses_pulled: whether `gradient` reads `params` and `pulled`. If not, both are None, and no old
        parameters are stored.
    """

    gradient: Callable[..., PyTree] | None = None
    scale: Callable[[int], float] | None = None
    uses_pulled: bool = False


class DelayGradientsState(NamedTuple):
    """The state of `delay_gradients`.

    Attributes:
      slot: int32, the index of the oldest gradient in the ring buffers.
      held: the last gradients, a ring buffer [staleness, ...]. It may differ between devices.
      pulled: the parameters at which these gradients were computed, also [staleness, ...]; () if
        the rule does not need them.
      inner: the state of the wrapped transformation; () without a wrapped transformation.
    """

    slot: jax.Array
    held: PerDevice
    pulled: PerDevice
    inner: PyTree = ()


def staleness_learning_rate() -> DelayRule:
    """Return the rule that divides the learning rate by the staleness: w <- w + inner(g) / max(1,
    tau).

    The rule divides the optimizer's update, so `delay_gradients` needs the optimizer as its
    `inner`. Dividing the gradient would have no effect under Adam, whose update does not depend on
    the size of the gradient.

    References:
      Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2016, equation 6.
    """
    return DelayRule(scale=lambda delay: 1.0 / max(1, delay))


@calling("delay_compensation")
def delay_compensation(strength: float = 0.04) -> DelayRule:
    """Return the rule of DC-ASGD: g + lambda g g (w - w_pulled), a first-order correction of the
    gradient.

    Args:
      strength: lambda.

    Raises:
      TypeError: if `strength` is not a number.

    References:
      Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017,
      equation 10.
    """
    check_is_number("strength", strength)

    def gradient(grads, *, params, pulled, delay):
        def compensate(g, current, old):
            return g + strength * g * g * (current - old).astype(g.dtype)

        return jax.tree.map(compensate, grads, params, pulled)

    return DelayRule(gradient, uses_pulled=True)


@calling("delay_gradients")
def delay_gradients(
    staleness: int,
    rule: DelayRule | None = None,
    *,
    inner: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Apply each gradient `staleness` updates late, as a server with that many concurrent updates
    would.

    With tau = staleness, update_t = scale(tau) inner(gradient(g_{t - tau})), and g = 0 for t < tau.
    Without `inner` the next transformation in the chain receives the late gradients.

    Args:
      staleness: the number of updates by which a gradient is late. It determines shapes of the
        state, so under `optax.inject_hyperparams` name it in `static_args`.
      rule: the correction of late gradients, `staleness_learning_rate()` or `delay_compensation()`.
      inner: the optimizer that receives the late gradients; required by a rule that scales its
        updates.

    Returns:
      An optax transformation; `update` needs the parameters if the rule does.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `staleness` is negative, or the rule scales updates and there is no `inner`. In
        `update`, if the rule needs parameters and gets none, or the gradients are not like the
        parameters that `init` saw.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.delay_gradients(2, so.transforms.staleness_learning_rate(), inner=optax.sgd(1.0))
      >>> state = tx.init(jnp.zeros(()))
      >>> for gradient in (4.0, 6.0, 8.0, 9.0):
      ...     update, state = tx.update(jnp.array(gradient), state)
      ...     print(update)
      -0.0
      -0.0
      -2.0
      -3.0

    **Equivalence**: at staleness 0, equal to `inner`, with any rule. At a higher staleness, equal
    to an asynchronous run whose gradients are all `staleness` versions old. The optimizer also sees
    the zeros of the first steps.

    **Placement**: the last `staleness` gradients, in the dtypes of the parameters, and with
    `delay_compensation` as many copies of the parameters. They are local to each device, since the
    gradients may not be averaged yet.

    **Communication**: none, except the communication of `inner`.
    """
    if isinstance(staleness, jax.Array):
        fix = 'under optax.inject_hyperparams, add static_args=("staleness",).'
        raise TypeError(
            error_text("staleness must be a Python integer: it shapes the state.", fix=fix)
        )
    check_count("staleness", staleness, minimum=0)
    if rule is not None and not isinstance(rule, DelayRule):
        fix = (
            "pass so.transforms.staleness_learning_rate(), so.transforms.delay_compensation(), or a"
            " DelayRule."
        )
        raise TypeError(error_text(f"rule must be a DelayRule, got {rule!r}.", fix=fix))
    rule = DelayRule() if rule is None else rule
    if rule.scale is not None and inner is None:
        fix = (
            "pass the optimizer as inner, such as delay_gradients(2, rule,"
            " inner=optax.adamw(1e-3))."
        )
        raise ValueError(
            error_text("the rule scales the updates of an optimizer, and there is none.", fix=fix)
        )
    tx = None if inner is None else check_transformation("inner", inner)

    @calling("delay_gradients")
    def init(params):
        check_leaves(params)
        slot, inner_state = jnp.zeros((), jnp.int32), () if tx is None else tx.init(params)
        if staleness == 0:
            return DelayGradientsState(slot, PerDevice(()), PerDevice(()), inner_state)
        held = jax.tree.map(lambda p: jnp.zeros((staleness, *p.shape), p.dtype), params)
        pulled = jax.tree.map(jnp.zeros_like, held) if rule.uses_pulled else ()
        return DelayGradientsState(slot, PerDevice(held), PerDevice(pulled), inner_state)

    @calling("delay_gradients")
    def update(updates, state, params=None, **extra_args: PyTree):
        if rule.uses_pulled:
            check_params(params)
        if staleness:
            updates, state = delay(updates, state, params)
        if tx is None:
            return updates, state
        inner_updates, inner_state = tx.update(updates, state.inner, params, **extra_args)
        if staleness and rule.scale is not None:
            factor = rule.scale(staleness)
            inner_updates = jax.tree.map(lambda u: (u * factor).astype(u.dtype), inner_updates)
        return inner_updates, state._replace(inner=inner_state)

    def delay(updates, state, params):
        shapes = jax.eval_shape(lambda held: jax.tree.map(lambda x: x[0], held), state.held.value)
        check_alike("the parameters that init saw", updates, shapes)
        grads, held = _swap(state.held.value, updates, state.slot)
        pulled, old_params = (), None
        if rule.uses_pulled:
            old_params, pulled = _swap(state.pulled.value, params, state.slot)
        if rule.gradient is not None:
            current_params = params if rule.uses_pulled else None
            grads = rule.gradient(grads, params=current_params, pulled=old_params, delay=staleness)
        grads = jax.tree.map(_cast_like, grads, updates)
        return grads, state._replace(
            slot=(state.slot + 1) % staleness, held=PerDevice(held), pulled=PerDevice(pulled)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _cast_like(late_grad: jax.Array, new_grad: jax.Array) -> jax.Array:
    """Cast a late gradient to the dtype and the varying axes of the new gradient.

    The zeros of the first steps do not vary along any axis.
    """
    missing_axes = tuple(varying(new_grad) - varying(late_grad))
    late_grad = late_grad.astype(new_grad.dtype)
    return jax.lax.pcast(late_grad, missing_axes, to="varying") if missing_axes else late_grad


def _swap(ring: PyTree, new_tree: PyTree, slot: jax.Array) -> tuple[PyTree, PyTree]:
    """Return the tree in a slot of a ring buffer, and the ring buffer with a new tree in that slot."""
    old_tree = jax.tree.map(lambda ring_leaf: ring_leaf[slot], ring)
    return old_tree, jax.tree.map(
        lambda ring_leaf, x: ring_leaf.at[slot].set(x.astype(ring_leaf.dtype)), ring, new_tree
    )
