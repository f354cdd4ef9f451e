"""ZB-H1: weight gradients fill most of the bubble of 1F1B."""

from shardopt.pipeline.arguments import check_sizes
from shardopt.pipeline.from_order import from_order
from shardopt.pipeline.schedule import Schedule


def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """Split the backward in two, and put off the half that nobody waits for: ZB-H1.

    The neighbour waits for the gradient of the input (B), but nobody for that of the weights (W). Stage s goes
    through 1F1B with its W s passes behind its B. B thus reaches the first stage earlier, and the W that are left
    over fill the drain. One pass a tick.

    **Bubble**: (S - 1) / (3 M + S - 1) from M = S on, a third of 1F1B's asymptotically: a stage is idle for
    (S - 1)(F + B - W) instead of (S - 1)(F + B + W). Below, the time is 2 M + 2 S - 1 passes. The lockstep program
    has the same bubble only if all three passes take equally long, since stages are at different ones on most
    ticks; where they do not, `zero_bubble_lockstep` is faster.

    **Memory**: each stage keeps min(M, S) activations until their W, as many as the first stage of lean 1F1B;
    until their B, min(M, S - s). Messages wait, and B leaves something to W. All this gains only if W does not
    run the forward again.

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
      >>> print(so.schedules.zero_bubble(2, 3))
      zero_bubble: 2 stages, 3 micro-batches, 1 chunk
      10 ticks, bubble 10.0%, as a lockstep program 10.0%, at most 2 activations a stage (2, 2)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6   7   8   9
      stage 0  F0  F1  .   B0  W0  F2  B1  W1  B2  W2
      stage 1  .   F0  B0  F1  B1  W0  F2  B2  W1  W2

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
    """
    check_sizes("zero_bubble", num_stages=num_stages, num_micro_batches=num_micro_batches)
    return from_order([_order(num_stages, num_micro_batches, s) for s in range(num_stages)], name="zero_bubble")


def _order(num_stages: int, num_micro_batches: int, stage: int) -> str:
    """1F1B with W `stage` passes behind B: forwards ahead of B and W behind it add up to S on every stage."""
    ahead = num_stages - stage
    order = [f"F{m}" for m in range(min(ahead, num_micro_batches))]
    for m in range(num_micro_batches + stage):
        order += [f"B{m}"] if m < num_micro_batches else []
        order += [f"W{m - stage}"] if m >= stage else []
        order += [f"F{m + ahead}"] if m + ahead < num_micro_batches else []
    return " ".join(order)
