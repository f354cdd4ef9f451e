"""Files that are there whole or not at all."""

import contextlib
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file in the place of what it was: a kill or a full disk leaves it as it was before.

    Raises:
      OSError: if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
