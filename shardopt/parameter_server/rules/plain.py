"""The rule that does nothing."""

from shardopt.parameter_server.rules.rule import Rule


def plain() -> Rule:
    """Apply a late gradient as if it were fresh: w <- w + tx.update(g).

    Returns:
      A `Rule`, which is what `rule=None` means.

    Example:
      >>> plain().name
      'plain'

    References:
      Dean et al., "Large Scale Distributed Deep Networks", 2012 (Downpour SGD).
    """
    return Rule("plain", {})
