"""Momentum that waits for a whole round of pushes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.arguments import check_count
from shardopt.core.types import PyTree, wide_dtype
from shardopt.parameter_server.arguments import check_number
from shardopt.parameter_server.rules.rule import Rule


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


def delayed_nesterov(every: int, momentum: float = 0.9, activation: float = 0.0) -> Rule:
    """Step along each gradient when it comes, and along the momentum only with every N-th push.

    buf <- buf + g. On the pushes between, g' = g/N + c beta m. On every N-th, m <- beta m + buf/N, then
    g' = g/N + (1 - (N - 1) c) beta m, and buf = 0. Made for `optax.sgd(eps)`, which steps by -eps g': N pushes then
    are one step of SGD with Nesterov momentum, and stale gradients do not enter the momentum one by one.

    **Placement**: m and buf on the server, each as large as the trained parameters, in fp32 at least.

    Args:
      every: N, as a rule the number of workers.
      momentum: beta, in [0, 1).
      activation: c, the part of the momentum that each of the pushes between takes, in [0, 1/N].

    Returns:
      A `Rule`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if one is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> rule, w = delayed_nesterov(every=2, momentum=0.5), {"w": jnp.array(0.0)}
      >>> state, steps = rule.init(w), []
      >>> for g in (1.0, 3.0, 1.0):
      ...     step, state = rule.gradient({"w": jnp.array(g)}, state, params=w, pulled=w, delay=0)
      ...     steps.append(float(step["w"]))
      >>> steps
      [0.5, 2.5, 0.5]

    References:
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024: delayed Nesterov update.
    """
    who = "delayed_nesterov"
    check_count(who, "every", every, least=1)
    check_number(who, "momentum", momentum, below=1.0)
    check_number(who, "activation", activation)
    if activation * every > 1:
        raise ValueError(f"{who}: activation must be at most 1/every = {1 / every:g}, got {activation}.")

    def init(params: PyTree) -> DelayedNesterovState:
        zeros = lambda: jax.tree.map(lambda w: jnp.zeros(w.shape, wide_dtype(w.dtype)), params)  # noqa: E731
        return DelayedNesterovState(zeros(), zeros(), jnp.zeros((), jnp.int32))

    def gradient(grads: PyTree, state: Any, *, params: PyTree, pulled: PyTree, delay: Any) -> tuple[PyTree, Any]:
        last = state.count == every - 1
        buffer = jax.tree.map(lambda b, g: b + g.astype(b.dtype), state.buffer, grads)
        velocity = jax.tree.map(lambda m, b: jnp.where(last, momentum * m + b / every, m), state.momentum, buffer)
        share = jnp.where(last, 1 - (every - 1) * activation, activation) * momentum
        new = jax.tree.map(
            lambda g, m: (g.astype(m.dtype) / every + share.astype(m.dtype) * m).astype(g.dtype), grads, velocity
        )
        buffer = jax.tree.map(lambda b: jnp.where(last, jnp.zeros_like(b), b), buffer)
        return new, DelayedNesterovState(velocity, buffer, (state.count + 1) % every)

    config = {"every": int(every), "momentum": float(momentum), "activation": float(activation)}
    return Rule(who, config, init=init, gradient=gradient)
