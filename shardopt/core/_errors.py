"""Error classes, and one format for messages: the function, the problem, every offending leaf, the
fix.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

MAX_LISTED = 8

_CALLER: ContextVar[str] = ContextVar("caller", default="shardopt")


class calling:  # noqa: N801, because it reads as a verb, like contextlib.suppress
    """Name the function that the user called, in a `with` block or as a decorator.

    Messages begin with this name.

    A new thread has no name: set it there again. Do not decorate a generator, whose body runs after
    the call.

    Example:
      >>> @calling("fsdp")
      ... def fsdp(micro_batches):
      ...     if micro_batches < 1:
      ...         raise value_error(f"micro_batches must be at least 1, got {micro_batches}.")
      >>> fsdp(0)
      Traceback (most recent call last):
      ...
      ValueError: fsdp: micro_batches must be at least 1, got 0.
    """

    def __init__(self, caller: str):
        self._caller = caller

    def __enter__(self) -> None:
        self._token: Token[str] = _CALLER.set(self._caller)

    def __exit__(self, *_: object) -> None:
        _CALLER.reset(self._token)

    def __call__(self, function: Function) -> Function:
        """Return a function that runs under this name."""
        caller = self._caller

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            with calling(caller):
                return function(*args, **kwargs)

        return cast(Function, named)


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or infinite.

    Attributes:
      step: the number of the step whose loss was not finite, counted from 0.
      position: the number of batches drawn before the batch of that step.
    """

    def __init__(self, message: str, *, step: int, position: int):
        super().__init__(message)
        self.step = step
        self.position = position


CORRUPTED = 117
"""The exit code of a process whose device computed wrong: EUCLEAN of Linux."""


class SilentCorruptionError(RuntimeError):
    """A device computed, stored or received wrong bits.

    Attributes:
      step: the number of the step, counted from 0.
      phase: where the bits first differ: in the state before the step, the gradient, its reduction,
        or the update.
      devices: the ids of the devices that may be at fault: one if it is known, none if it is not.
      processes: the processes of these devices.
      exit_code: the exit code of this process: `CORRUPTED` if one of its devices may be at fault,
        else 1.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        phase: str,
        devices: Sequence[int],
        processes: Sequence[int],
        exit_code: int,
    ):
        super().__init__(message)
        self.step = step
        self.phase = phase
        self.devices = tuple(devices)
        self.processes = tuple(processes)
        self.exit_code = exit_code


class NotSeparableError(ValueError):
    """A loss is not a (weighted) mean over rows, so the losses of the devices do not add up to the
    loss of the batch.

    Attributes:
      operation: the operation that mixes rows, such as "reduce_sum at loss.py:12 (batch_loss)"; ""
        if it is unknown.
    """

    def __init__(self, message: str, *, operation: str = ""):
        super().__init__(message)
        self.operation = operation


class WrongProgramError(RuntimeError):
    """A compiled program is proved to be wrong."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used (damaged, incomplete, of another model), or could not be written."""


class StepNotFoundError(CheckpointError):
    """There is no checkpoint of the requested step, or no checkpoint at all."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint was damaged: a file or a part is missing,
    truncated or changed.
    """


class CheckpointInUseError(CheckpointError):
    """Another process, or another `Checkpoints` of this one, is writing to the folder."""


def format_error(caller: str, problem: str, offenders: Sequence[str] = (), fix: str = "") -> str:
    """Return the message `caller: problem`, one indented line for each offender (at most eight),
    and `Fix: ...`.
    """
    lines = [f"{caller}: {problem}"]
    lines += [f"  {offender}" for offender in offenders[:MAX_LISTED]]
    if len(offenders) > MAX_LISTED:
        lines.append(f"  ... and {len(offenders) - MAX_LISTED} more")
    if fix:
        lines.append(f"Fix: {fix}")
    return "\n".join(lines)


def error_text(problem: str, offenders: Sequence[str] = (), fix: str = "") -> str:
    """Return the message of `format_error` for the function that the user called, which `calling`
    names.
    """
    return format_error(_CALLER.get(), problem, offenders, fix)


def value_error(problem: str, offenders: Sequence[str] = (), fix: str = "") -> ValueError:
    """Return a ValueError with the message of `error_text`.

    Example:
      >>> raise value_error("steps must be at least 1, got 0.", fix="pass steps=1.")
      Traceback (most recent call last):
      ...
      ValueError: shardopt: steps must be at least 1, got 0.
      Fix: pass steps=1.
    """
    return ValueError(error_text(problem, offenders, fix))


def type_error(problem: str, offenders: Sequence[str] = (), fix: str = "") -> TypeError:
    """Return a TypeError with the message of `error_text`."""
    return TypeError(error_text(problem, offenders, fix))


def quoted(names: Iterable[object]) -> str:
    """Return names with quotes, separated by commas."""
    return ", ".join(map(repr, names))


def plural(count: int, noun: str) -> str:
    """Return `1 leaf`, `2 leaves`, `3 axes`, `4 batches`, `5 processes`."""
    if count == 1:
        return f"1 {noun}"
    for ending, plural_ending in (
        ("leaf", "leaves"),
        ("axis", "axes"),
        ("ch", "ches"),
        ("ss", "sses"),
    ):
        if noun.endswith(ending):
            return f"{count} {noun.removesuffix(ending)}{plural_ending}"
    return f"{count} {noun}s"
