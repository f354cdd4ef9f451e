"""Where metrics go: JSON lines, TensorBoard, or any callable `(step, metrics) -> None`."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import jax

from shardopt.core.extras import require
from shardopt.runtime.files import write_whole

Log = Callable[[int, Mapping[str, float]], None]


def jsonl(path: str | os.PathLike) -> Log:
    r"""Return a logger that appends one JSON object a line: `{"step": 10, "loss": 2.3, ...}`.

    The file holds one run. When the first line of a resumed run is written, lines of that step and later ones,
    which the broken run left behind, are dropped, and so is a line cut short by a kill. Every line is in the file when
    the call returns, and a file that somebody deleted is made anew. JSON has no NaN or infinity: they are written as null.

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
        raise ValueError(
            f"jsonl: {str(file)!r} is a folder.\nFix: name a file in it, such as {str(file / 'metrics.jsonl')!r}."
        )
    return _JsonLines(file)


def tensorboard(directory: str | os.PathLike) -> Log:
    """Return a logger that writes TensorBoard scalars, one for each metric.

    After a resume TensorBoard is told to hide what the broken run wrote at later steps.

    Args:
      directory: the folder of event files; made when needed.

    Raises:
      TypeError: if `directory` is not a path.
      ValueError: if `directory` is a file.
    """
    folder = _path("tensorboard", directory)
    if folder.is_file():
        raise ValueError(f"tensorboard: {str(folder)!r} is a file.\nFix: name a folder.")
    return _TensorBoard(folder)


def as_loggers(log: Any) -> tuple[Log, ...]:
    """Return `log` as a tuple: it may be None, one logger or a sequence of them.

    Raises:
      TypeError: if a logger is not callable.
    """
    several = isinstance(log, list | tuple) and not callable(log)
    loggers: tuple[Any, ...] = () if log is None else tuple(log) if several else (log,)
    if strange := [type(one).__name__ for one in loggers if not callable(one)]:
        raise TypeError(
            f"fit: log must be callables (step, metrics) -> None, got {', '.join(strange)}.\n"
            "Fix: pass so.training.jsonl(path), so.training.tensorboard(directory) or a function of your own."
        )
    return loggers


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
            write_whole(self._path, kept)
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
            require("tensorboardX", extra="tensorboard", who="tensorboard")
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _path(who: str, path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{who}: the path must be a string or a pathlib.Path, got {type(path).__name__}.")
    return Path(path)
