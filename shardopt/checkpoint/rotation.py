"""Which checkpoints stay: the newest and the best; the others are deleted."""

import contextlib
import math
from pathlib import Path

from shardopt.checkpoint.meta import read_meta
from shardopt.checkpoint.steps import committed, discard, step_folder, surplus
from shardopt.core.errors import CheckpointError, complaint


def best_step(who: str, directory: Path, metric: str | None, mode: str) -> int | None:
    """Return the step with the best metric (of equals the earliest), or None where nothing competes."""
    if metric is None:
        return None
    sign = 1.0 if mode == "min" else -1.0
    values = {step: _metric(who, directory, step, metric) for step in committed(directory)}
    scores = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return min(scores)[1] if scores else None


def rotate(who: str, directory: Path, step: int, *, keep: int | None, best: int | None) -> None:
    """Delete what is no longer to be kept, now that `step` was written.

    Raises:
      CheckpointError: if a step cannot be deleted.
    """
    for old in surplus(committed(directory), keep, best):
        try:
            discard(directory, old)
        except OSError as error:
            what = f"step {step} was written, but step {old} in {directory} could not be deleted ({error})."
            raise CheckpointError(complaint(who, what, fix="delete it, or give the job the right to.")) from error


def _metric(who: str, directory: Path, step: int, metric: str) -> float:
    with contextlib.suppress(CheckpointError):
        return float(read_meta(who, step_folder(directory, step)).metrics.get(metric, math.nan))
    return math.nan
