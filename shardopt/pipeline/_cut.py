"""How many blocks each virtual stage runs: equally many, balanced against embedding and head, or as
the user says.
"""

import itertools
from collections.abc import Sequence

from shardopt.core import calling, check_number, is_integer, plural, type_error, value_error
from shardopt.partition._counts import Counts
from shardopt.pipeline._check import check_sizes
from shardopt.pipeline._schedule import Schedule


@calling("balance")
def balance(
    num_blocks: int, num_parts: int, *, embedding: float = 0.0, head: float = 0.0
) -> Counts:
    """Cut blocks into parts so that the busiest part has as little work as possible.

    Args:
      num_blocks: L.
      num_parts: V, the number of virtual stages: stages times chunks.
      embedding: e, the other work of the first part, in units of a block.
      head: h, the other work of the last part, loss included, in units of a block.

    Returns:
      [V] integers that add up to L, for `so.hybrid(blocks_per_stage=...)`. A part is 0 if an end of
      the model is work enough.

    Raises:
      TypeError: if a size is not an integer, or an end is not a number.
      ValueError: if a size is below 1, or an end is negative.

    Example:
      >>> import shardopt as so
      >>> so.schedules.balance(7, 2), so.schedules.balance(32, 4), so.schedules.balance(32, 4, head=2.4)
      ((3, 4), (8, 8, 8, 8), (8, 9, 9, 6))

    The result minimises max_p (n_p + e [p = 0] + h [p = last]), since a pipeline is as fast as its
    busiest stage. If two parts have equal work, the later one gets the block, since it stores fewer
    activations.
    """
    check_sizes(num_blocks=num_blocks, num_parts=num_parts)
    for name, value in {"embedding": embedding, "head": head}.items():
        check_number(name, value)
    load = [0.0] * num_parts
    load[0] += embedding
    load[-1] += head
    counts = [0] * num_parts
    for _ in range(num_blocks):
        # All blocks are alike. So each turn's least loaded part leads to the smallest maximum.
        part = min(range(num_parts), key=lambda index: (load[index], -index))
        load[part] += 1
        counts[part] += 1
    return tuple(counts)


def cut_blocks(schedule: Schedule, num_blocks: int, counts: Sequence[int] | None) -> Counts:
    """Return [V], how many blocks each virtual stage runs: `counts`, or by default as equal as
    possible.

    Raises:
      ValueError: if there are fewer blocks than virtual stages, or `counts` does not fit the
        schedule or `num_blocks`.
    """
    num_virtual = schedule.num_stages * schedule.num_chunks
    parts_text = (
        f"{plural(schedule.num_stages, 'stage')} x {plural(schedule.num_chunks, 'chunk')} ="
        f" {num_virtual}"
    )
    if counts is None and num_blocks < num_virtual:
        problem = f"the model has {plural(num_blocks, 'block')}, too few for {parts_text}."
        fix = (
            f"use {num_virtual} blocks or more, another pipeline size or number of chunks, or"
            " blocks_per_stage with zeros."
        )
        raise value_error(problem, fix=fix)
    if counts is None:
        return balance(num_blocks, num_virtual)
    if len(counts) != num_virtual or sum(counts) != num_blocks:
        problem = (
            f"blocks_per_stage has {plural(len(counts), 'part')} with"
            f" {plural(sum(counts), 'block')} in all; "
        )
        problem += f"there are {parts_text} parts, and {plural(num_blocks, 'block')}."
        fix = f"so.schedules.balance({num_blocks}, {num_virtual}) is such a cut; or leave it out."
        raise value_error(problem, fix=fix)
    return tuple(counts)


def check_counts(counts: Sequence[int] | None) -> Counts | None:
    """Return a user's `blocks_per_stage` as a tuple of Python integers, or None.

    Raises:
      TypeError: if it is not a sequence of integers.
      ValueError: if an integer is negative.
    """
    if counts is None:
        return None
    if (
        not isinstance(counts, Sequence)
        or isinstance(counts, str)
        or not all(map(is_integer, counts))
    ):
        problem = (
            "blocks_per_stage must be integers, one for each virtual stage, or None, got"
            f" {counts!r:.80}."
        )
        raise type_error(problem, fix="use so.schedules.balance(num_blocks, stages * chunks).")
    if min(counts, default=0) < 0:
        raise value_error(f"blocks_per_stage must not be negative, got {min(counts)}.")
    return tuple(map(int, counts))


def first_blocks(counts: Counts) -> Counts:
    """Return [V], the model's number of the first block of each virtual stage."""
    return tuple(itertools.accumulate(counts, initial=0))[:-1]


def stage_rows(schedule: Schedule, counts: Counts) -> tuple[list[list[int]], list[int]]:
    """Return which blocks each stage stacks, and the place of each block in these stacks.

    Returns:
      rows [S, chunks * k]: the model's number of each block in a stage's stack. k is the largest
      count; a chunk with
        fewer blocks is padded with 0.
      places [L]: the index of each block of the model when the stages' stacks are concatenated.
    """
    # 2 stages of 2 chunks, counts (2, 1, 1, 1), k = 2; a dot is padding
    #
    #            chunk 0   chunk 1
    #   stage 0   0  1  |  3  .
    #   stage 1   2  .  |  4  .
    k = max(counts)
    first_block_of = first_blocks(counts)
    rows = [[0] * (schedule.num_chunks * k) for _ in range(schedule.num_stages)]
    places = [0] * sum(counts)
    for stage, virtual_stages in enumerate(schedule.virtual_stages):
        for chunk, v in enumerate(virtual_stages):
            for j in range(counts[v]):
                rows[stage][chunk * k + j] = first_block_of[v] + j
                places[first_block_of[v] + j] = (stage * schedule.num_chunks + chunk) * k + j
    return rows, places
