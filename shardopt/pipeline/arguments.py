"""Sizes that every schedule refuses."""

from typing import Any

import numpy as np

from shardopt.core.errors import complaint


def check_sizes(who: str, **sizes: Any) -> None:
    """Refuse sizes that are no positive integers.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is below 1.
    """
    if bad := [f"{name}={size!r} ({type(size).__name__})" for name, size in sizes.items() if not _is_integer(size)]:
        raise TypeError(complaint(who, f"sizes must be integers, got {', '.join(bad)}."))
    if bad := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
        raise ValueError(complaint(who, f"sizes must be at least 1, got {', '.join(bad)}."))


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


def _is_integer(size: Any) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool)
