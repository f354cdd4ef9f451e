"""A folder that somebody deletes under the job that writes to it: made again where that can only be
right.
"""

import errno
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from shardopt.checkpoint import _write as write
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._run_folder import FilesGoneError
from shardopt.checkpoint._write import save
from shardopt.core import CheckpointError, CheckpointInUseError

pytestmark = pytest.mark.fast

STALE = OSError(errno.ESTALE, "Stale file handle")


def small(value):
    return {"a": jnp.full(4, value)}


@pytest.mark.parametrize("remains", ["nothing", "an empty folder", "no folder above it"])
def test_a_folder_deleted_under_the_job_is_made_again(remains, tmp_path, caplog):
    folder = tmp_path / "runs" / "a"
    with Checkpoints(folder, 1, 2) as checkpoints:
        checkpoints.save(small(1), step=1)
        checkpoints.wait()
        shutil.rmtree(folder.parent if remains == "no folder above it" else folder)
        if remains == "an empty folder":
            folder.mkdir()
        checkpoints.save(small(2), step=2)
        checkpoints.save(small(3), step=3)
    assert caplog.messages == [
        f"Checkpoints: {folder} was deleted while the job ran. It is made again for step 2;"
        " checkpoints before it are gone."
    ]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "2", "3"]
    Checkpoints(folder, 1, 2).close()  # both locks are released


def test_a_folder_made_again_is_locked_as_the_first_was(tmp_path, complaint_of):
    folder = tmp_path / "run"
    with Checkpoints(folder, 1, 2) as checkpoints:
        shutil.rmtree(folder)
        checkpoints.save(small(2), step=2)
        assert complaint_of(lambda: Checkpoints(folder, 1, 2), CheckpointInUseError).startswith(
            f"Checkpoints: {folder} is already being written to by this very process, since "
        )


def test_a_folder_replaced_by_another_job_is_left_to_it(tmp_path, complaint_of):
    folder = tmp_path / "run"
    with Checkpoints(folder, 1, 2) as checkpoints:
        checkpoints.save(small(1), step=1)
        checkpoints.wait()
        shutil.rmtree(folder)
        save(folder, small(7), step=1)
        assert (
            complaint_of(lambda: checkpoints.save(small(2), step=2))
            == f"Checkpoints: step 2 cannot be saved: {folder} was replaced while the job ran, by"
            " one with other checkpoints.\nFix: bring it back, or make a new Checkpoints"
            " elsewhere."
        )
        shutil.rmtree(folder)
        with Checkpoints(folder, 1, 2):
            assert complaint_of(
                lambda: checkpoints.save(small(2), step=2), CheckpointInUseError
            ).startswith(
                f"Checkpoints: {folder} is already being written to by this very process, since "
            )


def test_a_folder_that_is_no_longer_mounted_is_not_made_again_beneath(tmp_path, complaint_of):
    folder = tmp_path / "mount" / "runs" / "a"
    with Checkpoints(folder, 1, 2) as checkpoints:
        checkpoints._lock._device = -1  # as if it had been on another file system
        shutil.rmtree(folder.parent)
        assert (
            complaint_of(lambda: checkpoints.save(small(2), step=2))
            == f"Checkpoints: step 2 cannot be saved: {folder} is gone, and {tmp_path / 'mount'} is"
            " on another file system than it was: was it unmounted?\nFix: bring it back, or"
            " make a new Checkpoints elsewhere."
        )
        assert list((tmp_path / "mount").iterdir()) == []


@pytest.mark.parametrize("remains", ["nothing", "a folder with checkpoints"])
def test_a_folder_deleted_on_another_machine(remains, tmp_path, monkeypatch, complaint_of, caplog):
    """Over NFS what a descriptor stands for is then stale, and so it may be what is looked up by
    name.
    """
    folder, fstat, stat = tmp_path / "run", os.fstat, Path.stat
    with Checkpoints(folder, 1, 2) as checkpoints, monkeypatch.context() as patch:
        checkpoints.save(small(1), step=1)
        checkpoints.wait()
        stale = {checkpoints._lock._folder, checkpoints._lock._lock.descriptor}
        patch.setattr(
            os,
            "fstat",
            lambda descriptor: (
                (_ for _ in ()).throw(STALE) if descriptor in stale else fstat(descriptor)
            ),
        )
        if remains == "nothing":
            shutil.rmtree(folder)
            checkpoints.save(small(2), step=2)
            assert (
                f"{folder} was deleted while the job ran. It is made again for step 2"
                in caplog.text
            )
        else:
            assert (
                complaint_of(lambda: checkpoints.save(small(2), step=2))
                == f"Checkpoints: step 2 cannot be saved: {folder} was replaced while the job ran,"
                " by one with other checkpoints.\nFix: bring it back, or make a new Checkpoints"
                " elsewhere."
            )
        patch.setattr(
            Path,
            "stat",
            lambda path, **how: (
                (_ for _ in ()).throw(STALE) if path == folder else stat(path, **how)
            ),
        )
        error = write.write_error(
            "Checkpoints", folder, 3, ValueError("Error writing\nUNKNOWN: Stale file handle")
        )
        assert (
            str(error)
            == f"Checkpoints: step 3 could not be written to {folder} (ValueError: Error writing"
            f" ... Stale file handle).\nFix: {folder} was deleted, with what was in it; save"
            " again, and it is made again."
        )
        assert isinstance(error, FilesGoneError)


def test_a_folder_that_cannot_be_looked_at_is_not_taken_for_deleted(
    tmp_path, monkeypatch, complaint_of, caplog
):
    folder, stat = tmp_path / "run", Path.stat

    def refuse(path, **how):
        if path == folder / ".lock":
            raise PermissionError(13, "Permission denied")
        return stat(path, **how)

    with Checkpoints(folder, 1, 2) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", refuse)
            assert (
                complaint_of(lambda: checkpoints.save(small(1), step=1))
                == f"Checkpoints: step 1 could not be written to {folder} (PermissionError: [Errno"
                " 13] Permission denied).\nFix: remove the cause, then save again; checkpoints"
                " that were committed before are untouched."
            )
        checkpoints.save(small(1), step=1)
    assert caplog.messages == []


def before(patch, name, action):
    """Let something happen before a function of the module that writes is called."""
    original = getattr(write, name)
    patch.setattr(write, name, lambda *args: (action(), original(*args)))


def test_a_folder_deleted_while_a_write_is_under_way(tmp_path, complaint_of, monkeypatch):
    folder = tmp_path / "run"
    with Checkpoints(folder, 1, 1) as checkpoints:
        before(monkeypatch, "write_meta", lambda: shutil.rmtree(folder))
        checkpoints.save(small(1), step=1)
        assert (
            complaint_of(checkpoints.wait, FilesGoneError)
            == f"Checkpoints: step 1 could not be written to {folder} (FileNotFoundError: [Errno 2]"
            f" No such file or directory: '{folder}/.saving-1/shardopt.json').\nFix: {folder}"
            " was deleted, with what was in it; save again, and it is made again."
        )


def test_a_folder_deleted_during_a_write_is_made_again_by_the_next_save(
    tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "run"
    with Checkpoints(folder, 1, 2) as checkpoints:
        with monkeypatch.context() as patch:
            before(patch, "write_meta", lambda: shutil.rmtree(folder))
            checkpoints.save(small(1), step=1)
            assert checkpoints._pending.exception() is not None
        checkpoints.save(small(2), step=2)
    assert [message.split("\n")[0].split(" (")[0] for message in caplog.messages] == [
        f"Checkpoints: step 1 could not be written to {folder}",
        (
            f"Checkpoints: {folder} was deleted while the job ran. It is made again for step 2;"
            " checkpoints before it are gone."
        ),
    ]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "2"]


def test_what_is_written_into_a_folder_that_was_deleted_is_not_committed(
    tmp_path, complaint_of, monkeypatch
):
    """The writer of arrays makes folders that it misses, without what was in them."""
    folder = tmp_path / "run"
    for checkpoints, step in ((Checkpoints(folder, 1, 2), 1), (None, 2)):
        with monkeypatch.context() as patch:
            before(patch, "write_manifest", (folder / ".lock").unlink)
            if checkpoints is not None:
                checkpoints.save(small(step), step=step)
                message = complaint_of(checkpoints.close)
            else:
                message = complaint_of(lambda step=step: save(folder, small(step), step=step))
        assert message.split("\n")[0].endswith(
            f": step {step} could not be written to {folder} (OSError: the folder was deleted or"
            " replaced meanwhile)."
        )
        assert not (folder / str(step)).exists()


def test_files_that_vanish_before_the_lock_does_are_a_deletion_too(tmp_path, monkeypatch):
    """To delete a large folder takes a while, and the lock may be the last to go."""
    folder = tmp_path / "run"
    with Checkpoints(folder, 1, 2) as checkpoints:
        with monkeypatch.context() as patch:
            before(patch, "write_meta", lambda: shutil.rmtree(folder / ".saving-1"))
            checkpoints.save(small(1), step=1)
            assert checkpoints._pending.exception() is not None
        checkpoints.save(small(2), step=2)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "2"]


@pytest.mark.parametrize(("kind", "tries"), [(FilesGoneError, 5), (CheckpointError, 1)])
def test_what_is_being_deleted_is_tried_again_and_other_errors_are_not(
    kind, tries, tmp_path, monkeypatch
):
    monkeypatch.setattr("shardopt.checkpoint._checkpoints._RETRY_SECONDS", 0)
    tried = []

    def fail(step):
        tried.append(step)
        if len(tried) <= failures:
            raise kind("it failed")
        return False

    with Checkpoints(tmp_path, 1, 2) as checkpoints:
        monkeypatch.setattr(checkpoints, "_make_ready", fail)
        failures = 9
        with pytest.raises(kind, match="it failed"):
            checkpoints._prepare(1)
        assert tried == [1] * tries
        tried.clear()
        failures = tries - 1
        assert checkpoints._prepare(2) is False


def test_a_folder_that_is_only_half_deleted_is_gone_on_with(tmp_path, caplog):
    """A step that was committed while the rest was being deleted stays behind."""
    folder = tmp_path / "run"
    with Checkpoints(folder, 1, 2) as checkpoints:
        checkpoints.save(small(1), step=1)
        checkpoints.wait()
        (folder / ".lock").unlink()
        checkpoints.save(small(2), step=2)
    assert "It is made again for step 2" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "1", "2"]
