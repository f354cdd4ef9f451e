"""Schedules on a V: chunk 0 goes down the stages and chunk 1 comes back up, so the first stage has
the first and last blocks.
"""

from collections import Counter
from collections.abc import Iterator

from shardopt.core import calling
from shardopt.pipeline._check import check_sizes
from shardopt.pipeline._construct import from_order
from shardopt.pipeline._schedule import Schedule


@calling("zero_bubble_v")
def zero_bubble_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """Let two chunks go down the stages and back up, so that no stage is idle with the memory of
    1F1B: ZB-V.

    Stage s holds the virtual stages s and 2 S - 1 - s. The last stage runs both chunks of a
    micro-batch in a row, so its first B comes early. The loss is on the first stage. A stage runs
    one pass per tick.

    Arguments, result and errors are the same as for `gpipe`: S is `num_stages`, M is
    `num_micro_batches`.

    Example:
      >>> import shardopt as so
      >>> schedule = so.schedules.zero_bubble_v(2, 3)
      >>> print(schedule)
      zero_bubble_v: 2 stages, 3 micro-batches, 2 chunks
      19 ticks, bubble 5.3%, as a lockstep program 5.3%, at most 4 activations per stage (4, 4)
      <BLANKLINE>
      tick     0     1     2     3     4     5     6     7     8     9     10    11    12    13    14    15    16    17    18
      stage 0  F0.0  F1.0  F2.0  F0.1  B0.1  W0.1  F1.1  B1.1  W1.1  B0.0  W0.0  F2.1  B2.1  W2.1  B1.0  W1.0  B2.0  W2.0  .
      stage 1  .     F0.0  F0.1  F1.0  F1.1  B0.1  W0.1  F2.0  B0.0  W0.0  F2.1  B1.1  W1.1  B1.0  B2.1  B2.0  W1.0  W2.1  W2.0
      >>> schedule.stage_times()  # 6 x 3, without a gap
      (18, 18)

    **Bubble**: from M = 2 S - 1 on, a stage runs 6 M passes of a chunk from its first to its last
    with no idle tick, if F, B and W take equally long. The paper counts this time. If a step ends
    on all stages together, the last stage begins S - 1 passes late: the bubble is (S - 1) / (6 M +
    S - 1). The lockstep program has this bubble only if F, B and W take equally long. Otherwise
    `zero_bubble_lockstep` with two chunks is faster, and stores half as much again.

    **Memory**: each stage stores at most 2 S activations of a chunk until their W. This equals the
    S activations of a whole stage on the first stage of `one_f_one_b`; here all stages store the
    same. Messages wait, and B stores values for W.

    **Communication**: twice the messages of 1F1B, to both neighbours in both directions. Messages
    from chunk 0 to chunk 1 stay on the last stage.

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 6; "Pipeline
      Parallelism with Controllable Memory", 2024; PyTorch's `ScheduleZBVZeroBubble`.
    """
    check_sizes(num_stages=num_stages, num_micro_batches=num_micro_batches)
    # so many fill the pipeline; micro-batches from M on are dropped below
    num_scheduled = max(num_micro_batches, 2 * num_stages - 1)
    stage_programs = []
    for s in range(num_stages):
        steady = num_scheduled - 2 * num_stages + s + 1
        fill = [(2 * (num_stages - s) - 1, "F0"), (s, "F1 F0"), (num_stages - s, "F1 B1 W1")]
        middle = [(steady, "F0 B0 W0 F1 B1 W1"), (num_stages - s - 1, "B0 W0 F1 B1 W1")]
        stage_programs.append(
            [*fill, *middle, (s, "B0 B1"), (num_stages - s, "B0 W0"), (s, "W1"), (s, "W0")]
        )
    return _from_programs("zero_bubble_v", num_micro_batches, stage_programs)


@calling("dual_pipe_v")
def dual_pipe_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run a forward and a backward of opposite chunks in turn on a V of two chunks: DualPipe-V.

    DualPipe feeds micro-batches from both ends, so it holds all parameters twice. Cut in half it is
    a V: stage s holds the virtual stages s and 2 S - 1 - s, once. In the middle, F of one chunk is
    followed by the whole backward of the other. If both run at once, the messages of one hide
    behind the computation of the other. A stage runs one pass per tick.

    Arguments, result and errors are the same as for `gpipe`: S is `num_stages`, M is
    `num_micro_batches`. The authors refuse M below 2 S; here such a schedule is the one for 2 S
    without the missing micro-batches.

    Example:
      >>> import shardopt as so
      >>> schedule = so.schedules.dual_pipe_v(4, 10)
      >>> schedule.peak_activations, schedule.num_ticks
      ((9, 9, 9, 9), 63)

    **Bubble**: from M = 2 S on, a stage is idle for (S - 1) passes of a chunk, if F, B and W take
    equally long: (S - 1) / (6 M + S - 1). DualPipe's authors state (PP / 2 - 1)(F&B + B - 3 W) for
    PP = 2 S parts. Their B is the whole backward, and F&B is a forward and a backward at once.
    Their bubble is never less than the one here, where B sends before its W has run.

    **Memory**: each stage stores at most PP + 1 = 2 S + 1 activations of a chunk until their W.
    Messages wait, and B stores values for W.

    **Communication**: as `zero_bubble_v`.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2, and
      github.com/deepseek-ai/DualPipe (the steps, and the table of bubble and memory); Sea AI Lab,
      "Cut-in-half", 2025.
    """
    check_sizes(num_stages=num_stages, num_micro_batches=num_micro_batches)
    num_scheduled = max(num_micro_batches, 2 * num_stages)
    stage_programs = []
    for s in range(num_stages):
        stages_after, (num_full, num_half) = num_stages - s - 1, divmod(s + 1, 2)
        fill = [(2 * stages_after, "F0"), (s + 1, "F0 F1"), (stages_after, "B1 W1 F1")]
        middle = [
            (num_scheduled - 2 * num_stages + s + 1, "F0 B1 W1 F1 B0 W0"),
            (stages_after, "B1 W1 F1 B0 W0"),
        ]
        # in the second half of the drain, weight passes wait for the end
        drain = [
            (num_full, "B1 W1 B0 W0"),
            (num_half, "B1 W1 B0"),
            (s + 1 - num_full - num_half, "B1 B0"),
        ]
        stage_programs.append([*fill, *middle, *drain, (stages_after, "W B0"), (s + 1, "W")])
    return _from_programs("dual_pipe_v", num_micro_batches, stage_programs)


def _from_programs(
    name: str, num_micro_batches: int, stage_programs: list[list[tuple[int, str]]]
) -> Schedule:
    """Return the schedule whose stages run their programs: pairs (repetitions, words).

    `F1` is the forward of the next micro-batch in chunk 1. `W1` is the oldest weight pass of chunk
    1 that has not run yet, and `W` the oldest one of any chunk. Micro-batches from
    `num_micro_batches` on are left out.
    """
    # stage      0     1     2
    # chunk 0    v0 -> v1 -> v2      the last stage passes v2 on to v3 without a message
    # chunk 1    v5 <- v4 <- v3      the first stage has both ends of the model
    stages = range(len(stage_programs))
    orders = [" ".join(_number_passes(num_micro_batches, program)) for program in stage_programs]
    return from_order(orders, stage_of=[*stages, *reversed(stages)], name=name)


def _number_passes(num_micro_batches: int, program: list[tuple[int, str]]) -> Iterator[str]:
    passes_so_far: Counter[str] = Counter()
    # (micro-batch, chunk) of backwards whose weight pass has not run
    pending_weights: list[tuple[int, str]] = []
    for word in (
        word for repetitions, words in program for _ in range(repetitions) for word in words.split()
    ):
        kind = word[0]
        chunk = word[1:]
        if kind == "W":
            m, chunk = pending_weights.pop(
                next(
                    i
                    for i, (_, pending_chunk) in enumerate(pending_weights)
                    if chunk in ("", pending_chunk)
                )
            )
        else:
            # Words name no micro-batch: F and B of a chunk take them in order.
            m = passes_so_far[word]
            passes_so_far[word] += 1
            pending_weights += [(m, chunk)] if kind == "B" else []
        if m < num_micro_batches:
            yield f"{kind}{m}.{chunk}"
