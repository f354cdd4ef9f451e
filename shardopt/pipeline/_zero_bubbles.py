"""Schedules that split the backward in two passes, B and W, and run W where a stage would be idle."""

from collections import deque

import numpy as np

from shardopt.core import calling
from shardopt.pipeline._check import check_groups, check_sizes
from shardopt.pipeline._construct import from_order, from_ticks
from shardopt.pipeline._orders import lockstep_ticks, stage_order
from shardopt.pipeline._schedule import Schedule


@calling("zero_bubble")
def zero_bubble(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Split the backward in two, and delay the half that no other stage waits for: ZB-H1.

    A neighbour waits for the gradient of the input (B); no stage waits for the gradient of the
    weights (W). Stage s runs 1F1B with its W s passes behind its B. So B reaches the first stage
    earlier, and the remaining W fill the drain. A stage runs one pass per tick. With v chunks, part
    u of the model is on stage u mod S. This is the interleaved zero bubble: micro-batches go round
    the stages in groups of S.

    Arguments, result and errors are the same as for `interleaved`: S is `num_stages`, M is
    `num_micro_batches`, v is `num_chunks`.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.zero_bubble(2, 3))
      zero_bubble: 2 stages, 3 micro-batches, 1 chunk
      10 ticks, bubble 10.0%, as a lockstep program 10.0%, at most 2 activations per stage (2, 2)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6   7   8   9
      stage 0  F0  F1  .   B0  W0  F2  B1  W1  B2  W2
      stage 1  .   F0  B0  F1  B1  W0  F2  B2  W1  W2

    **Bubble**: (S - 1) / (3 v M + S - 1) from M = S on, asymptotically a third of 1F1B's. A stage
    is idle for (S - 1)(F + B - W) of a chunk, instead of (S - 1)(F + B + W). With fewer
    micro-batches the time is 2 M + 2 S - 1 passes. The lockstep program has the same bubble only if
    F, B and W take equally long. Otherwise `zero_bubble_lockstep` is faster.

    **Memory**: each stage stores min(M, S) activations until their W, as many as the first stage of
    `one_f_one_b`; until their B it stores min(M, S - s). With chunks it stores v S activations of a
    chunk, which is as much. Messages wait, and B stores values for W. The split gains nothing if W
    runs the forward again.

    **Communication**: v times the messages of 1F1B.

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2; its interleaved form is
      PyTorch's `ScheduleInterleavedZeroBubble`.
    """
    sizes = num_stages, num_micro_batches, num_chunks
    check_groups(*sizes)
    # forwards ahead of B and weight passes behind it add up to v S on every stage
    max_chunks = num_stages * num_chunks
    orders = [
        stage_order(max_chunks - stage, *sizes, weight_lag=stage) for stage in range(num_stages)
    ]
    return from_order(orders, name="zero_bubble")


@calling("zero_bubble_2")
def zero_bubble_2(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run more forwards ahead, so that no stage is idle between its first pass and its last: ZB-H2.

    Stage s runs 2(S - s) - 1 forwards before its first B, and its W 2 s passes behind its B. One
    pass per tick.

    Arguments, result and errors are the same as for `gpipe`: S is `num_stages`, M is
    `num_micro_batches`.

    Example:
      >>> import shardopt as so
      >>> schedule = so.schedules.zero_bubble_2(2, 4)
      >>> print(schedule)
      zero_bubble_2: 2 stages, 4 micro-batches, 1 chunk
      13 ticks, bubble 7.7%, as a lockstep program 7.7%, at most 3 activations per stage (3, 3)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6   7   8   9   10  11  12
      stage 0  F0  F1  F2  B0  W0  F3  B1  W1  B2  W2  B3  W3  .
      stage 1  .   F0  B0  F1  B1  F2  B2  W0  F3  B3  W1  W2  W3
      >>> schedule.stage_times()  # 4 x (F + B + W), without a gap
      (12, 12)

    **Bubble**: let passes take F, B and W, and messages c. From M = 2 S - 1 on, a stage is idle for
    (S - 1) max(2 c, F + B + 2 c - 2 W) between its first pass and its last. It is never idle if the
    three take equally long and c = 0. The paper counts this time, since its stages begin the next
    step at once.

    A step that ends on all stages together is (S - 1) max(F + c, F + B + 2 c - 2 W) longer than its
    work. The last stage begins (S - 1)(F + c) late. So ZB-H2 pays if B takes longer than W. If they
    are equal, the step takes as long as with `zero_bubble`.

    **Memory**: each stage stores min(M, 2 S - 1) activations until their W, about twice
    `zero_bubble`. Messages wait, and B stores values for W.

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.2.
    """
    sizes = {"num_stages": num_stages, "num_micro_batches": num_micro_batches}
    check_sizes(**sizes)
    ahead = [2 * (num_stages - stage) - 1 for stage in range(num_stages)]
    orders = [
        stage_order(ahead[stage], **sizes, weight_lag=2 * stage) for stage in range(num_stages)
    ]
    return from_order(orders, name="zero_bubble_2")


@calling("zero_bubble_lockstep")
def zero_bubble_lockstep(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Time forward and backward as `interleaved` does, and put weight gradients where they make no
    tick longer.

    In ZB-H1, ZB-V and DualPipe-V, stages run different kinds of passes at one moment. In a lockstep
    program, a tick with F on one stage and B on another takes max(F, B), and the gain is lost. Here
    a tick holds the same passes on every stage: F in the warm-up, F + B or F + B + W in the middle,
    B + W or B in the drain, W at the end. A stage runs W

    - if other stages have a pass on this tick that the stage does not have: after its last F, after
      its last B; or else
    - if all stages have the same passes, so that the tick becomes longer for all of them at once.

    Arguments, result and errors are the same as for `interleaved`: S is `num_stages`, M is
    `num_micro_batches`, v is `num_chunks`.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.zero_bubble_lockstep(2, 4))
      zero_bubble_lockstep: 2 stages, 4 micro-batches, 1 chunk
      7 ticks, bubble 7.7%, as a lockstep program 7.7%, at most 3 activations per stage (3, 2)
      <BLANKLINE>
      tick     0   1     2       3       4     5   6
      stage 0  F0  F1    F2B0W0  F3B1W1  B2W2  B3  W3
      stage 1  .   F0B0  F1B1W0  F2B2W1  F3B3  W2  W3

    **Bubble**: (S - 1) / (3 v M + S - 1) from M = 2(S - 1) on, for the table and for the lockstep
    program alike, with v chunks. No schedule with as many chunks has less: the first S virtual
    stages are on S different stages, so one stage begins S - 1 passes late. With fewer
    micro-batches there are 2(S - 1) - M more idle passes, at most S - 1. With passes that take F, B
    >= W, a stage is idle for (S - 1)(F + B - W). This is the formula of ZB-H1 divided by v, but for
    the program. With S=4, M=8 and B=2F=2W the program takes 38 F with one chunk, ZB-H1 49 F and
    `eager_one_f_one_b` 44 F.

    **Memory**: no stage stores more than the first stage of `interleaved`, (v + 1) S - 1
    activations of a chunk. W lags about 2 s passes behind B on stage s, which stores as many fewer
    between F and B. B stores values for W. The split gains nothing if W runs the forward again. No
    message waits.

    **Communication**: as `interleaved`.

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (the split; ZB-H1, ZB-V); Narayanan et
      al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021
      (the chunks); Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (V-shaped
      placements). The timing is shardopt's own.
    """
    sizes = num_stages, num_micro_batches, num_chunks
    check_groups(*sizes)
    forward, backward = lockstep_ticks(*sizes)
    weight = _weight_ticks(num_stages, forward, backward)
    return from_ticks(num_stages, forward, backward, weight, name="zero_bubble_lockstep")


def _weight_ticks(num_stages: int, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the ticks of the weight passes, [V, M]."""
    stage = np.broadcast_to(np.arange(len(backward))[:, None] % num_stages, backward.shape)
    # [ticks, S]: how many passes F and B a stage has on a tick, which is how long the tick takes.
    load = np.zeros((backward.max() + 1, num_stages), int)
    for pass_ticks in (forward, backward):
        np.add.at(load, (pass_ticks, stage), 1)
    backward_at = {
        (int(backward.flat[index]), int(stage.flat[index])): index for index in range(backward.size)
    }
    queues: list[deque[int]] = [deque() for _ in range(num_stages)]
    weight = np.full(backward.size, -1)
    tick = 0
    while tick < len(load) or any(queues):
        load_of_tick = load[tick] if tick < len(load) else np.zeros(num_stages, int)
        for s, queue in enumerate(queues):
            # Before W is placed: a W may run on the tick of its own B.
            queue.extend([backward_at[tick, s]] if (tick, s) in backward_at else [])
        has_gap = load_of_tick < load_of_tick.max()
        # every stage runs B on this tick, or none has run B yet, or only W passes remain
        no_gaps = not has_gap.any()
        for s, queue in enumerate(queues):
            if queue and (has_gap[s] or no_gaps):
                weight[queue.popleft()] = tick
        tick += 1
    return weight.reshape(backward.shape)
