"""Read from compiled text which line of the user's program an instruction comes from."""

import re

from shardopt.hlo._hlo_text import Instruction

Frames = dict[str, str]
"""Frame id to "file:line"."""


def read_frames(text: str) -> Frames:
    """Return the "file:line" of every stack frame, from the tables that XLA writes before a
    program.

    Example:
      >>> tables = '''FileNames
      ... 1 "/home/me/model.py"
      ...
      ... FileLocations
      ... 1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}
      ...
      ... StackFrames
      ... 3 {file_location_id=1 parent_frame_id=1}
      ... '''
      >>> read_frames(tables)
      {'3': '/home/me/model.py:7'}
    """
    files = dict(_FILE.findall(_table(text, "FileNames")))
    locations = {
        location: f"{files.get(file, '?')}:{line}"
        for location, file, line in _LOCATION.findall(_table(text, "FileLocations"))
    }
    return {
        frame: locations[location]
        for frame, location in _FRAME.findall(_table(text, "StackFrames"))
        if location in locations
    }


def source_of(instruction: Instruction, frames: Frames) -> str:
    """Return "file:line" of an instruction, or ""."""
    frame_id = _FRAME_ID.search(instruction.arguments)
    return frames.get(frame_id[1], "") if frame_id else ""


def op_name_of(instruction: Instruction) -> str:
    """Return the name of an instruction in jax, such as "jit(step)/dot_general".

    "" if it is unknown.
    """
    match = _OP_NAME.search(instruction.arguments)
    return match[1] if match else ""


def _table(text: str, title: str) -> str:
    """Return the lines under a title, up to an empty line."""
    match = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    return match[1] if match else ""


_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.MULTILINE)
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
