"""`send_ahead`: turn a schedule into one whose messages travel while the next tick runs, so that
stages wait less for each other.
"""

import functools
from collections.abc import Callable
from typing import overload

from shardopt.pipeline._construct import from_order
from shardopt.pipeline._schedule import Schedule
from shardopt.pipeline._ticks import LETTERS
from shardopt.pipeline._timing import in_order


@overload
def send_ahead(schedule: Schedule) -> Schedule: ...


@overload
def send_ahead(schedule: Callable[[int, int], Schedule]) -> Callable[[int, int], Schedule]: ...


def send_ahead(
    schedule: Schedule | Callable[[int, int], Schedule],
) -> Schedule | Callable[[int, int], Schedule]:
    """Send every message while the next tick runs: a stage then waits for messages that its
    neighbours made two ticks ago.

    Args:
      schedule: a `Schedule`, or a builder `(num_stages, num_micro_batches) -> Schedule`, as
        `so.hybrid` takes it.

    Returns:
      A `Schedule` with the same passes. For a builder, a builder of such schedules.

    Example:
      >>> import shardopt as so
      >>> plain = so.schedules.zero_bubble_v(4, 8)
      >>> ahead = so.schedules.send_ahead(plain)
      >>> times = {"forward": 2, "backward": 3, "weight": 2}
      >>> plain.program_time(**times), ahead.program_time(**times), plain.table_time(**times)
      (141, 126, 121)
      >>> ahead.peak_activations == plain.peak_activations
      True

    Each stage runs the same passes in the same order, one per tick, as early as it can. A message
    that is computed on tick t travels during tick t + 1. Another stage can use it from tick t + 2
    on, the same stage from t + 1 on.

    Let d(s, t) be the time of the passes of stage s on tick t, and c the time of a message. Then
    the program begins a tick at

        b(s, t + 1) = max(b(s, t) + d(s, t), max_n b(n, t) + c)

    over the neighbours n of s. Without `send_ahead` the second term is b(n, t) + d(n, t) + c: a
    stage waits on every tick for a neighbour whose pass takes longer. With it, a forward next to a
    backward takes only its own time, and messages travel while passes run.

    **Bubble**: `program_time` comes near `table_time`, even if stages run different kinds of passes
    at a time (`zero_bubble_2`, `zero_bubble_v`, `dual_pipe_v`). Schedules
    that already run in lockstep gain nothing. `one_f_one_b`, with its S activations, waits as much
    longer for messages as it saves.

    **Memory**: as many activations as before. More messages wait, and one more message per
    direction is on its way.
    """
    if not isinstance(schedule, Schedule):
        return functools.partial(_build_and_send_ahead, schedule)
    ticks, orders = schedule.ticks, [""] * schedule.num_stages
    for kind, v, m in in_order(ticks):
        orders[ticks.stage_of[v]] += f" {LETTERS[kind]}{m}.{ticks.chunk_of[v]}"
    return from_order(
        orders, stage_of=ticks.stage_of, message_ticks=2, name=f"{schedule.name}, sent ahead"
    )


def _build_and_send_ahead(
    builder: Callable[[int, int], Schedule], num_stages: int, num_micro_batches: int
) -> Schedule:
    return send_ahead(builder(num_stages, num_micro_batches))
