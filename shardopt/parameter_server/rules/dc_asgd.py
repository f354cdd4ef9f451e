"""Delay compensation: a late gradient, corrected towards where the parameters are now."""

from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.types import PyTree, wide_dtype
from shardopt.parameter_server.arguments import check_number
from shardopt.parameter_server.rules.rule import Rule


def dc_asgd(strength: float = 0.04) -> Rule:
    """Add to a late gradient what a cheap Hessian says it has missed: g' = g + lambda g*g*(w - w_pulled).

    The first-order expansion of the gradient at w around w_pulled, with the Hessian replaced by the diagonal of g g^T.

    **Equivalence**: the plain rule where w = w_pulled, so with max_staleness=0 equal to ddp.

    **Placement**: the server keeps the parameters that each working worker has pulled.

    Args:
      strength: lambda.

    Returns:
      A `Rule`.

    Raises:
      TypeError: if `strength` is not a number.
      ValueError: if it is negative or not finite.

    Example:
      >>> grads, _ = dc_asgd(0.5).gradient({"w": 2.0}, (), params={"w": 1.5}, pulled={"w": 1.0}, delay=3)
      >>> grads
      {'w': 3.0}

    References:
      Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017, equation 10.
    """
    check_number("dc_asgd", "strength", strength)

    def gradient(grads: PyTree, state: Any, *, params: PyTree, pulled: PyTree, delay: Any) -> tuple[PyTree, Any]:
        corrected = jax.tree.map(lambda g, w, old: g + strength * g * g * (w - old), grads, params, pulled)
        return corrected, state

    return Rule("dc_asgd", {"strength": float(strength)}, gradient=gradient, uses_pulled=True)


def dc_asgd_adaptive(strength: float = 2.0, decay: float = 0.95, eps: float = 1e-7) -> Rule:
    """Compensate for delay with a strength that adapts to the size of the gradients, element by element.

    m <- decay m + (1 - decay) g*g, then g' = g + strength / sqrt(m + eps) g*g*(w - w_pulled).

    **Equivalence**: the plain rule where w = w_pulled, so with max_staleness=0 equal to ddp.

    **Placement**: as `dc_asgd`, and m on the server, as large as the trained parameters, in fp32 at least.

    Args:
      strength: lambda_0.
      decay: of the moving mean square, in [0, 1).
      eps: keeps the root away from zero.

    Returns:
      A `Rule`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if one is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> w, old = {"w": jnp.array([1.5])}, {"w": jnp.array([1.0])}
      >>> rule = dc_asgd_adaptive(strength=1.0, decay=0.0)
      >>> grads, _ = rule.gradient({"w": jnp.array([2.0])}, rule.init(w), params=w, pulled=old, delay=1)
      >>> round(float(grads["w"][0]), 3)
      3.0

    References:
      Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017, section 5: DC-ASGD-a.
    """
    who = "dc_asgd_adaptive"
    check_number(who, "strength", strength)
    check_number(who, "decay", decay, below=1.0)
    check_number(who, "eps", eps, positive=True)

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(lambda w: jnp.zeros(w.shape, wide_dtype(w.dtype)), params)

    def gradient(grads: PyTree, state: Any, *, params: PyTree, pulled: PyTree, delay: Any) -> tuple[PyTree, Any]:
        square = jax.tree.map(lambda m, g: decay * m + (1 - decay) * jnp.square(g.astype(m.dtype)), state, grads)

        def correct(g, w, old, m):
            return g + (strength / jnp.sqrt(m + eps)).astype(g.dtype) * g * g * (w - old)

        return jax.tree.map(correct, grads, params, pulled, square), square

    config = {"strength": float(strength), "decay": float(decay), "eps": float(eps)}
    return Rule(who, config, init=init, gradient=gradient, uses_pulled=True)
