"""Loggers of metrics: a progress bar or lines for people, JSON lines, or any `(step,
metrics) -> None`.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax

from shardopt.core import calling, type_error, value_error
from shardopt.core._extras import is_installed
from shardopt.runtime._files import write_atomic

if TYPE_CHECKING:
    from rich.console import Console

Log = Callable[[int, Mapping[str, float]], object]
ShowBatches = Callable[[int, int | None], None]


@calling("jsonl")
def jsonl(path: str | os.PathLike[str]) -> Log:
    r"""Return a logger that appends one JSON object per line: `{"step": 10, "loss": 2.3, ...}`.

    The file holds one run. When a resumed run writes its first line, it deletes the interrupted
    run's lines of that step and of later steps. It also deletes a line that a kill cut short. Every
    line is in the file when the call returns. A file that somebody deleted is made again. JSON has
    no NaN or infinity, so they are written as null.

    Args:
      path: the file; its folder is made if needed.

    Raises:
      TypeError: if `path` is not a path.
      ValueError: if `path` is a folder.

    Example:
      >>> import tempfile, pathlib
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> log = jsonl(path)
      >>> log(10, {"loss": 2.5})
      >>> log.close()
      >>> path.read_text()
      '{"step": 10, "loss": 2.5}\n'
    """
    if not isinstance(path, str | os.PathLike):
        raise type_error(f"the path must be a string or a pathlib.Path, got {type(path).__name__}.")
    file = Path(path)
    if file.is_dir():
        fix = f"name a file in it, such as {str(file / 'metrics.jsonl')!r}."
        raise value_error(f"{str(file)!r} is a folder.", fix=fix)
    return _JsonLines(file)


def as_loggers(log: Log | Sequence[Log] | None) -> tuple[Log, ...]:
    """Return `log`, which may be None, one logger or a sequence of loggers, as a tuple."""
    if log is None:
        return ()
    loggers = log if isinstance(log, list | tuple) and not callable(log) else (log,)
    not_callable = [type(logger).__name__ for logger in loggers if not callable(logger)]
    if not_callable:
        problem = f"log must be callables (step, metrics) -> None, got {', '.join(not_callable)}."
        raise type_error(problem, fix="pass so.training.jsonl(path) or a function of your own.")
    return tuple(logger for logger in loggers if callable(logger))


@contextmanager
def open_log(log: Log | Sequence[Log] | None) -> Iterator[Log]:
    """Yield one function that writes to every logger of this process: on the first process to all
    loggers, on others to those with `every_process`.

    Loggers with a `close` method are closed at the end.
    """
    is_first = jax.process_index() == 0
    loggers = [
        logger for logger in as_loggers(log) if is_first or getattr(logger, "every_process", False)
    ]

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for logger in loggers:
            logger(step, dict(metrics))

    with ExitStack() as stack:
        for logger in loggers:
            if callable(close := getattr(logger, "close", None)):
                stack.callback(close)
        yield write


class _JsonLines:
    """The logger of `jsonl`.

    The first line opens the file; after `close`, the next line opens it again.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False) + "\n"
        try:
            if self._file is None or not self._is_same_file(self._file):
                self.close()
                self._file = self._open(step)
            _write(self._file, line.encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_same_file(self, file: FileIO) -> bool:
        """Return whether the open file is still the file at the path."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _open(self, step: int) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        old_text = self._path.read_text() if self._path.exists() else ""
        earlier_lines = "".join(
            line for line in old_text.splitlines(keepends=True) if _is_before(line, step)
        )
        if earlier_lines != old_text:
            write_atomic(self._path, earlier_lines)
        return self._path.open("ab", buffering=0)  # without a buffer, close cannot fail


def _write(file: FileIO, data: bytes) -> None:
    while data:  # a nearly full disk may write only a part
        data = data[file.write(data) :]


def _is_before(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] < step
    except (ValueError, TypeError, KeyError):
        return False


def _do_nothing(*_) -> None:
    pass


class Display(NamedTuple):
    """Functions that show a run to a person.

    Attributes:
      say: `say(text)` prints a message, even if the bar is off.
      advance: `advance(step)`, called at the start and after each step.
      report: `report(step, metrics)`, called when metrics have arrived.
      evaluate: `evaluate(done, total)`, called for each batch of an evaluation, from 0 on; the
        total is None if unknown.
    """

    say: Callable[[str], None] = _do_nothing
    advance: Callable[[int], None] = _do_nothing
    report: Callable[[int, Mapping[str, float]], None] = _do_nothing
    evaluate: ShowBatches = _do_nothing


@contextmanager
def show_progress(
    num_steps: int, *, shown: bool, work: str = "step", console: "Console | None" = None
) -> Iterator[Display]:
    """Yield functions that show a run of `num_steps` steps on the first process.

    Only messages if `shown` is False. Other `work` than steps has its name in front of the counts,
    such as "reading weights".
    """
    if jax.process_index() != 0:
        yield Display()
        return
    screen = console
    if screen is None and is_installed("rich"):
        from rich.console import Console

        screen = Console(stderr=True)

    def say(text: str) -> None:
        if screen is None:
            print(text, file=sys.stderr, flush=True)
        else:
            screen.print(text, markup=False, highlight=False, soft_wrap=True)

    def report_line(step: int, metrics: Mapping[str, float]) -> None:
        say(f"{work} {step}/{num_steps}  {metrics_text(metrics)}")

    if not shown:
        yield Display(say)
    elif screen is not None and (screen.is_terminal or screen.is_jupyter):
        with _progress_bar(num_steps, screen, work) as bar_functions:
            yield Display(say, *bar_functions)
    else:
        yield Display(say, report=report_line)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return metrics as one line, with four significant digits each."""
    suffix = "_per_second"
    return "  ".join(
        (
            f"{value:.4g} {name.removesuffix(suffix)}/s"
            if name.endswith(suffix)
            else f"{name} {value:.4g}"
        )
        for name, value in metrics.items()
    )


@contextmanager
def _progress_bar(
    num_steps: int, console: "Console", work: str
) -> Iterator[tuple[Callable, Callable, ShowBatches]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    columns = (
        TextColumn(work, markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
    )
    latest_metrics: dict[str, float] = {}

    # `expand` makes a narrow terminal cut the metrics, not the counts before them.
    with Progress(*columns, console=console, refresh_per_second=4, expand=True) as progress:
        training_task = progress.add_task("starting", total=num_steps)
        evaluation_task = progress.add_task("evaluation", total=None, visible=False)

        def advance(step: int) -> None:
            progress.update(training_task, completed=step)

        def report(step: int, metrics: Mapping[str, float]) -> None:
            latest_metrics.update(metrics)
            progress.update(training_task, description=metrics_text(latest_metrics))

        def evaluate(done: int, total: int | None) -> None:
            if done == 0:
                # otherwise the bar shows the last evaluation
                progress.reset(evaluation_task, total=total)
            progress.update(evaluation_task, completed=done, total=total, visible=done != total)

        yield advance, report, evaluate
