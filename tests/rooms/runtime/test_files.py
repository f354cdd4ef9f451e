"""A file is written whole or stays as it was."""

import errno
from pathlib import Path

import pytest

from shardopt.runtime._files import write_atomic

pytestmark = pytest.mark.fast


def test_a_file_is_replaced(tmp_path):
    file = tmp_path / "a.json"
    for text in ("first", "second\n"):
        write_atomic(file, text)
        assert file.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_on_a_full_disk_it_is_as_it_was_and_takes_no_room(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_text("first")
    write = Path.write_text

    def cut_short(path, text):
        write(path, text[:3])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(OSError, match="No space left on device"):
        write_atomic(file, "second")
    assert file.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
