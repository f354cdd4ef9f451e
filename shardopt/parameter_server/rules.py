"""Rules for late gradients, each from a paper: they change the gradient, or the optimizer's update,
by its delay.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from shardopt.core import PyTree, calling, check_count, check_number, value_error, wide_zeros

__all__ = [
    "StalenessRule",
    "dc_asgd",
    "delayed_nesterov",
    "plain",
    "staleness_learning_rate",
]


class GradientFn(Protocol):
    """The function that changes a late gradient; see `StalenessRule`."""

    def __call__(
        self, grads: PyTree, state: PyTree, *, params: PyTree, pulled: PyTree, delay: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Return the gradient that the optimizer gets, and the new state of the rule."""
        ...


class StalenessRule(NamedTuple):
    """A treatment of late gradients by the server: pure functions, traced by jit.

    You can make your own.

    Let g be the pushed gradient, w the server's parameters, w_pulled the parameters from which g
    was computed, and tau the number of versions since then (`delay`). The server does

        g', state = gradient(g, state, params=w, pulled=w_pulled, delay=tau)
        w <- w + scale(tau) * tx.update(g')

    Attributes:
      name: the name of the rule in the log.
      config: the settings of the rule, which the log records as JSON.
      init: `init(params) -> state`.
      gradient: changes the gradient before `tx`, as above.
      scale: `scale(delay) -> factor` of the update that `tx` returns; None for 1.
      uses_pulled: whether `gradient` reads `pulled`. If not, the server keeps no old parameters.
    """

    name: str
    config: Mapping[str, Any]
    init: Callable[[PyTree], PyTree] = lambda params: ()
    gradient: GradientFn = lambda grads, state, **_: (grads, state)
    scale: Callable[[jax.Array], jax.Array] | None = None
    uses_pulled: bool = False


def plain() -> StalenessRule:
    """Apply a late gradient as if it were fresh: w <- w + tx.update(g).

    Returns:
      A `StalenessRule`, which is what `rule=None` means.

    Example:
      >>> plain().name
      'plain'

    References:
      Dean et al., "Large Scale Distributed Deep Networks", 2012 (Downpour SGD).
    """
    return StalenessRule("plain", {})


def staleness_learning_rate() -> StalenessRule:
    """Divide the learning rate by how many versions late a gradient is: w <- w + tx.update(g) /
    max(1, tau).

    The rule divides the optimizer's update. So it divides the learning rate of every optimizer,
    also of Adam, which does not depend on the size of a gradient.

    Returns:
      A `StalenessRule`. It keeps no state.

    Example:
      >>> float(staleness_learning_rate().scale(4))
      0.25

    **Equivalence**: the plain rule wherever tau <= 1, so with max_staleness=0 equal to ddp.

    References:
      Zhang et al., "Staleness-Aware Async-SGD for Distributed Deep Learning", 2016: alpha = alpha_0
      / tau.
    """
    return StalenessRule(
        "staleness_learning_rate", {}, scale=lambda delay: 1.0 / jnp.maximum(1, delay)
    )


@calling("dc_asgd")
def dc_asgd(strength: float = 0.04) -> StalenessRule:
    """Correct a late gradient to first order, with a cheap Hessian: g' = g + lambda g*g*(w -
    w_pulled).

    This is the Taylor expansion of the gradient at w around w_pulled, with the diagonal of g g^T in
    place of the Hessian.

    Args:
      strength: lambda.

    Returns:
      A `StalenessRule`.

    Raises:
      TypeError: if `strength` is not a number.
      ValueError: if it is negative or not finite.

    Example:
      >>> grads, _ = dc_asgd(0.5).gradient({"w": 2.0}, (), params={"w": 1.5}, pulled={"w": 1.0}, delay=3)
      >>> grads
      {'w': 3.0}

    **Equivalence**: the plain rule where w = w_pulled, so with max_staleness=0 equal to ddp.

    **Placement**: the server keeps the parameters that each worker has pulled, while its step is in
    flight.

    References:
      Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017,
      equation 10.
    """
    check_number("strength", strength)

    def gradient(grads, state, *, params, pulled, delay):
        corrected = jax.tree.map(
            lambda g, w, old: g + strength * g * g * (w - old), grads, params, pulled
        )
        return corrected, state

    return StalenessRule(
        "dc_asgd", {"strength": float(strength)}, gradient=gradient, uses_pulled=True
    )


class DelayedNesterovState(NamedTuple):
    """The state of `delayed_nesterov`.

    Attributes:
      momentum: m, as large as the trained parameters.
      buffer: the sum of the gradients since the last `every`-th push.
      count: pushes since then.
    """

    momentum: PyTree
    buffer: PyTree
    count: Any


@calling("delayed_nesterov")
def delayed_nesterov(every: int, momentum: float = 0.9, activation: float = 0.0) -> StalenessRule:
    """Apply each gradient at once, and the momentum only with every N-th push.

    Each push does buf <- buf + g. On every N-th push m <- beta m + buf/N, then g' = g/N + (1 - (N -
    1) c) beta m, and buf = 0. On the other pushes g' = g/N + c beta m.

    The rule is meant for `optax.sgd(eps)`, which steps by -eps g'. N pushes are then one step of
    SGD with Nesterov momentum, and stale gradients do not enter the momentum one by one.

    Args:
      every: N, usually the number of workers.
      momentum: beta, in [0, 1).
      activation: c, the share of the momentum in each of the other pushes, in [0, 1/N].

    Returns:
      A `StalenessRule`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if an argument is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> rule, w = delayed_nesterov(every=2, momentum=0.5), {"w": jnp.array(0.0)}
      >>> state, steps = rule.init(w), []
      >>> for g in (1.0, 3.0, 1.0):
      ...     step, state = rule.gradient({"w": jnp.array(g)}, state, params=w, pulled=w, delay=0)
      ...     steps.append(float(step["w"]))
      >>> steps
      [0.5, 2.5, 0.5]

    **Placement**: m and buf on the server, each as large as the trained parameters, in fp32 at
    least.

    References:
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024: delayed Nesterov
      update.
    """
    check_count("every", every, minimum=1)
    check_number("momentum", momentum, below=1.0)
    check_number("activation", activation)
    if activation * every > 1:
        raise value_error(f"activation must be at most 1/every = {1 / every:g}, got {activation}.")

    def init(params: PyTree) -> DelayedNesterovState:
        return DelayedNesterovState(
            wide_zeros(params), wide_zeros(params), jnp.zeros((), jnp.int32)
        )

    def gradient(grads, state, *, params, pulled, delay):
        is_nth = state.count == every - 1
        buffer = jax.tree.map(lambda b, g: b + g.astype(b.dtype), state.buffer, grads)
        velocity = jax.tree.map(
            lambda m, b: jnp.where(is_nth, momentum * m + b / every, m), state.momentum, buffer
        )
        # The shares of N pushes add up to 1: N - 1 times c, and the rest.
        share = jnp.where(is_nth, 1 - (every - 1) * activation, activation) * momentum
        new_grads = jax.tree.map(
            lambda g, m: (g.astype(m.dtype) / every + share.astype(m.dtype) * m).astype(g.dtype),
            grads,
            velocity,
        )
        buffer = jax.tree.map(lambda b: jnp.where(is_nth, jnp.zeros_like(b), b), buffer)
        return new_grads, DelayedNesterovState(velocity, buffer, (state.count + 1) % every)

    config = {"every": int(every), "momentum": float(momentum), "activation": float(activation)}
    return StalenessRule("delayed_nesterov", config, init=init, gradient=gradient)
