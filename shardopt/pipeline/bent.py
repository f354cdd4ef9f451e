"""Schedules on a V: chunk 0 goes down the stages, chunk 1 comes back up, so that the first stage has the first and last blocks."""

from collections import Counter
from collections.abc import Iterator

from shardopt.pipeline.check import check_sizes
from shardopt.pipeline.construct import from_order
from shardopt.pipeline.schedule import Schedule


def zero_bubble_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """Let two chunks go down the stages and back up, so that no stage is idle with the memory of 1F1B: ZB-V.

    Stage s holds the virtual stages s and 2 S - 1 - s. The last stage runs both chunks of a micro-batch in a row, so
    its first B comes early, and the loss is on the first stage. One pass per tick.

    **Bubble**: from M = 2 S - 1 on a stage takes 6 M passes of a chunk from its first to its last, with no idle tick, if
    F, B and W take equally long; that is what the paper counts. A step that ends on all stages together begins S - 1
    passes later on the last: (S - 1) / (6 M + S - 1). The lockstep program has that bubble only if the three take
    equally long; where they do not, `zero_bubble_lockstep` with two chunks is faster, and keeps half as much again.

    **Memory**: each stage keeps at most 2 S activations of a chunk until their W, the S whole ones of the first stage of
    `one_f_one_b`, and every stage the same. Messages wait, and B leaves something to W.

    **Communication**: twice the messages of 1F1B, to both neighbours in both directions; those from chunk 0 to chunk 1
    stay on the last stage.

    Arguments, result and errors are those of `gpipe`: S is `num_stages`, M `num_micro_batches`.

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

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 6; "Pipeline Parallelism with
      Controllable Memory", 2024; PyTorch's `ScheduleZBVZeroBubble`.
    """
    check_sizes("zero_bubble_v", num_stages=num_stages, num_micro_batches=num_micro_batches)
    enough = max(num_micro_batches, 2 * num_stages - 1)  # what fills it; what is beyond M is left out afterwards
    lines = []
    for s in range(num_stages):
        steady = enough - 2 * num_stages + s + 1
        fill = [(2 * (num_stages - s) - 1, "F0"), (s, "F1 F0"), (num_stages - s, "F1 B1 W1")]
        middle = [(steady, "F0 B0 W0 F1 B1 W1"), (num_stages - s - 1, "B0 W0 F1 B1 W1")]
        lines.append([*fill, *middle, (s, "B0 B1"), (num_stages - s, "B0 W0"), (s, "W1"), (s, "W0")])
    return _from_lines("zero_bubble_v", num_micro_batches, lines)


def dual_pipe_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """Run a forward and a backward of opposite chunks in turn on a V of two chunks: DualPipe-V.

    DualPipe feeds micro-batches from both ends, and so holds all parameters twice. Cut in half it is a V: stage s holds
    the virtual stages s and 2 S - 1 - s, once. In the middle F of one chunk is followed by the whole backward of the
    other; where the two are run at once, what one sends hides behind the other's work. One pass per tick.

    **Bubble**: from M = 2 S on a stage is idle for (S - 1) passes of a chunk, if F, B and W take equally long:
    (S - 1) / (6 M + S - 1). DualPipe's authors state (PP / 2 - 1)(F&B + B - 3 W) for PP = 2 S parts, where B is the
    whole backward and F&B the two run at once: never less than here, where B sends before its W has run.

    **Memory**: each stage keeps at most PP + 1 = 2 S + 1 activations of a chunk until their W. Messages wait, and B
    leaves something to W.

    **Communication**: as `zero_bubble_v`.

    Arguments, result and errors are those of `gpipe`: S is `num_stages`, M `num_micro_batches`. With M below 2 S, where
    its authors refuse, it is what remains of the schedule for 2 S.

    Example:
      >>> import shardopt as so
      >>> schedule = so.schedules.dual_pipe_v(4, 10)
      >>> schedule.peak_activations, schedule.num_ticks
      ((9, 9, 9, 9), 63)

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2, and github.com/deepseek-ai/DualPipe (the steps,
      and the table of bubble and memory); Sea AI Lab, "Cut-in-half", 2025.
    """
    check_sizes("dual_pipe_v", num_stages=num_stages, num_micro_batches=num_micro_batches)
    enough = max(num_micro_batches, 2 * num_stages)
    lines = []
    for s in range(num_stages):
        rest, (whole, odd) = num_stages - s - 1, divmod(s + 1, 2)
        fill = [(2 * rest, "F0"), (s + 1, "F0 F1"), (rest, "B1 W1 F1")]
        middle = [(enough - 2 * num_stages + s + 1, "F0 B1 W1 F1 B0 W0"), (rest, "B1 W1 F1 B0 W0")]
        # the second half of what drains leaves its weight passes for the end
        drain = [(whole, "B1 W1 B0 W0"), (odd, "B1 W1 B0"), (s + 1 - whole - odd, "B1 B0")]
        lines.append([*fill, *middle, *drain, (rest, "W B0"), (s + 1, "W")])
    return _from_lines("dual_pipe_v", num_micro_batches, lines)


def _from_lines(name: str, num_micro_batches: int, lines: list[list[tuple[int, str]]]) -> Schedule:
    """Return the schedule in which each stage does what its line lists: words, and how many times.

    `F1` is the forward of the next micro-batch in chunk 1, `W1` the oldest weight pass of chunk 1 that is left to do, `W`
    the oldest of any. Micro-batches from `num_micro_batches` on are left out.
    """
    stages = range(len(lines))
    orders = [" ".join(_count_off(num_micro_batches, line)) for line in lines]
    return from_order(orders, stage_of=[*stages, *reversed(stages)], name=name)


def _count_off(num_micro_batches: int, line: list[tuple[int, str]]) -> Iterator[str]:
    done: Counter[str] = Counter()
    left: list[tuple[int, str]] = []  # backwards whose weight pass is still to come
    for word in (word for times, words in line for _ in range(times) for word in words.split()):
        kind, chunk = word[0], word[1:]
        if kind == "W":
            m, chunk = left.pop(next(i for i, (_, other) in enumerate(left) if chunk in ("", other)))
        else:
            m = done[word]
            done[word] += 1
            left += [(m, chunk)] if kind == "B" else []
        if m < num_micro_batches:
            yield f"{kind}{m}.{chunk}"
