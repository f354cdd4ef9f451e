"""GPipe: all forwards, then all backwards."""

import numpy as np

from shardopt.pipeline.arguments import check_sizes
from shardopt.pipeline.from_ticks import from_ticks
from shardopt.pipeline.schedule import Schedule


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run every micro-batch forward, then every one backward, in the same order.

    With S stages and M micro-batches, stage s runs forward m at tick m + s and backward m at tick
    (M + S - 1) + m + (S - 1 - s), both in step with its neighbours.

    **Bubble**: (S - 1) / (M + S - 1), of the table and of the lockstep program alike.

    **Memory**: each stage keeps all M activations. Nothing else waits.

    Args:
      num_stages: S.
      num_micro_batches: M.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is below 1.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.gpipe(2, 3))
      gpipe: 2 stages, 3 micro-batches, 1 chunk
      8 ticks, bubble 25.0%, as a lockstep program 25.0%, at most 3 activations a stage (3, 3)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6   7
      stage 0  F0  F1  F2  .   .   B0  B1  B2
      stage 1  .   F0  F1  F2  B0  B1  B2  .

    References:
      Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
    """
    check_sizes("gpipe", num_stages=num_stages, num_micro_batches=num_micro_batches)
    stage, micro_batch = np.indices((num_stages, num_micro_batches))
    forward = micro_batch + stage
    backward = forward.max() + 1 + micro_batch + (num_stages - 1 - stage)
    return from_ticks(num_stages, forward, backward, name="gpipe")
