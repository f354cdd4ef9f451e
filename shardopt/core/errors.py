"""Error classes, and one format for messages: the function, the problem, every offending leaf, the fix."""

from collections.abc import Sequence

MAX_LISTED = 8


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or infinite.

    Attributes:
      step: the number of the step whose loss was not finite, counted from 0.
      position: the number of batches drawn before the batch of that step.
    """

    def __init__(self, message: str, *, step: int, position: int):
        super().__init__(message)
        self.step, self.position = step, position


class NotSeparableError(ValueError):
    """A loss is not a (weighted) mean over rows, so the losses of the devices do not add up to the loss of the batch.

    Attributes:
      operation: the operation that mixes rows, such as "reduce_sum at loss.py:12 (batch_loss)"; "" if it is unknown.
    """

    def __init__(self, message: str, *, operation: str = ""):
        super().__init__(message)
        self.operation = operation


class CheckpointError(ValueError):
    """A checkpoint cannot be used (damaged, incomplete, of another model), or could not be written."""


class StepNotFoundError(CheckpointError):
    """There is no checkpoint of the requested step, or no checkpoint at all."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint, or the result of `to_bytes`, was damaged: a file or a part is missing, truncated or changed."""


class CheckpointInUseError(CheckpointError):
    """Another process, or another `Checkpoints` of this one, is writing to the folder."""


def format_error(caller: str, problem: str, offenders: Sequence[str] = (), fix: str = "") -> str:
    """Return the message `caller: problem`, one indented line for each offender (at most eight), and `Fix: ...`."""
    lines = [f"{caller}: {problem}"]
    lines += [f"  {offender}" for offender in offenders[:MAX_LISTED]]
    if len(offenders) > MAX_LISTED:
        lines.append(f"  ... and {len(offenders) - MAX_LISTED} more")
    if fix:
        lines.append(f"Fix: {fix}")
    return "\n".join(lines)


def plural(count: int, noun: str) -> str:
    """Return `1 leaf`, `2 leaves`, `3 axes`, `4 batches`, `5 processes`."""
    if count == 1:
        return f"1 {noun}"
    for ending, plural_ending in (("leaf", "leaves"), ("axis", "axes"), ("ch", "ches"), ("ss", "sses")):
        if noun.endswith(ending):
            return f"{count} {noun.removesuffix(ending)}{plural_ending}"
    return f"{count} {noun}s"
