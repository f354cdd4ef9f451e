"""How many local steps a worker of a given speed does between pushes."""

import math
from collections.abc import Sequence

from shardopt.core.arguments import check_count
from shardopt.parameter_server.arguments import check_number


def dynamic_local_steps(speeds: Sequence[float], local_steps: int) -> list[int]:
    """Give slower workers fewer local steps, so that all push at about the same time.

    H_w = max(1, floor(v_w / max v * H)): the fastest does all H steps, one half as fast half of them.

    Args:
      speeds: steps per second of each worker.
      local_steps: H, what the fastest does.

    Returns:
      H_w of each worker.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if there is no speed, one is not above 0, or `local_steps` is below 1.

    Example:
      >>> dynamic_local_steps([4.0, 2.0, 1.0, 0.01], 50)
      [50, 25, 12, 1]

    References:
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024: dynamic local updates. The
      minimum of one step is ours.
    """
    who = "dynamic_local_steps"
    check_count(who, "local_steps", local_steps, least=1)
    if not len(speeds):
        raise ValueError(f"{who}: speeds must not be empty.")
    for index, speed in enumerate(speeds):
        check_number(who, f"speeds[{index}]", speed, positive=True)
    # Integers first: 1/3 of 3 in floating point must not come out as 0.999...
    return [max(1, math.floor(speed * local_steps / max(speeds))) for speed in speeds]
