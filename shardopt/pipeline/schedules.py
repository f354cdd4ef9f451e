"""Pipeline schedules: pure functions from sizes to tables, which need no devices."""

from collections import deque

import numpy as np

from shardopt.pipeline.check import check_sizes
from shardopt.pipeline.construct import from_order, from_ticks
from shardopt.pipeline.schedule import Schedule

__all__ = [
    "Schedule",
    "eager_one_f_one_b",
    "from_order",
    "from_ticks",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zero_bubble",
    "zero_bubble_lockstep",
]


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
      8 ticks, bubble 25.0%, as a lockstep program 25.0%, at most 3 activations per stage (3, 3)
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


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run forwards until the pipeline is full, then a backward and a forward in turn: 1F1B as Megatron and PyTorch do.

    With S stages, stage s runs min(M, S - s) forwards, then backward and forward in turn, one pass per tick.
    Neighbours are then at different kinds of work on the same tick. At their own pace they lose nothing by that; in
    lockstep each tick takes as long as the longer of the two, and `eager_one_f_one_b` is faster.

    **Bubble**: (S - 1) / (M + S - 1) of the table; more of the lockstep program: with S=4 and M=8 27% and 40%.

    **Memory**: stage s keeps min(M, S - s) activations, half of what `eager_one_f_one_b` keeps; messages wait.

    Arguments, result and errors are those of `gpipe`: S is `num_stages`, M `num_micro_batches`.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.one_f_one_b(2, 3))
      one_f_one_b: 2 stages, 3 micro-batches, 1 chunk
      8 ticks, bubble 25.0%, as a lockstep program 35.7%, at most 2 activations per stage (2, 1)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6   7
      stage 0  F0  F1  .   B0  F2  B1  .   B2
      stage 1  .   F0  B0  F1  B1  F2  B2  .

    References:
      Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, and
      "Memory-Efficient Pipeline-Parallel DNN Training", 2021, for the order with one flush a step.
    """
    check_sizes("one_f_one_b", num_stages=num_stages, num_micro_batches=num_micro_batches)
    orders = [_stage_order(num_stages - stage, num_micro_batches) for stage in range(num_stages)]
    return from_order(orders, name="one_f_one_b")


def eager_one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run a forward and a backward on every tick, so that no stage waits for another kind of work: 1F1B in lockstep.

    With S stages, stage s runs forward m at tick m + s and backward m at tick m + 2(S - 1) - s. A tick in the middle
    holds one of each on every stage, so no stage waits for another, however long the two take. Forwards run as early
    as they can, which takes about twice the activations of `one_f_one_b`.

    **Bubble**: (S - 1) / (M + S - 1), of the table and of the lockstep program alike.

    **Memory**: stage s keeps min(M, 2(S - s) - 1) activations. Nothing else waits.

    Arguments, result and errors are those of `gpipe`: S is `num_stages`, M `num_micro_batches`.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.eager_one_f_one_b(3, 4))
      eager_one_f_one_b: 3 stages, 4 micro-batches, 1 chunk
      8 ticks, bubble 33.3%, as a lockstep program 33.3%, at most 4 activations per stage (4, 3, 1)
      <BLANKLINE>
      tick     0   1   2     3     4     5     6   7
      stage 0  F0  F1  F2    F3    B0    B1    B2  B3
      stage 1  .   F0  F1    F2B0  F3B1  B2    B3  .
      stage 2  .   .   F0B0  F1B1  F2B2  F3B3  .   .

    References:
      Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021; the timing is shardopt's own.
    """
    check_sizes("eager_one_f_one_b", num_stages=num_stages, num_micro_batches=num_micro_batches)
    forward, backward = _lockstep_ticks(num_stages, num_micro_batches, 1)
    return from_ticks(num_stages, forward, backward, name="eager_one_f_one_b")


def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """Cut the model into chunks x stages parts, part v on stage v mod S, and run a forward and a backward per tick.

    Micro-batches go round the stages in groups of S: a group through chunk 0, then through chunk 1, and so
    on, and the next group follows without a gap. The passes of a stage are thus in a row k(m, c) = (v (m div S) +
    c) S + m mod S, with v chunks; stage s runs forward of micro-batch m and chunk c at tick k(m, c) + s and
    backward at tick (v S - 1) + k(m, v - 1 - c) + (S - 1 - s). Every message is used on the tick after it is sent.

    **Bubble**: (S - 1) / (v M + S - 1), of the table and of the lockstep program alike: filling and draining
    take S - 1 passes of a part that is v times smaller.

    **Memory**: stage s keeps at most (v + 1) S - 1 - 2 s activations of a chunk; the busiest, in units of a whole
    stage, 1 + (S - 1) / (v S) times the S of `one_f_one_b`. Nothing else waits.

    **Communication**: v times the messages of 1F1B.

    Args:
      num_stages: S.
      num_micro_batches: M; a multiple of S, unless there is one chunk.
      num_chunks: v, chunks per stage; 1 is `eager_one_f_one_b`.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is below 1, or there are several chunks and M is not a multiple of S.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.interleaved(2, 2, 2))
      interleaved: 2 stages, 2 micro-batches, 2 chunks
      8 ticks, bubble 20.0%, as a lockstep program 20.0%, at most 4 activations per stage (4, 3)
      <BLANKLINE>
      tick     0     1     2     3         4         5     6     7
      stage 0  F0.0  F1.0  F0.1  F1.1      B0.1      B1.1  B0.0  B1.0
      stage 1  .     F0.0  F1.0  F0.1B0.1  F1.1B1.1  B0.0  B1.0  .

    References:
      Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
      section 2.2.
    """
    check_sizes("interleaved", num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    forward, backward = _lockstep_ticks(num_stages, num_micro_batches, num_chunks)
    return from_ticks(num_stages, forward, backward, name="interleaved")


def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """Split the backward in two, and put off the half that nobody waits for: ZB-H1.

    A neighbour waits for the gradient of the input (B), none for that of the weights (W). Stage s runs 1F1B with its W
    s passes behind its B, so B reaches the first stage earlier, and the W left over fill the drain. One pass per tick.

    **Bubble**: (S - 1) / (3 M + S - 1) from M = S on, a third of 1F1B's asymptotically: a stage is idle for
    (S - 1)(F + B - W) instead of (S - 1)(F + B + W). Below, the time is 2 M + 2 S - 1 passes. The lockstep program
    has the same bubble only if F, B and W take equally long; where they do not, `zero_bubble_lockstep` is faster.

    **Memory**: each stage keeps min(M, S) activations until their W, as many as the first stage of `one_f_one_b`;
    until their B, min(M, S - s). Messages wait, and B leaves something to W; nothing is gained if W runs the forward
    again.

    Arguments, result and errors are those of `gpipe`: S is `num_stages`, M `num_micro_batches`.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.zero_bubble(2, 3))
      zero_bubble: 2 stages, 3 micro-batches, 1 chunk
      10 ticks, bubble 10.0%, as a lockstep program 10.0%, at most 2 activations per stage (2, 2)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6   7   8   9
      stage 0  F0  F1  .   B0  W0  F2  B1  W1  B2  W2
      stage 1  .   F0  B0  F1  B1  W0  F2  B2  W1  W2

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
    """
    check_sizes("zero_bubble", num_stages=num_stages, num_micro_batches=num_micro_batches)
    # forwards ahead of B and weight passes behind it add up to S on every stage
    orders = [_stage_order(num_stages - stage, num_micro_batches, weight_lag=stage) for stage in range(num_stages)]
    return from_order(orders, name="zero_bubble")


def zero_bubble_lockstep(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Time forward and backward as `interleaved` does, and put weight gradients where they make no tick longer.

    In ZB-H1, ZB-V and DualPipe-V stages are at different kinds of work at one moment. In a lockstep program a tick that
    holds F on one stage and B on another takes max(F, B), and the gain is lost. Here a tick holds the same passes on
    every stage: F in the warm-up, F + B or F + B + W in the middle, B + W or B in the drain, W at the end. A stage runs W

    - where the others have a pass that it has not: after its last F, after its last B; or else
    - where all do the same, so that the tick becomes longer for all of them at once.

    **Bubble**: (S - 1) / (3 v M + S - 1) from M = 2(S - 1) on, of the table and of the lockstep program alike, with v
    chunks. No schedule with as many chunks has less: the first virtual stages of S stages are S different ones, so
    one of them comes S - 1 passes late. (With fewer micro-batches 2(S - 1) - M more passes, at most S - 1.) With
    passes that take F, B >= W, a stage is idle for (S - 1)(F + B - W): the formula of ZB-H1, divided by v, but of the
    program. With S=4, M=8 and B=2F=2W the program takes 38 F with one chunk, ZB-H1's 49 and `eager_one_f_one_b` 44.

    **Memory**: no stage keeps more than the first stage of `interleaved`, (v + 1) S - 1 activations of a chunk: W
    lags some 2 s behind B on stage s, which keeps so much less between F and B. B leaves something to W; nothing is
    gained if W runs the forward again. No message waits.

    **Communication**: as `interleaved`.

    Args:
      num_stages: S.
      num_micro_batches: M; a multiple of S, unless there is one chunk.
      num_chunks: v, chunks per stage.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is below 1, or there are several chunks and M is not a multiple of S.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.zero_bubble_lockstep(2, 4))
      zero_bubble_lockstep: 2 stages, 4 micro-batches, 1 chunk
      7 ticks, bubble 7.7%, as a lockstep program 7.7%, at most 3 activations per stage (3, 2)
      <BLANKLINE>
      tick     0   1     2       3       4     5   6
      stage 0  F0  F1    F2B0W0  F3B1W1  B2W2  B3  W3
      stage 1  .   F0B0  F1B1W0  F2B2W1  F3B3  W2  W3

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (the split; ZB-H1, ZB-V); Narayanan et al., "Efficient
      Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021 (the chunks); Qi et al.,
      "Pipeline Parallelism with Controllable Memory", 2024 (V-shaped placements). The timing is shardopt's own.
    """
    sizes = {"num_stages": num_stages, "num_micro_batches": num_micro_batches, "num_chunks": num_chunks}
    check_sizes("zero_bubble_lockstep", **sizes)
    forward, backward = _lockstep_ticks(**sizes)
    weight = _fill(num_stages, forward, backward)
    return from_ticks(num_stages, forward, backward, weight, name="zero_bubble_lockstep")


def _lockstep_ticks(num_stages: int, num_micro_batches: int, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ticks of forward and backward, [V, M] each, of `interleaved`."""
    v, m = np.indices((num_stages * num_chunks, num_micro_batches))
    chunk, stage = divmod(v, num_stages)

    def place(chunk: np.ndarray) -> np.ndarray:
        return (m // num_stages * num_chunks + chunk) * num_stages + m % num_stages

    forward = place(chunk) + stage
    backward = num_stages * num_chunks - 1 + place(num_chunks - 1 - chunk) + (num_stages - 1 - stage)
    return forward, backward


def _stage_order(ahead: int, num_micro_batches: int, *, weight_lag: int | None = None) -> str:
    """Return what a stage does in turn that keeps at most `ahead` micro-batches between forward and backward.

    With `weight_lag` the weight passes are split off, so many passes behind the backward ones.
    """
    order = [f"F{m}" for m in range(min(ahead, num_micro_batches))]
    for m in range(num_micro_batches + (weight_lag or 0)):
        order += [f"B{m}"] if m < num_micro_batches else []
        order += [f"W{m - weight_lag}"] if weight_lag is not None and m >= weight_lag else []
        order += [f"F{m + ahead}"] if m + ahead < num_micro_batches else []
    return " ".join(order)


def _fill(num_stages: int, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the ticks of the weight passes, [V, M]."""
    stage = np.broadcast_to(np.arange(len(backward))[:, None] % num_stages, backward.shape)
    load = np.zeros((backward.max() + 1, num_stages), int)
    for when in (forward, backward):
        np.add.at(load, (when, stage), 1)
    begins = {(int(backward.flat[at]), int(stage.flat[at])): at for at in range(backward.size)}
    waiting: list[deque[int]] = [deque() for _ in range(num_stages)]
    weight = np.full(backward.size, -1)
    tick = 0
    while tick < len(load) or any(waiting):
        here = load[tick] if tick < len(load) else np.zeros(num_stages, int)
        for s, line in enumerate(waiting):
            line.extend([begins[tick, s]] if (tick, s) in begins else [])
        idle = here < here.max()
        together = not idle.any()  # each has then run a B on this tick, or none ever did, or all is done but W
        for s, line in enumerate(waiting):
            if line and (idle[s] or together):
                weight[line.popleft()] = tick
        tick += 1
    return weight.reshape(backward.shape)
