"""Which files make up a corpus, in an order that depends on nothing but their paths."""

import os
from collections.abc import Iterator
from pathlib import Path

_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
"""Left out of the standard library: what was installed beside it, tests, and generated tables.

The tables are near copies of each other: split between training and validation they would leak.
"""


def python_sources() -> tuple[Path, list[Path]]:
    """Return the folder of the Python standard library and its own source files."""
    root = Path(os.__file__).parent
    return root, [path for path in _walk(root, skip=_NOT_LIBRARY) if path.suffix == ".py"]


def text_files(root: Path) -> list[Path]:
    """Return the file itself, or the text files below a folder: neither hidden nor binary."""
    if not root.is_dir():
        return [root]
    return [path for path in _walk(root, skip={"__pycache__"}) if not _is_binary(path)]


def _walk(root: Path, skip: frozenset[str] | set[str]) -> Iterator[Path]:
    """Yield the files below a folder in the order of their paths; symbolic links to folders are not followed."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # By parts, as strings: how paths compare differs between systems.
    yield from sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).parts)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(8192)
