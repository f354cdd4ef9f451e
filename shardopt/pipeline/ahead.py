"""`send_ahead`: any schedule with messages that travel while the next tick runs, so that stages keep their own pace."""

import functools
from collections.abc import Callable
from typing import overload

from shardopt.pipeline.construct import from_order
from shardopt.pipeline.schedule import Schedule
from shardopt.pipeline.ticks import LETTERS
from shardopt.pipeline.timing import in_order


@overload
def send_ahead(schedule: Schedule) -> Schedule: ...


@overload
def send_ahead(schedule: Callable[[int, int], Schedule]) -> Callable[[int, int], Schedule]: ...


def send_ahead(
    schedule: Schedule | Callable[[int, int], Schedule],
) -> Schedule | Callable[[int, int], Schedule]:
    """Send every message while the next tick runs: a stage then waits for what its neighbours did two ticks ago.

    Each stage does what it did, in the same order, one pass per tick, as soon as it can. A message that is made on
    tick t travels during tick t + 1 and can be used from t + 2; within a stage from t + 1. With d(s, t) what stage s
    does on tick t, and messages that take c, the program begins a tick at

        b(s, t + 1) = max(b(s, t) + d(s, t), max_n b(n, t) + c)

    over its neighbours n. Without it the second term is b(n, t) + d(n, t) + c: a stage whose neighbour is at longer work
    waits, on every tick. So a forward beside a backward costs what it takes, not what the backward does, and messages
    hide behind the passes.

    **Bubble**: `program_time` comes near `table_time`, also of schedules whose stages do different things at a time
    (`zero_bubble_2`, `zero_bubble_v`, `dual_pipe_v`, those of `search`). Schedules that are in lockstep anyway gain
    nothing. `one_f_one_b` with its S activations loses in waiting what it gains.

    **Memory**: activations as before. More messages wait, and one more of each direction is under way.

    Args:
      schedule: a `Schedule`, or a builder `(num_stages, num_micro_batches) -> Schedule`, as `so.hybrid` takes it.

    Returns:
      A `Schedule` of the same passes; or a builder, of a builder.

    Example:
      >>> import shardopt as so
      >>> known = so.schedules.zero_bubble_v(4, 8)
      >>> ahead = so.schedules.send_ahead(known)
      >>> times = {"forward": 2, "backward": 3, "weight": 2}
      >>> known.program_time(**times), ahead.program_time(**times), known.table_time(**times)
      (141, 126, 121)
      >>> ahead.peak_activations == known.peak_activations
      True
    """
    if not isinstance(schedule, Schedule):
        return functools.partial(_built, schedule)
    ticks, orders = schedule.ticks, [""] * schedule.num_stages
    for kind, v, m in in_order(ticks):
        orders[ticks.stage_of[v]] += f" {LETTERS[kind]}{m}.{ticks.chunk_of[v]}"
    return from_order(orders, stage_of=ticks.stage_of, message_ticks=2, name=f"{schedule.name}, sent ahead")


def _built(builder: Callable[[int, int], Schedule], num_stages: int, num_micro_batches: int) -> Schedule:
    return send_ahead(builder(num_stages, num_micro_batches))
