"""Error messages of one form: who, what, every offending leaf with its numbers, the remedy."""

from collections.abc import Sequence

MAX_LISTED = 8


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or infinite.

    Attributes:
      step: the step whose loss was not finite, counted from 0.
      position: how many batches had been drawn before that step's batch, counted from 0.
    """

    def __init__(self, message: str, *, step: int, position: int):
        super().__init__(message)
        self.step, self.position = step, position


class NotSeparableError(ValueError):
    """A loss is not a (weighted) mean over rows, so that its pieces on several devices do not add up to it.

    Attributes:
      operation: the operation that mixes rows, as in "reduce_sum at loss.py:12 (batch_loss)"; "" if it is not known.
    """

    def __init__(self, message: str, *, operation: str = ""):
        super().__init__(message)
        self.operation = operation


class CheckpointError(ValueError):
    """A checkpoint cannot be used (damaged, incomplete, of another model), or could not be written."""


class StepNotFoundError(CheckpointError):
    """There is no checkpoint of the step that was asked for, or none at all."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint, or what `to_bytes` made, is not what was written: a file or a part is missing, cut or changed."""


class CheckpointInUseError(CheckpointError):
    """Another process, or another `Checkpoints` of this one, is writing to the folder."""


def format_error(who: str, what: str, offenders: Sequence[str] = (), fix: str = "") -> str:
    """Format an error: `who: what`, one indented line an offender (at most eight), `Fix: ...`."""
    lines = [f"{who}: {what}"]
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
    for ending, several in (("leaf", "leaves"), ("axis", "axes"), ("ch", "ches"), ("ss", "sses")):
        if noun.endswith(ending):
            return f"{count} {noun.removesuffix(ending)}{several}"
    return f"{count} {noun}s"
