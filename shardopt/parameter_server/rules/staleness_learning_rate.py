"""Smaller steps for later gradients."""

import jax.numpy as jnp

from shardopt.parameter_server.rules.rule import Rule


def staleness_learning_rate() -> Rule:
    """Divide the learning rate by how many versions late a gradient is: w <- w + tx.update(g) / max(1, tau).

    The division is that of the optimizer's update, so it is one of the learning rate for every optimizer, also for
    those that do not mind the size of a gradient (Adam).

    **Equivalence**: the plain rule wherever tau <= 1, so with max_staleness=0 equal to ddp.

    Returns:
      A `Rule`. It keeps no state.

    Example:
      >>> float(staleness_learning_rate().scale(4))
      0.25

    References:
      Zhang et al., "Staleness-Aware Async-SGD for Distributed Deep Learning", 2016: alpha = alpha_0 / tau.
    """
    return Rule("staleness_learning_rate", {}, scale=lambda delay: 1.0 / jnp.maximum(1, delay))
