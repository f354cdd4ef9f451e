"""1F1B: a backward as soon as there is one, so that memory does not grow with the micro-batches."""

import numpy as np

from shardopt.pipeline.arguments import check_sizes
from shardopt.pipeline.from_order import from_order
from shardopt.pipeline.from_ticks import from_ticks
from shardopt.pipeline.schedule import Schedule


def one_f_one_b(num_stages: int, num_micro_batches: int, *, lean: bool = False) -> Schedule:
    """Run a forward and a backward every tick; or, lean, the textbook's one of them at a time.

    In lockstep, with S stages, stage s runs forward m at tick m + s and backward m at tick m + 2(S - 1) - s. A
    tick in the middle holds one of each on every stage, so no stage waits for another, however long the two take.

    The textbook's order does min(M, S - s) forwards, then backward and forward in turn. Neighbours are then at
    different kinds of work on the same tick. At their own pace they lose nothing by that; in lockstep each tick
    takes as long as the longer of the two.

    **Bubble**: (S - 1) / (M + S - 1) of both tables, and of the lockstep program of the first; with S=4 and M=8
    27%, but 40% in the lockstep program of the lean one.

    **Memory**: stage s keeps min(M, 2(S - s) - 1) activations; lean, min(M, S - s). Nothing else waits in lockstep;
    lean, messages do.

    Args:
      num_stages: S.
      num_micro_batches: M.
      lean: the textbook's order, for half the activations.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer, or `lean` not a bool.
      ValueError: if a size is below 1.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.one_f_one_b(3, 4))
      one_f_one_b: 3 stages, 4 micro-batches, 1 chunk
      8 ticks, bubble 33.3%, as a lockstep program 33.3%, at most 4 activations a stage (4, 3, 1)
      <BLANKLINE>
      tick     0   1   2     3     4     5     6   7
      stage 0  F0  F1  F2    F3    B0    B1    B2  B3
      stage 1  .   F0  F1    F2B0  F3B1  B2    B3  .
      stage 2  .   .   F0B0  F1B1  F2B2  F3B3  .   .

    References:
      Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, and
      "Memory-Efficient Pipeline-Parallel DNN Training", 2021, for the order with one flush a step.
    """
    check_sizes("one_f_one_b", num_stages=num_stages, num_micro_batches=num_micro_batches)
    if not isinstance(lean, bool):
        raise TypeError(f"one_f_one_b: lean must be True or False, got {lean!r}.")
    if lean:
        orders = [_lean_order(num_stages - stage, num_micro_batches) for stage in range(num_stages)]
        return from_order(orders, name="one_f_one_b, lean")
    stage, micro_batch = np.indices((num_stages, num_micro_batches))
    forward = micro_batch + stage
    backward = micro_batch + 2 * (num_stages - 1) - stage
    return from_ticks(num_stages, forward, backward, name="one_f_one_b")


def _lean_order(ahead: int, num_micro_batches: int) -> str:
    """Keep at most `ahead` micro-batches between forward and backward."""
    order = [f"F{m}" for m in range(min(ahead, num_micro_batches))]
    for m in range(num_micro_batches):
        order.append(f"B{m}")
        if m + ahead < num_micro_batches:
            order.append(f"F{m + ahead}")
    return " ".join(order)
