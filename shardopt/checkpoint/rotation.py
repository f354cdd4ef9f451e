"""Which checkpoints stay: the newest and the best; the others are deleted."""

import logging
import math
from pathlib import Path

from shardopt.checkpoint.meta import read_meta
from shardopt.checkpoint.steps import committed, discard, step_folder, surplus
from shardopt.core.errors import CheckpointError, complaint


def best_step(who: str, directory: Path, metric: str | None, mode: str) -> int | None:
    """Return the step with the best metric (of equals the earliest), or None where nothing competes.

    Raises:
      CheckpointError: if the record of a checkpoint cannot be read: it may be the best.
    """
    values, unread = _metrics(who, directory, metric)
    if unread:
        what = f"the best step in {directory} by {metric!r} cannot be told."
        fix = "bring the file back from a copy, or delete the folder of its step."
        raise CheckpointError(complaint(who, what, list(unread.values()), fix=fix))
    return _best(values, mode)


def rotate(who: str, directory: Path, step: int, *, keep: int | None, metric: str | None, mode: str) -> None:
    """Delete what is no longer to be kept, now that `step` was written. What may be the best is kept, and said to be.

    Raises:
      CheckpointError: if a step cannot be deleted.
    """
    values, unread = _metrics(who, directory, metric)
    for old in surplus(committed(directory), keep, _best(values, mode)):
        if old in unread:
            text = "%s: step %d in %s is kept, because it may be the best by %r: %s"
            logging.getLogger(__name__).warning(text, who, old, directory, metric, unread[old])
            continue
        try:
            discard(directory, old)
        except OSError as error:
            what = f"step {step} was written, but step {old} in {directory} could not be deleted ({error})."
            raise CheckpointError(complaint(who, what, fix="delete it, or give the job the right to.")) from error


def _metrics(who: str, directory: Path, metric: str | None) -> tuple[dict[int, float], dict[int, str]]:
    """Return the metric of each step that has it, and what is wrong with the records that cannot be read."""
    values: dict[int, float] = {}
    unread: dict[int, str] = {}
    if metric is None:
        return values, unread
    for step in committed(directory):
        try:
            values[step] = float(read_meta(who, step_folder(directory, step)).metrics.get(metric, math.nan))
        except CheckpointError as error:
            unread[step] = str(error).partition("\n")[0].removeprefix(f"{who}: ")
    return {step: value for step, value in values.items() if not math.isnan(value)}, unread


def _best(values: dict[int, float], mode: str) -> int | None:
    sign = 1.0 if mode == "min" else -1.0
    return min(values, key=lambda step: (sign * values[step], step), default=None)
