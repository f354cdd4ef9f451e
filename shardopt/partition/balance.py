"""Who owns what: work that cannot be cut, shared out so that the busiest device has as little as may be."""

import heapq
from collections.abc import Sequence

_TRIES = 12
"""Halvings of the room between what the busiest owner must have and what it has."""


def share_out(costs: Sequence[float], owners: int) -> list[int]:
    """Return the owner of each piece of work, so that the busiest has little.

    The better of two ways: the longest first, each to whoever has the least so far, which is within 4/3 of the best and even
    where pieces are alike; and, if that is less, each to the first who has room below a limit, the lowest found by halving.

    Args:
      costs: of each piece, in any unit.
      owners: how many there are.

    Example:
      >>> share_out([4.0, 1.0, 3.0, 2.0], 2)
      [0, 0, 1, 1]
      >>> share_out([3.0, 3.0, 2.0, 2.0, 2.0], 2)  # the longest first would give one 7
      [0, 0, 1, 1, 1]

    References:
      Graham, "Bounds on Multiprocessing Timing Anomalies", 1969; Coffman, Garey and Johnson, "An Application of Bin-Packing to
      Multiprocessor Scheduling", 1978.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    found = _to_the_least(costs, order, owners)
    if not costs:
        return found
    least, most = max(sum(costs) / owners, max(costs)), busiest(costs, found, owners)
    for _ in range(_TRIES):
        if most <= 1.001 * least:
            break
        limit = (least + most) / 2
        fit = _to_the_first(costs, order, owners, limit * (1 + 1e-9))
        if fit is None:
            least = limit
        else:
            found, most = fit, busiest(costs, fit, owners)
    return found


def busiest(costs: Sequence[float], owner_of: Sequence[int], owners: int) -> float:
    """Return what the owner with the most has."""
    loads = [0.0] * owners
    for cost, owner in zip(costs, owner_of, strict=True):
        loads[owner] += cost
    return max(loads)


def _to_the_least(costs: Sequence[float], order: Sequence[int], owners: int) -> list[int]:
    loads = [(0.0, owner) for owner in range(owners)]
    found = [0] * len(costs)
    for piece in order:
        load, owner = heapq.heappop(loads)
        found[piece] = owner
        heapq.heappush(loads, (load + costs[piece], owner))
    return found


def _to_the_first(costs: Sequence[float], order: Sequence[int], owners: int, limit: float) -> list[int] | None:
    loads = [0.0] * owners
    found = [0] * len(costs)
    for piece in order:
        owner = next((i for i, load in enumerate(loads) if load + costs[piece] <= limit), None)
        if owner is None:
            return None
        loads[owner] += costs[piece]
        found[piece] = owner
    return found
