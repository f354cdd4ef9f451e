"""Sizes that every schedule refuses."""

from typing import Any

from shardopt.core.arguments import is_integer
from shardopt.core.errors import complaint

_MOST_CELLS = 2**20


def check_sizes(who: str, **sizes: Any) -> None:
    """Refuse sizes that are no positive integers, and tables that no machine holds.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is below 1, or the table too large.
    """
    if bad := [f"{name}={size!r} ({type(size).__name__})" for name, size in sizes.items() if not is_integer(size)]:
        raise TypeError(complaint(who, f"sizes must be integers, got {', '.join(bad)}."))
    if bad := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
        raise ValueError(complaint(who, f"sizes must be at least 1, got {', '.join(bad)}."))
    stages, micro_batches, chunks = (
        int(sizes.get(name, 0)) for name in ("num_stages", "num_micro_batches", "num_chunks")
    )
    check_cells(who, stages, stages + micro_batches * max(chunks, 1))


def check_cells(who: str, num_stages: int, num_ticks: int) -> None:
    """Refuse a table that would fill the memory, before it does.

    Raises:
      ValueError: if stages times ticks are above 2^20; 256 stages with 1024 micro-batches are below.
    """
    if num_stages * num_ticks > _MOST_CELLS:
        what = f"a table of {num_stages} stages and {num_ticks} ticks or more is too large."
        fix = f"keep stages x ticks at {_MOST_CELLS} or below."
        raise ValueError(complaint(who, what, fix=fix))


def check_groups(who: str, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
    """Refuse micro-batches that do not go through several chunks in whole groups of one a stage.

    Raises:
      ValueError: if there are several chunks, and micro-batches that are not a multiple of the stages.
    """
    if num_chunks == 1 or num_micro_batches % num_stages == 0:
        return
    what = (
        f"with {num_chunks} chunks a stage, micro-batches must be a multiple of the {num_stages} stages, "
        f"got {num_micro_batches}."
    )
    below = num_micro_batches // num_stages * num_stages
    near = f"{below} or {below + num_stages}" if below else f"{num_stages}"
    raise ValueError(complaint(who, what, fix=f"use {near} micro-batches, or num_chunks=1."))
