"""A corpus of files as bytes, cut into training and validation windows, and read in shuffled
batches.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from shardopt.core import calling, check_count, error_text, format_error, type_error, value_error
from shardopt.core._extras import require

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]


class Corpus(NamedTuple):
    """Files that are read as one long sequence of bytes. Nothing is kept in memory.

    Attributes:
      paths: the files, in order.
      starts: [files + 1]: the position of the first byte of each file, then the total number of
        bytes.
    """

    paths: tuple[Path, ...]
    starts: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The total number of bytes."""
        return self.starts[-1]

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the bytes [begin, end) as uint8.

        Raises:
          OSError: if a file cannot be read, or is shorter than when the corpus was opened.
        """
        parts = []
        file = int(np.searchsorted(self.starts, begin, side="right")) - 1
        while begin < end:
            stop = min(end, self.starts[file + 1])
            parts.append(_read(self.paths[file], begin - self.starts[file], stop - begin))
            begin = stop
            file = file + 1
        return np.frombuffer(b"".join(parts), np.uint8)


def _read(path: Path, start: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(count)
    if len(content) < count:
        problem = (
            f"{str(path)!r} is shorter than when the corpus was opened: {start + len(content)}"
            " bytes and no more."
        )
        fix = "leave the text alone while a model trains on it."
        raise OSError(format_error("data.Corpus", problem, fix=fix))
    return content


@dataclasses.dataclass(frozen=True)
class Windows:
    """A range of a corpus as a sequence of windows: `windows[i]` is `{"tokens": int32 [length +
    1]}`.

    Window i starts at byte `begin + i * length`, so each byte but the first is a target once.
    """

    corpus: Corpus
    begin: int
    end: int
    length: int

    def __len__(self) -> int:
        return max(0, (self.end - self.begin - 1) // self.length)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = self.begin + int(index) * self.length
        return {"tokens": self.corpus.read(start, start + self.length + 1).astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class Documents:
    """The files of a corpus as documents for `pack`: `documents[i]` is file i as int32 tokens, one
    token per byte.
    """

    corpus: Corpus

    def __len__(self) -> int:
        return len(self.corpus.paths)

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        begin, end = self.corpus.starts[index : index + 2]
        return self.corpus.read(begin, end).astype(np.int32)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))


@calling("data.open_corpus")
def open_corpus(path: str | os.PathLike | None = None) -> Corpus:
    """Return the corpus of a file, of the text files in a folder, or of Python's own standard
    library.

    Files are ordered by their paths. In a folder, hidden files, `__pycache__` and binary files
    (with a zero byte near their beginning) are skipped. From the standard library, tests, generated
    tables (`encodings`, `pydoc_data`) and installed packages are left out.

    Args:
      path: a file or a folder; None stands for the standard library.

    Raises:
      FileNotFoundError: if `path` does not exist.
      ValueError: if `path` holds no text.

    Example:
      >>> corpus = open_corpus()
      >>> corpus.num_bytes > 1_000_000
      True
    """
    if path is None:
        root = Path(os.__file__).parent
        files = [path for path in _walk(root, skip=_NOT_LIBRARY) if path.suffix == ".py"]
    else:
        root = Path(path)
        if not root.exists():
            problem = f"there is no file or folder {str(root)!r}."
            fix = "check the path; without one, Python's own source is read."
            raise FileNotFoundError(error_text(problem, fix=fix))
        files = [root]
        if root.is_dir():
            files = [path for path in _walk(root, skip={"__pycache__"}) if not _is_binary(path)]
    sizes = {file: file.stat().st_size for file in files}
    sizes = {file: size for file, size in sizes.items() if size}
    if not sizes:
        problem = f"there is no text in the folder {str(root)!r}."
        if root.is_file():
            problem = f"{str(root)!r} is empty."
        raise value_error(problem, fix="name a text file, or a folder that holds some.")
    return Corpus(tuple(sizes), tuple(np.cumsum([0, *sizes.values()]).tolist()))


_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
"""Folders left out of the standard library: installed packages, tests and generated tables.

The tables are near copies of each other. Split between training and validation, they would leak
validation text. """


def _walk(root: Path, skip: set[str]) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, ordered by path.

    Symbolic links to folders are not followed.
    """
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    # Sorted by the strings of the path parts, because the order of Path objects differs between
    # operating systems.
    yield from sorted(
        (path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).parts
    )


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(8192)


@calling("data.split")
def split(corpus: Corpus, length: int, *, validation: float = 0.05) -> tuple[Windows, Windows]:
    """Split a corpus into training windows and, at its end, validation windows; no byte is in both.

    The split is between two files if a file begins near enough to the wanted position. No file is
    then on both sides.

    Args:
      corpus: from `open_corpus`.
      length: T, the number of targets in a window; a window holds T + 1 bytes.
      validation: the wanted share of bytes for validation, between 0 and 1. A split between files
        may make the share up to half smaller or larger.

    Raises:
      ValueError: if `length` or `validation` is out of range, or a side is too short for one
        window.

    Example:
      >>> training, validation = split(open_corpus(), 128)
      >>> training[0]["tokens"].shape
      (129,)
    """
    check_count("length", length)
    if not 0 < validation < 1:
        raise value_error(f"validation must be between 0 and 1, got {validation}.")
    cut = _cut(corpus, validation)
    sides = Windows(corpus, 0, cut, length), Windows(corpus, cut, corpus.num_bytes, length)
    if any(len(side) < 1 for side in sides):
        problem = (
            f"{corpus.num_bytes} bytes of text, {sides[0].end} to train on and"
            f" {corpus.num_bytes - cut} to validate, are too few for windows of {length + 1} bytes"
            " on both sides."
        )
        raise value_error(problem, fix="give more text, or choose shorter windows.")
    return sides


def _cut(corpus: Corpus, validation: float) -> int:
    wanted = round(corpus.num_bytes * (1 - validation))
    nearest = min(corpus.starts, key=lambda start: abs(start - wanted))
    near_enough = 2 * abs(nearest - wanted) <= min(wanted, corpus.num_bytes - wanted)
    return nearest if near_enough else wanted


@calling("data.batches")
def batches(windows: Windows, batch_size: int, *, seed: int = 0) -> "grain.IterDataset":
    """Return endless shuffled batches, `{"tokens": int32 [batch_size, length + 1]}`.

    Each epoch has its own order, drawn from the seed; a batch may span two epochs. Every process
    draws the same global batches, so the order does not depend on the number of processes.

    Args:
      windows: from `split`.
      batch_size: B, the number of windows in a global batch.
      seed: the seed of the order.

    Returns:
      A grain dataset. Its iterators have `get_state()` and `set_state(state)`; the state is the
      position, in JSON.

    Raises:
      ValueError: if `batch_size` is below 1, or `seed` is not in 0 to 2^32 - 1.

    Example:
      >>> training, _ = split(open_corpus(), 128)
      >>> iterator = iter(batches(training, 4))
      >>> next(iterator)["tokens"].shape, iterator.get_state()
      ((4, 129), {'next_index': 1})
    """
    require("grain", extra="data")
    import grain

    check_count("batch_size", batch_size)
    dataset = grain.MapDataset.source(windows).shuffle(seed=seed).repeat().batch(batch_size)
    # One thread that reads two batches ahead is enough: windows are cheap, and the cores are for
    # the devices.
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))


@calling("data.spread_batches")
def spread_batches(windows: Windows, batch_size: int, num_batches: int) -> list[Batch]:
    """Return validation batches: windows spread evenly over the whole range, the same in every
    call.

    If there are fewer windows than `batch_size * num_batches`, some windows are repeated.

    Args:
      windows: from `split`.
      batch_size: the number of windows in a batch.
      num_batches: the number of batches.

    Raises:
      ValueError: if there is no batch, or no window in it.
    """
    check_count("batch_size", batch_size)
    check_count("num_batches", num_batches)
    count = batch_size * num_batches
    chosen = [windows[i * len(windows) // count]["tokens"] for i in range(count)]
    return [{"tokens": np.stack(chosen[i : i + batch_size])} for i in range(0, count, batch_size)]


@calling("data.next_token")
def next_token(batch: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
    """Return a batch with separate inputs and targets: "tokens" [..., T] and "targets" [..., T] of
    "tokens" [..., T + 1].

    A model computes the same loss from both forms. A mesh with a context axis needs separate
    targets, because it can split T positions but not T + 1.

    Args:
      batch: a dict with "tokens" [..., T + 1]; other entries stay unchanged.

    Raises:
      TypeError: if the tokens are not integers.
      ValueError: if the batch already has targets, has no tokens, or has a single token. If a numpy
        array has a negative token.

    Example:
      >>> next_token({"tokens": encode("hello")})["targets"].tolist() == encode("ello").tolist()
      True
    """
    tokens = batch.get("tokens", ())
    tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
    if "targets" in batch or not tokens.ndim or tokens.shape[-1] < 2:
        shapes = ", ".join(f"{name} {list(np.shape(value))}" for name, value in batch.items())
        problem = (
            "a batch must have tokens [..., T + 1], T at least 1, and no targets; it has"
            f" {shapes or 'nothing'}."
        )
        raise value_error(problem)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise type_error(f"tokens must be integers, got {tokens.dtype}.")
    if isinstance(tokens, np.ndarray) and tokens.min(initial=0) < 0:
        raise value_error(f"tokens must be ids from 0 on, got {tokens.min()}.")
    return {**batch, "tokens": tokens[..., :-1], "targets": tokens[..., 1:]}


def encode(text: str) -> np.ndarray:
    """Return the UTF-8 bytes of a text as int32 tokens, one token per byte.

    Example:
      >>> encode("hé").tolist()
      [104, 195, 169]
    """
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: ArrayLike) -> str:
    r"""Return the text of byte tokens, with U+FFFD for bytes that are not valid UTF-8.

    Raises:
      ValueError: if a token is not in 0, ..., 255.

    Example:
      >>> decode([104, 195, 169])
      'hé'
    """
    values = np.asarray(tokens)
    if not np.isin(values, np.arange(256)).all():
        problem = f"tokens must be bytes, got {values.min()} to {values.max()}."
        raise ValueError(
            format_error("data.decode", problem, fix="use the tokenizer of the model.")
        )
    return values.astype(np.uint8).tobytes().decode(errors="replace")
