"""Assign work that cannot be cut to devices, so that the busiest device has as little as possible."""

import heapq
from collections.abc import Sequence

_BISECTION_STEPS = 12
"""The number of bisection steps between the lower bound of the busiest load and the load found so
far.
"""


def share_out(
    costs: Sequence[float], owners: int, loads: Sequence[float] | None = None
) -> list[int]:
    """Return the owner of each piece of work, so that the busiest owner has little.

    The better of two assignments is returned. The first gives pieces, the largest first, to the
    owner with the least work; it is within 4/3 of the best, and even if pieces are equal. The
    second gives each piece to the first owner that stays below a limit; the lowest possible limit
    is found by bisection.

    Args:
      costs: the cost of each piece, in any unit.
      owners: the number of owners.
      loads: the cost of the work that each owner has already; None if they have none.

    Example:
      >>> share_out([4.0, 1.0, 3.0, 2.0], 2)
      [0, 0, 1, 1]
      >>> share_out([3.0, 3.0, 2.0, 2.0, 2.0], 2)  # the first assignment would give one owner 7
      [0, 0, 1, 1, 1]

    References:
      Graham, "Bounds on Multiprocessing Timing Anomalies", 1969; Coffman, Garey and Johnson, "An
      Application of Bin-Packing to Multiprocessor Scheduling", 1978.
    """
    if not costs:
        return []
    loads = [0.0] * owners if loads is None else list(loads)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    owner_of = _assign_to_least_loaded(costs, order, loads)
    lower_bound = max((sum(costs) + sum(loads)) / owners, max(costs), max(loads))
    best_load = busiest(costs, owner_of, loads)
    for _ in range(_BISECTION_STEPS):
        if best_load <= 1.001 * lower_bound:
            break
        # Bisection: `best_load` is reached, and below `lower_bound` nothing is possible or found.
        limit = (lower_bound + best_load) / 2
        candidate = _assign_to_first_with_room(costs, order, loads, limit * (1 + 1e-9))
        if candidate is None:
            lower_bound = limit
        else:
            owner_of = candidate
            best_load = busiest(costs, candidate, loads)
    return owner_of


def busiest(costs: Sequence[float], owner_of: Sequence[int], loads: Sequence[float]) -> float:
    """Return the load of the busiest owner: its first load, and the sum of its costs."""
    loads = list(loads)
    for cost, owner in zip(costs, owner_of, strict=True):
        loads[owner] += cost
    return max(loads)


def _assign_to_least_loaded(
    costs: Sequence[float], order: Sequence[int], loads: Sequence[float]
) -> list[int]:
    heap = [(load, owner) for owner, load in enumerate(loads)]
    heapq.heapify(heap)
    owner_of = [0] * len(costs)
    for piece in order:
        load, owner = heap[0]
        owner_of[piece] = owner
        heapq.heapreplace(heap, (load + costs[piece], owner))
    return owner_of


def _assign_to_first_with_room(
    costs: Sequence[float], order: Sequence[int], loads: Sequence[float], limit: float
) -> list[int] | None:
    loads = list(loads)
    owner_of = [0] * len(costs)
    for piece in order:
        owner = next((i for i, load in enumerate(loads) if load + costs[piece] <= limit), None)
        if owner is None:
            return None
        loads[owner] += costs[piece]
        owner_of[piece] = owner
    return owner_of
