"""Who owns what: work that cannot be cut, shared out so that the busiest device has as little as may be."""

import heapq
from collections.abc import Sequence


def share_out(costs: Sequence[float], owners: int) -> list[int]:
    """Return the owner of each piece of work: the longest first, each to whoever has the least so far.

    Within 4/3 - 1/(3 owners) of the best assignment; exact where pieces are alike.

    Args:
      costs: of each piece, in any unit.
      owners: how many there are.

    Example:
      >>> share_out([4.0, 1.0, 3.0, 2.0], 2)
      [0, 0, 1, 1]

    References:
      Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
    """
    loads = [(0.0, owner) for owner in range(owners)]
    found = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, owner = heapq.heappop(loads)
        found[piece] = owner
        heapq.heappush(loads, (load + costs[piece], owner))
    return found
