"""An operation of a loss in words: its name, and its line in the user's code."""

import linecache
import os
from pathlib import Path

from jax._src import source_info_util

from shardopt.separability._relations import Operation

_HERE = Path(__file__).parent


def operation_line(op: Operation) -> str:
    """Return `reduce_sum at loss.py:12 (clip): its source`."""
    frame = _user_frame(op)
    if frame is None:
        return operation_name(op)
    text = linecache.getline(frame.file_name, frame.start_line).strip()
    return operation_name(op) + (f": {text}" if text else "")


def operation_name(op: Operation | None) -> str:
    """Return `reduce_sum at loss.py:12 (clip)`."""
    if op is None:
        return ""
    frame = _user_frame(op)
    if frame is None:
        return op.eqn.primitive.name
    relative = os.path.relpath(frame.file_name)
    name = frame.file_name if relative.startswith("..") else relative
    return f"{op.eqn.primitive.name} at {name}:{frame.start_line} ({frame.function_name})"


def _user_frame(op: Operation) -> source_info_util.Frame | None:
    """Return the innermost frame of the user's code.

    If there is none, the innermost frame of a library.

    jax caches the traces of its own functions, and these have no frame of the caller. So the
    callers are searched too.
    """
    frames = [
        frame
        for eqn in (op.eqn, *reversed(op.callers))
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
    ]
    return next(
        (frame for frame in frames if not _of_a_library(frame.file_name)), next(iter(frames), None)
    )


def _of_a_library(path: str) -> bool:
    return "site-packages" in path or path.startswith(
        (f"{_HERE.parent / 'nn'}{os.sep}", f"{_HERE}{os.sep}")
    )
