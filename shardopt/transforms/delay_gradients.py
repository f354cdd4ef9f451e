"""`delay_gradients`: what asynchronous training does to an optimizer, made deterministic."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.arguments import check_count, check_is_number
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.reducers import PerDevice
from shardopt.reducers.axis import varying
from shardopt.reducers.reducer import check_alike, check_leaves
from shardopt.transforms.checks import check_params


class DelayRule(NamedTuple):
    """How a late gradient is corrected.

    Attributes:
      correct: `correct(grads, params, pulled, staleness) -> grads`, with the parameters now, those that the
        gradients were taken at, and how many updates lie between.
      needs_params: whether it reads parameters; if not, both come as None and no old ones are kept.
    """

    correct: Callable[[PyTree, PyTree, PyTree, int], PyTree]
    needs_params: bool


class DelayGradientsState(NamedTuple):
    """The state of `delay_gradients`.

    Attributes:
      slot: int32, where in the rings the oldest gradient is.
      held: the last gradients, [staleness, ...] in a ring. May differ between devices.
      pulled: the parameters that they were taken at, likewise; nothing if the rule does not need them.
    """

    slot: Any
    held: PerDevice
    pulled: PerDevice


def staleness_learning_rate() -> DelayRule:
    """Return the rule that divides by the staleness: g / max(1, tau).

    References:
      Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2016, equation 6.
    """

    def correct(grads, params, pulled, staleness):
        return jax.tree.map(lambda g: g / max(1, staleness), grads)

    return DelayRule(correct, needs_params=False)


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

    def correct(grads, params, pulled, staleness):
        def one(g, now, then):
            return g + strength * g * g * (now - then).astype(g.dtype)

        return jax.tree.map(one, grads, params, pulled)

    return DelayRule(correct, needs_params=True)


def delay_gradients(staleness: int, rule: DelayRule | None = None) -> optax.GradientTransformationExtraArgs:
    """Hand on each gradient `staleness` updates late, as a server with that many updates under way would apply it.

    update_t = rule(g_{t - staleness}), and zero for t < staleness.

    **Equivalence**: the identity at staleness 0, whatever the rule. Above it, an asynchronous run whose every gradient
    is `staleness` versions old. What comes later in the chain sees the zeros of the first steps, too.

    **Placement**: the last `staleness` gradients, in the dtypes of the parameters, and with `delay_compensation` as
    many copies of the parameters. They are each device's own, since they may have been taken before any averaging.

    **Communication**: none.

    Args:
      staleness: how many updates late; it shapes the state, so under `optax.inject_hyperparams` name it in
        `static_args`.
      rule: how late gradients are corrected, `staleness_learning_rate()` or `delay_compensation()`.

    Returns:
      An optax transformation; `update` needs the parameters if the rule does.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `staleness` is negative; in `update`, if the rule needs parameters and none are given, or the
        gradients are not like the parameters that `init` saw.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> tx = so.transforms.delay_gradients(2, so.transforms.staleness_learning_rate())
      >>> state = tx.init(jnp.zeros(()))
      >>> for gradient in (4.0, 6.0, 8.0, 9.0):
      ...     update, state = tx.update(jnp.array(gradient), state)
      ...     print(update)
      0.0
      0.0
      2.0
      3.0
    """
    who = "delay_gradients"
    if isinstance(staleness, jax.Array):
        fix = 'under optax.inject_hyperparams, add static_args=("staleness",).'
        raise TypeError(format_error(who, "staleness must be a Python integer: it shapes the state.", fix=fix))
    check_count(who, "staleness", staleness, least=0)
    if rule is not None and not isinstance(rule, DelayRule):
        fix = "pass so.transforms.staleness_learning_rate(), so.transforms.delay_compensation(), or a DelayRule."
        raise TypeError(format_error(who, f"rule must be a DelayRule, got {rule!r}.", fix=fix))
    keeps_params = rule is not None and rule.needs_params

    def init(params):
        check_leaves(who, params)
        slot = jnp.zeros((), jnp.int32)
        if staleness == 0:
            return DelayGradientsState(slot, PerDevice(()), PerDevice(()))
        held = jax.tree.map(lambda p: jnp.zeros((staleness, *p.shape), p.dtype), params)
        pulled = jax.tree.map(jnp.zeros_like, held) if keeps_params else ()
        return DelayGradientsState(slot, PerDevice(held), PerDevice(pulled))

    def update(updates, state, params=None, **extra_args: Any):
        if keeps_params:
            check_params(who, params)
        if staleness == 0:
            return updates, state
        shapes = jax.eval_shape(lambda held: jax.tree.map(lambda x: x[0], held), state.held.value)
        check_alike(who, "the parameters that init saw", updates, shapes)
        slot = state.slot
        late, held = _swap(state.held.value, updates, slot)
        then, pulled = _swap(state.pulled.value, params, slot) if keeps_params else (None, ())
        if rule is not None:
            late = rule.correct(late, params if keeps_params else None, then, staleness)
        late = jax.tree.map(_like, late, updates)
        return late, DelayGradientsState((slot + 1) % staleness, PerDevice(held), PerDevice(pulled))

    return optax.GradientTransformationExtraArgs(init, update)


def _like(late: Any, new: Any) -> Any:
    """Return it in the dtype of the new gradient, and of a type that varies where that does: the first zeros do not."""
    missing = tuple(varying(new) - varying(late))
    late = late.astype(new.dtype)
    return jax.lax.pcast(late, missing, to="varying") if missing else late


def _swap(ring: PyTree, new: PyTree, slot: Any) -> tuple[PyTree, PyTree]:
    """Return what a slot of a ring held, and the ring with something new there."""
    late = jax.tree.map(lambda kept: kept[slot], ring)
    return late, jax.tree.map(lambda kept, x: kept.at[slot].set(x.astype(kept.dtype)), ring, new)
