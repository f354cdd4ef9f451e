"""Two `shardopt train` with one run folder: the second is refused, and has changed nothing of the
first's.
"""

import errno
import pathlib

import pytest

import shardopt as so
from shardopt.cli import main


@pytest.mark.slow
def test_a_second_run_leaves_the_options_of_the_first_alone(tiny, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("the first's")
    with so.Checkpoints(folder / "checkpoints", every=1, keep=1):
        assert main([*tiny, "--steps", "2", "--mesh", "data=8", "--run-dir", str(folder)]) == 2
    assert (
        f"error: Checkpoints: {folder}/checkpoints is already being written to by this very process"
        in (capsys.readouterr().err)
    )
    assert (folder / "config.json").read_text() == "the first's"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.json"]


def test_a_full_disk_leaves_the_options_as_they_were(tmp_path, monkeypatch):
    from shardopt.cli._options import FolderOptions, TrainOptions
    from shardopt.cli._run_folder import read_options, write_options

    options = TrainOptions(run=FolderOptions(run_dir=tmp_path))
    write_options(options, 7)

    def half(path, text):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        write_options(options, 8)
    assert read_options(tmp_path).model == options.model
