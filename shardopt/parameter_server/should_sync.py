"""When a worker with a cache of the parameters fetches them anew."""

from shardopt.core.arguments import check_count


def should_sync(step: int, max_staleness: int) -> bool:
    """Say whether a worker that may be `max_staleness` steps behind fetches the parameters before this step.

    True at every step if max_staleness = 0, and otherwise where step mod (max_staleness + 1) = 0: parameters
    fetched at one step serve it and the max_staleness steps after it.

    Args:
      step: the worker's own step, counted from 0.
      max_staleness: for how many further steps fetched parameters may be used.

    Returns:
      Whether to fetch.

    Raises:
      TypeError: if an argument is not an integer.
      ValueError: if an argument is negative.

    Example:
      >>> [should_sync(step, 2) for step in range(7)]
      [True, False, False, True, False, False, True]
      >>> [should_sync(step, 0) for step in range(3)]
      [True, True, True]

    References:
      Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013, section 3:
      the cache of a worker is read until it is too old.
    """
    check_count("should_sync", "step", step, least=0)
    check_count("should_sync", "max_staleness", max_staleness, least=0)
    return bool(step % (max_staleness + 1) == 0)
