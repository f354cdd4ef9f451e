"""How many blocks each virtual stage runs: equally many, as the ends of the model leave room, or as the user says."""

from collections.abc import Sequence

from shardopt.core.arguments import check_number, is_integer
from shardopt.core.errors import format_error, plural
from shardopt.pipeline.check import check_sizes
from shardopt.pipeline.schedule import Schedule

Counts = tuple[int, ...]
"""[V]: how many blocks each virtual stage runs, in the order of the model."""


def balance(num_blocks: int, num_parts: int, *, embedding: float = 0.0, head: float = 0.0) -> Counts:
    """Cut blocks into parts of which the busiest has least to do, embedding and head counted as blocks' worth.

    max_p (n_p + e [p = 0] + h [p = last]) is the least that it can be: of S stages a pipeline is as fast as the busiest.
    Where parts would be equal the later one gets the block, as it keeps fewer activations.

    Args:
      num_blocks: L.
      num_parts: V, the virtual stages: stages times chunks.
      embedding: e, what the first part has to do besides, in blocks.
      head: h, what the last part has to do besides, loss and all, in blocks.

    Returns:
      [V] integers that add up to L, for `so.hybrid(blocks_per_stage=...)`; 0 for a part whose end of the model is enough.

    Raises:
      TypeError: if a size is not an integer, or an end not a number.
      ValueError: if a size is below 1, or an end negative.

    Example:
      >>> import shardopt as so
      >>> so.schedules.balance(7, 2), so.schedules.balance(32, 4), so.schedules.balance(32, 4, head=2.4)
      ((3, 4), (8, 8, 8, 8), (8, 9, 9, 6))
    """
    check_sizes("balance", num_blocks=num_blocks, num_parts=num_parts)
    for name, value in {"embedding": embedding, "head": head}.items():
        check_number("balance", name, value)
    load = [0.0] * num_parts
    load[0] += embedding
    load[-1] += head
    counts = [0] * num_parts
    for _ in range(num_blocks):
        part = min(range(num_parts), key=lambda p: (load[p], -p))
        load[part] += 1
        counts[part] += 1
    return tuple(counts)


def cut_blocks(who: str, schedule: Schedule, num_blocks: int, counts: Sequence[int] | None) -> Counts:
    """Return [V], how many blocks each virtual stage runs: as given, or else as equally many as can be.

    Raises:
      ValueError: if there are fewer blocks than virtual stages, or what is given does not add up.
    """
    size = schedule.num_stages * schedule.num_chunks
    parts = f"{plural(schedule.num_stages, 'stage')} x {plural(schedule.num_chunks, 'chunk')} = {size}"
    if counts is None and num_blocks < size:
        what = f"{plural(num_blocks, 'block')} are too few for {parts}."
        fix = f"use {size} blocks or more, another pipeline size or number of chunks, or blocks_per_stage with zeros."
        raise ValueError(format_error(who, what, fix=fix))
    if counts is None:
        return balance(num_blocks, size)
    if len(counts) != size or sum(counts) != num_blocks:
        what = f"blocks_per_stage has {plural(len(counts), 'part')} with {plural(sum(counts), 'block')} in all; "
        what += f"there are {parts} parts, and {plural(num_blocks, 'block')}."
        fix = f"so.schedules.balance({num_blocks}, {size}) is such a cut; or leave it out."
        raise ValueError(format_error(who, what, fix=fix))
    return tuple(counts)


def check_counts(who: str, counts: Sequence[int] | None) -> Counts | None:
    """Return what a user gave as `blocks_per_stage` as it is stored.

    Raises:
      TypeError: if it is no sequence of integers.
      ValueError: if one is negative.
    """
    if counts is None:
        return None
    if not isinstance(counts, Sequence) or isinstance(counts, str) or not all(map(is_integer, counts)):
        what = f"blocks_per_stage must be integers, one for each virtual stage, or None, got {counts!r:.80}."
        raise TypeError(format_error(who, what, fix="use so.schedules.balance(num_blocks, stages * chunks)."))
    if min(counts, default=0) < 0:
        raise ValueError(format_error(who, f"blocks_per_stage must not be negative, got {min(counts)}."))
    return tuple(int(count) for count in counts)


def is_even(counts: Counts) -> bool:
    """Return whether all virtual stages run equally many, so that each stage can store its share of the stack."""
    return len(set(counts)) == 1


def first_blocks(counts: Counts) -> Counts:
    """Return [V], the number in the model of the first block of each virtual stage."""
    return tuple(sum(counts[:v]) for v in range(len(counts)))


def stage_rows(schedule: Schedule, counts: Counts) -> tuple[list[list[int]], list[int]]:
    """Return which blocks a stage stacks, and where each block is.

    Returns:
      rows [S, chunks * k]: with k the largest count, the number in the model of what lies there; 0 where a chunk has fewer.
      places [L]: where each block of the model lies when the stages' stacks are put one after another.
    """
    k, firsts = max(counts), first_blocks(counts)
    rows = [[0] * (schedule.num_chunks * k) for _ in range(schedule.num_stages)]
    places = [0] * sum(counts)
    for stage, virtual in enumerate(schedule.virtual_stages):
        for chunk, v in enumerate(virtual):
            for j in range(counts[v]):
                rows[stage][chunk * k + j] = firsts[v] + j
                places[firsts[v] + j] = (stage * schedule.num_chunks + chunk) * k + j
    return rows, places
