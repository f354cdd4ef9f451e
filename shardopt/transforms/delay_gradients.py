"""`delay_gradients`: what asynchronous training does to an optimizer, made deterministic."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.arguments import check_count, check_is_number, check_params, check_transformation
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.reducers import PerDevice
from shardopt.reducers.axis import varying
from shardopt.reducers.reducer import check_alike, check_leaves


class DelayRule(NamedTuple):
    """How a gradient is treated that is tau updates late, as in `so.parameter_server.rules.Rule`.

    With w the parameters now and w_pulled those that g was taken at, w <- w + scale(tau) inner(gradient(g, ...)).

    Attributes:
      gradient: `gradient(grads, *, params, pulled, delay) -> grads`, before the optimizer; None for no change.
      scale: `scale(delay) -> factor` of the update that the optimizer returns; None for 1.
      uses_pulled: whether `gradient` reads `params` and `pulled`; if not, both are None and no old ones are kept.
    """

    gradient: Callable[..., PyTree] | None = None
    scale: Callable[[int], float] | None = None
    uses_pulled: bool = False


class DelayGradientsState(NamedTuple):
    """The state of `delay_gradients`.

    Attributes:
      slot: int32, where in the rings the oldest gradient is.
      held: the last gradients, [staleness, ...] in a ring. May differ between devices.
      pulled: the parameters that they were taken at, likewise; nothing if the rule does not need them.
      inner: the state of the wrapped transformation; () without one.
    """

    slot: jax.Array
    held: PerDevice
    pulled: PerDevice
    inner: PyTree = ()


def staleness_learning_rate() -> DelayRule:
    """Return the rule that divides the learning rate by the staleness: w <- w + inner(g) / max(1, tau).

    It is the optimizer's update that is divided, so `delay_gradients` needs the optimizer as its `inner`. To divide
    the gradient would do nothing under Adam, which does not mind its size.

    References:
      Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2016, equation 6.
    """
    return DelayRule(scale=lambda delay: 1.0 / max(1, delay))


def delay_compensation(strength: float = 0.04) -> DelayRule:
    """Return the rule of DC-ASGD: g + lambda g g (w - w_pulled), a first-order correction of the gradient.

    Args:
      strength: lambda.

    Raises:
      TypeError: if `strength` is not a number.

    References:
      Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017, equation 10.
    """
    check_is_number("delay_compensation", "strength", strength)

    def gradient(grads, *, params, pulled, delay):
        def one(g, now, then):
            return g + strength * g * g * (now - then).astype(g.dtype)

        return jax.tree.map(one, grads, params, pulled)

    return DelayRule(gradient, uses_pulled=True)


def delay_gradients(
    staleness: int, rule: DelayRule | None = None, *, inner: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    """Hand on each gradient `staleness` updates late, as a server with that many updates under way would apply it.

    With tau = staleness, update_t = scale(tau) inner(gradient(g_{t - tau})), and g = 0 for t < tau. Without `inner` the
    gradients are handed on to what comes next in the chain.

    **Equivalence**: that of `inner` at staleness 0, whatever the rule. Above it, an asynchronous run whose every
    gradient is `staleness` versions old. The optimizer sees the zeros of the first steps, too.

    **Placement**: the last `staleness` gradients, in the dtypes of the parameters, and with `delay_compensation` as
    many copies of the parameters. They are each device's own, since they may have been taken before any averaging.

    **Communication**: none of its own.

    Args:
      staleness: how many updates late; it shapes the state, so under `optax.inject_hyperparams` name it in
        `static_args`.
      rule: how late gradients are treated, `staleness_learning_rate()` or `delay_compensation()`.
      inner: the optimizer that sees late gradients; a rule that scales its updates needs it.

    Returns:
      An optax transformation; `update` needs the parameters if the rule does.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `staleness` is negative, or the rule scales updates and there is no `inner`; in `update`, if the
        rule needs parameters and none are given, or the gradients are not like the parameters that `init` saw.

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
    """
    who = "delay_gradients"
    if isinstance(staleness, jax.Array):
        fix = 'under optax.inject_hyperparams, add static_args=("staleness",).'
        raise TypeError(format_error(who, "staleness must be a Python integer: it shapes the state.", fix=fix))
    check_count(who, "staleness", staleness, least=0)
    if rule is not None and not isinstance(rule, DelayRule):
        fix = "pass so.transforms.staleness_learning_rate(), so.transforms.delay_compensation(), or a DelayRule."
        raise TypeError(format_error(who, f"rule must be a DelayRule, got {rule!r}.", fix=fix))
    rule = DelayRule() if rule is None else rule
    if rule.scale is not None and inner is None:
        fix = "pass the optimizer as inner, such as delay_gradients(2, rule, inner=optax.adamw(1e-3))."
        raise ValueError(format_error(who, "the rule scales the updates of an optimizer, and there is none.", fix=fix))
    tx = None if inner is None else check_transformation(who, "inner", inner)

    def init(params):
        check_leaves(who, params)
        slot, inner_state = jnp.zeros((), jnp.int32), () if tx is None else tx.init(params)
        if staleness == 0:
            return DelayGradientsState(slot, PerDevice(()), PerDevice(()), inner_state)
        held = jax.tree.map(lambda p: jnp.zeros((staleness, *p.shape), p.dtype), params)
        pulled = jax.tree.map(jnp.zeros_like, held) if rule.uses_pulled else ()
        return DelayGradientsState(slot, PerDevice(held), PerDevice(pulled), inner_state)

    def update(updates, state, params=None, **extra_args: PyTree):
        if rule.uses_pulled:
            check_params(who, params)
        if staleness:
            updates, state = late(updates, state, params)
        if tx is None:
            return updates, state
        found, inner_state = tx.update(updates, state.inner, params, **extra_args)
        if staleness and rule.scale is not None:
            factor = rule.scale(staleness)
            found = jax.tree.map(lambda u: (u * factor).astype(u.dtype), found)
        return found, state._replace(inner=inner_state)

    def late(updates, state, params):
        shapes = jax.eval_shape(lambda held: jax.tree.map(lambda x: x[0], held), state.held.value)
        check_alike(who, "the parameters that init saw", updates, shapes)
        grads, held = _swap(state.held.value, updates, state.slot)
        pulled, then = (), None
        if rule.uses_pulled:
            then, pulled = _swap(state.pulled.value, params, state.slot)
        if rule.gradient is not None:
            now = params if rule.uses_pulled else None
            grads = rule.gradient(grads, params=now, pulled=then, delay=staleness)
        grads = jax.tree.map(_like, grads, updates)
        return grads, state._replace(slot=(state.slot + 1) % staleness, held=PerDevice(held), pulled=PerDevice(pulled))

    return optax.GradientTransformationExtraArgs(init, update)


def _like(late: jax.Array, new: jax.Array) -> jax.Array:
    """Return it in the dtype of the new gradient, and of a type that varies where that does: the first zeros do not."""
    missing = tuple(varying(new) - varying(late))
    late = late.astype(new.dtype)
    return jax.lax.pcast(late, missing, to="varying") if missing else late


def _swap(ring: PyTree, new: PyTree, slot: jax.Array) -> tuple[PyTree, PyTree]:
    """Return what a slot of a ring held, and the ring with something new there."""
    late = jax.tree.map(lambda kept: kept[slot], ring)
    return late, jax.tree.map(lambda kept, x: kept.at[slot].set(x.astype(kept.dtype)), ring, new)
