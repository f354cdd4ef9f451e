"""Pipeline schedules: pure functions from sizes to tables, which need no devices."""

import functools
from collections.abc import Callable
from typing import overload

import numpy as np

from shardopt.core import calling
from shardopt.pipeline._bent import dual_pipe_v, zero_bubble_v
from shardopt.pipeline._check import check_groups, check_sizes
from shardopt.pipeline._construct import from_order, from_ticks
from shardopt.pipeline._cut import balance
from shardopt.pipeline._orders import lockstep_ticks, stage_order
from shardopt.pipeline._schedule import Schedule
from shardopt.pipeline._ticks import LETTERS
from shardopt.pipeline._timing import in_order
from shardopt.pipeline._zero_bubbles import zero_bubble, zero_bubble_2, zero_bubble_lockstep

__all__ = [
    "Schedule",
    "balance",
    "dual_pipe_v",
    "eager_one_f_one_b",
    "from_order",
    "from_ticks",
    "gpipe",
    "interleaved",
    "looped_breadth_first",
    "one_f_one_b",
    "send_ahead",
    "zero_bubble",
    "zero_bubble_2",
    "zero_bubble_lockstep",
    "zero_bubble_v",
]


@calling("gpipe")
def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run every micro-batch forward, then every one backward, in the same order.

    With S stages and M micro-batches, stage s runs forward m at tick m + s. It runs backward m at
    tick (M + S - 1) + m + (S - 1 - s). Both are in step with the neighbours.

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

    **Bubble**: (S - 1) / (M + S - 1), for the table and for the lockstep program alike.

    **Memory**: each stage stores all M activations. No message waits.

    References:
      Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
      2019.
    """
    check_sizes(num_stages=num_stages, num_micro_batches=num_micro_batches)
    stage, micro_batch = np.indices((num_stages, num_micro_batches))
    forward = micro_batch + stage
    backward = forward.max() + 1 + micro_batch + (num_stages - 1 - stage)
    return from_ticks(num_stages, forward, backward, name="gpipe")


@calling("one_f_one_b")
def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run forwards until the pipeline is full, then a backward and a forward in turn: 1F1B as
    Megatron and PyTorch do.

    With S stages, stage s runs min(M, S - s) forwards, then backward and forward in turn, one pass
    per tick. Neighbours then run different kinds of passes on the same tick. At their own pace they
    lose no time by that. In lockstep a tick takes as long as the longer pass, and
    `eager_one_f_one_b` is faster.

    Arguments, result and errors are the same as for `gpipe`: S is `num_stages`, M is
    `num_micro_batches`.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.one_f_one_b(2, 3))
      one_f_one_b: 2 stages, 3 micro-batches, 1 chunk
      8 ticks, bubble 25.0%, as a lockstep program 35.7%, at most 2 activations per stage (2, 1)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6   7
      stage 0  F0  F1  .   B0  F2  B1  .   B2
      stage 1  .   F0  B0  F1  B1  F2  B2  .

    **Bubble**: (S - 1) / (M + S - 1) for the table, and more for the lockstep program. With S=4 and
    M=8: 27% and 40%.

    **Memory**: stage s stores min(M, S - s) activations, half as many as `eager_one_f_one_b`;
    messages wait.

    References:
      Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, and
      "Memory-Efficient Pipeline-Parallel DNN Training", 2021, for the order with one flush a step.
    """
    check_sizes(num_stages=num_stages, num_micro_batches=num_micro_batches)
    orders = [
        stage_order(num_stages - stage, num_stages, num_micro_batches)
        for stage in range(num_stages)
    ]
    return from_order(orders, name="one_f_one_b")


@calling("eager_one_f_one_b")
def eager_one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run a forward and a backward on every tick, so that no stage waits for another kind of work:
    1F1B in lockstep.

    With S stages, stage s runs forward m at tick m + s and backward m at tick m + 2(S - 1) - s. A
    tick in the middle has a forward and a backward on every stage, so no stage waits for another,
    however long the two passes take. Forwards run as early as they can, which needs about twice the
    activations of `one_f_one_b`.

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

    **Bubble**: (S - 1) / (M + S - 1), for the table and for the lockstep program alike.

    **Memory**: stage s stores min(M, 2(S - s) - 1) activations. No message waits.

    Arguments, result and errors are the same as for `gpipe`: S is `num_stages`, M is
    `num_micro_batches`.

    References:
      Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021; the timing is
      shardopt's own.
    """
    check_sizes(num_stages=num_stages, num_micro_batches=num_micro_batches)
    forward, backward = lockstep_ticks(num_stages, num_micro_batches, 1)
    return from_ticks(num_stages, forward, backward, name="eager_one_f_one_b")


@calling("interleaved")
def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """Cut the model into chunks x stages parts, part v on stage v mod S, and run a forward and a
    backward per tick.

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

    Micro-batches go round the stages in groups of S: a group goes through chunk 0, then through
    chunk 1, and so on. The next group follows without a gap. With v chunks, the pass of micro-batch
    m and chunk c is number k(m, c) = (v (m div S) + c) S + m mod S on its stage. Stage s runs this
    forward at tick k(m, c) + s, and the backward at tick (v S - 1) + k(m, v - 1 - c) + (S - 1 - s).
    Every message is used on the tick after it is sent.

    **Bubble**: (S - 1) / (v M + S - 1), for the table and for the lockstep program alike. Filling
    and draining take S - 1 passes of a part that is v times smaller.

    **Memory**: stage s stores at most (v + 1) S - 1 - 2 s activations of a chunk. In units of a
    whole stage, the first stage stores 1 + (S - 1) / (v S) times the S activations of
    `one_f_one_b`. No message waits.

    **Communication**: v times the messages of 1F1B.

    References:
      Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
      Megatron-LM", 2021, section 2.2.
    """
    sizes = num_stages, num_micro_batches, num_chunks
    check_groups(*sizes)
    forward, backward = lockstep_ticks(*sizes)
    return from_ticks(num_stages, forward, backward, name="interleaved")


@calling("looped_breadth_first")
def looped_breadth_first(num_stages: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """Cut the model into chunks x stages parts, and run all micro-batches through a chunk before
    the next chunk begins.

    Part u is on stage u mod S, as in `interleaved`. `interleaved` is depth-first: a group of S
    micro-batches goes through all chunks before the next group. Here the passes of a chunk follow
    each other, and all forwards precede all backwards.

    Args:
      num_stages: S.
      num_micro_batches: M, any number.
      num_chunks: v, chunks per stage; 1 is `gpipe`.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is below 1.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.looped_breadth_first(2, 3))
      looped_breadth_first: 2 stages, 3 micro-batches, 2 chunks
      14 ticks, bubble 14.3%, as a lockstep program 14.3%, at most 6 activations per stage (6, 6)
      <BLANKLINE>
      tick     0     1     2     3     4     5     6     7     8     9     10    11    12    13
      stage 0  F0.0  F1.0  F2.0  F0.1  F1.1  F2.1  .     .     B0.1  B1.1  B2.1  B0.0  B1.0  B2.0
      stage 1  .     F0.0  F1.0  F2.0  F0.1  F1.1  F2.1  B0.1  B1.1  B2.1  B0.0  B1.0  B2.0  .

    **Bubble**: (S - 1) / (v M + S - 1) from M = S on, for the table and for the lockstep program
    alike. With fewer micro-batches a stage also waits (v - 1)(S - M) passes in each direction for
    messages from the last stage.

    **Memory**: each stage stores all v M activations of a chunk. With M above S, M - S + 1 messages
    wait from stage S - 1 to stage 0.

    **Communication**: v times the messages of 1F1B.

    References:
      Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023.
    """
    sizes = {"num_stages": num_stages, "num_micro_batches": num_micro_batches}
    check_sizes(**sizes, num_chunks=num_chunks)
    v, m = np.indices((num_stages * num_chunks, num_micro_batches))
    chunk, stage = divmod(v, num_stages)
    chunk_ticks = max(num_stages, num_micro_batches)
    forward = chunk * chunk_ticks + m + stage
    backward = (
        forward.max() + 1 + (num_chunks - 1 - chunk) * chunk_ticks + m + (num_stages - 1 - stage)
    )
    return from_ticks(num_stages, forward, backward, name="looped_breadth_first")


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
    ticks = schedule.ticks
    orders = [""] * schedule.num_stages
    for kind, v, m in in_order(ticks):
        orders[ticks.stage_of[v]] += f" {LETTERS[kind]}{m}.{ticks.chunk_of[v]}"
    return from_order(
        orders, stage_of=ticks.stage_of, message_ticks=2, name=f"{schedule.name}, sent ahead"
    )


def _build_and_send_ahead(
    builder: Callable[[int, int], Schedule], num_stages: int, num_micro_batches: int
) -> Schedule:
    return send_ahead(builder(num_stages, num_micro_batches))
