"""Where metrics go: to a person, as a bar or as lines; to JSON lines, TensorBoard, or any `(step, metrics) -> None`."""

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

from shardopt.core.errors import format_error
from shardopt.core.extras import is_installed, require
from shardopt.runtime.files import write_atomic

if TYPE_CHECKING:
    from rich.console import Console

Log = Callable[[int, Mapping[str, float]], object]
ShowBatches = Callable[[int, int | None], None]


def jsonl(path: str | os.PathLike[str]) -> Log:
    r"""Return a logger that appends one JSON object a line: `{"step": 10, "loss": 2.3, ...}`.

    The file holds one run. When the first line of a resumed run is written, lines of that step and later ones,
    which the broken run left behind, are dropped, and so is a line cut short by a kill. Every line is in the file when
    the call returns, and a file that somebody deleted is made again. JSON has no NaN or infinity: they are written as null.

    Args:
      path: the file; its folder is made when needed.

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
    file = _path("jsonl", path)
    if file.is_dir():
        fix = f"name a file in it, such as {str(file / 'metrics.jsonl')!r}."
        raise ValueError(format_error("jsonl", f"{str(file)!r} is a folder.", fix=fix))
    return _JsonLines(file)


def tensorboard(directory: str | os.PathLike[str]) -> Log:
    """Return a logger that writes TensorBoard scalars, one for each metric.

    After a resume TensorBoard is told to hide what the broken run wrote at later steps.

    Args:
      directory: the folder of event files; made when needed.

    Raises:
      ModuleNotFoundError: if tensorboardX, of the extra "tensorboard", is not installed.
      TypeError: if `directory` is not a path.
      ValueError: if `directory` is a file.
    """
    folder = _path("tensorboard", directory)
    require("tensorboardX", extra="tensorboard", who="tensorboard")
    if folder.is_file():
        raise ValueError(format_error("tensorboard", f"{str(folder)!r} is a file.", fix="name a folder."))
    return _TensorBoard(folder)


def as_loggers(log: Log | Sequence[Log] | None) -> tuple[Log, ...]:
    """Return `log` as a tuple: it may be None, one logger or a sequence of them."""
    if log is None:
        return ()
    given = log if isinstance(log, list | tuple) and not callable(log) else (log,)
    if strange := [type(one).__name__ for one in given if not callable(one)]:
        what = f"log must be callables (step, metrics) -> None, got {', '.join(strange)}."
        fix = "pass so.training.jsonl(path), so.training.tensorboard(directory) or a function of your own."
        raise TypeError(format_error("fit", what, fix=fix))
    return tuple(one for one in given if callable(one))


@contextmanager
def open_log(log: Log | Sequence[Log] | None) -> Iterator[Log]:
    """Give one function that writes to every logger, on the first process only; those with a `close` are closed."""
    loggers = as_loggers(log) if jax.process_index() == 0 else ()

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for one in loggers:
            one(step, dict(metrics))

    with ExitStack() as stack:
        for one in loggers:
            if callable(close := getattr(one, "close", None)):
                stack.callback(close)
        yield write


class _JsonLines:
    """Opened by the first line written, and again by the first one after `close`."""

    def __init__(self, path: Path):
        self._path, self._file = path, None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False) + "\n"
        try:
            if self._file is None or not self._in_place(self._file):
                self.close()
                self._file = self._open(step)
            _write(self._file, line.encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _in_place(self, file: FileIO) -> bool:
        """Return whether the file is still the one of that name."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _open(self, step: int) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        old = self._path.read_text() if self._path.exists() else ""
        kept = "".join(line for line in old.splitlines(keepends=True) if _before(line, step))
        if kept != old:
            write_atomic(self._path, kept)
        return self._path.open("ab", buffering=0)  # nothing is left to fail when it is closed


def _write(file: FileIO, data: bytes) -> None:
    while data:  # a disk that is about to be full takes a part
        data = data[file.write(data) :]


def _before(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] < step
    except (ValueError, TypeError, KeyError):
        return False


class _TensorBoard:
    """Opened by the first value written, and again by the first one after `close`."""

    def __init__(self, directory: Path):
        self._directory, self._writer = directory, None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _path(who: str, path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{who}: the path must be a string or a pathlib.Path, got {type(path).__name__}.")
    return Path(path)


class Display(NamedTuple):
    """Ways to tell a person something.

    Attributes:
      say: `say(text)` prints a message, also where the bar is off.
      advance: `advance(step)`, at the start and after each step.
      report: `report(step, metrics)`, where metrics have arrived.
      evaluate: `evaluate(done, total)`, batches of an evaluation, from 0 on; the total is None while it is not known.
    """

    say: Callable[[str], None]
    advance: Callable[[int], None]
    report: Callable[[int, Mapping[str, float]], None]
    evaluate: ShowBatches


@contextmanager
def show_progress(num_steps: int, *, shown: bool, console: "Console | None" = None) -> Iterator[Display]:
    """Show a run of `num_steps` steps on the first process; messages only where it is not to be `shown`."""
    if jax.process_index() != 0:
        yield Display(_nothing, _nothing, _nothing, _nothing)
        return
    out = console
    if out is None and is_installed("rich"):
        from rich.console import Console

        out = Console(stderr=True)

    def say(text: str) -> None:
        if out is None:
            print(text, file=sys.stderr, flush=True)
        else:
            out.print(text, markup=False, highlight=False, soft_wrap=True)

    def line(step: int, metrics: Mapping[str, float]) -> None:
        say(f"step {step}/{num_steps}  {metrics_text(metrics)}")

    if not shown:
        yield Display(say, _nothing, _nothing, _nothing)
    elif out is not None and (out.is_terminal or out.is_jupyter):
        with _live(num_steps, out) as shows:
            yield Display(say, *shows)
    else:
        yield Display(say, _nothing, line, _nothing)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return metrics on one line, four significant digits each."""
    rate = "_per_second"
    return "  ".join(
        f"{value:.4g} {name.removesuffix(rate)}/s" if name.endswith(rate) else f"{name} {value:.4g}"
        for name, value in metrics.items()
    )


@contextmanager
def _live(num_steps: int, console: "Console") -> Iterator[tuple[Callable, Callable, ShowBatches]]:
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
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    shown: dict[str, float] = {}

    # Expanded, so that on a narrow terminal the metrics are cut, not the counts before them.
    with Progress(*columns, console=console, refresh_per_second=4, expand=True) as progress:
        task = progress.add_task("starting", total=num_steps)
        evaluation = progress.add_task("evaluation", total=None, visible=False)

        def advance(step: int) -> None:
            progress.update(task, completed=step)

        def report(step: int, metrics: Mapping[str, float]) -> None:
            shown.update(metrics)
            progress.update(task, description=metrics_text(shown))

        def evaluate(done: int, total: int | None) -> None:
            if done == 0:
                progress.reset(evaluation, total=total)  # or what the last one came to
            progress.update(evaluation, completed=done, total=total, visible=done != total)

        yield advance, report, evaluate


def _nothing(*_) -> None:
    pass
