"""Documents as tokens, read from a file of JSON lines."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from shardopt.core import calling, plural, value_error
from shardopt.data._corpus import Batch


@calling("data.read_tokens")
def read_tokens(path: str | os.PathLike[str], *, vocab_size: int) -> list[Batch]:
    r"""Read documents for `pack` from a file of JSON lines; empty lines are skipped.

    A line is `{"tokens": [5, 6, 7], "weights": [0, 1, 1]}`: token ids, and the weight of each in
    the loss. For a conversation, the tokens of the assistant have weight 1, the others 0.

    Args:
      path: the file.
      vocab_size: token ids that the model knows.

    Returns:
      A dict for each line: "tokens", int32 [n], and "weights", float32 [n].

    Raises:
      OSError: if the file cannot be read.
      ValueError: if a line has another form, a token that the model does not know, or no weight
        after its first token; the message names the lines.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "tokens.jsonl")
      >>> _ = path.write_text('{"tokens": [5, 6, 7], "weights": [0, 1, 1]}\n')
      >>> read_tokens(path, vocab_size=10)[0]["tokens"].tolist()
      [5, 6, 7]
    """
    documents = []
    problems = []
    with Path(path).open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                documents.append(_document(line, vocab_size))
            except (ValueError, RecursionError, OverflowError) as error:
                problems.append(f"line {number}: {error}")
    if problems:
        problem = f"{plural(len(problems), 'line')} of {path} cannot be used."
        fix = 'write {"tokens": [...], "weights": [...]} in each line.'
        raise value_error(problem, problems, fix)
    if not documents:
        raise value_error(f"{path} has no documents.", fix="write one in each line.")
    return documents


def _document(line: str, vocab_size: int) -> Batch:
    """Return the document of a line.

    Raises:
      ValueError: if the line has another form.
    """
    row = json.loads(line)
    if not isinstance(row, dict) or row.keys() != {"tokens", "weights"}:
        raise ValueError("must be an object with 'tokens' and 'weights' alone")
    tokens = _numbers(row, "tokens")
    with np.errstate(over="ignore"):  # a weight beyond float32 is infinite
        weights = _numbers(row, "weights").astype(np.float32)
    if tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"'tokens' must be integers from 0 to {vocab_size - 1}")
    if weights.shape != tokens.shape:
        raise ValueError(f"has {plural(len(tokens), 'token')} and {plural(len(weights), 'weight')}")
    if not np.isfinite(weights).all() or weights.min() < 0 or not weights[1:].any():
        raise ValueError("'weights' must be from 0 on, and some after the first one above 0")
    return {"tokens": tokens.astype(np.int32), "weights": weights}


def _numbers(row: dict[str, Any], name: str) -> np.ndarray:
    values = row[name]
    is_list = isinstance(values, list) and len(values) > 0
    if not is_list or not all(type(value) in (int, float) for value in values):
        raise ValueError(f"{name!r} must be a list of numbers")
    return np.asarray(values)
