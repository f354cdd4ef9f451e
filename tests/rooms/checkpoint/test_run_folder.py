"""A folder that somebody deletes under the job that writes to it: the next save is refused."""

import errno
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from shardopt.checkpoint import _write as write
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._write import save

pytestmark = pytest.mark.fast

STALE = OSError(errno.ESTALE, "Stale file handle")


def small(value):
    return {"a": jnp.full(4, value)}


def delete(folder):
    shutil.rmtree(folder)


def delete_with_parent(folder):
    shutil.rmtree(folder.parent)


def empty(folder):
    delete(folder)
    folder.mkdir()


def delete_lock_only(folder):
    (folder / ".lock").unlink()


def replace_by_another_run(folder):
    delete(folder)
    save(folder, small(7), step=1)


@pytest.mark.parametrize(
    "remove", [delete, delete_with_parent, empty, delete_lock_only, replace_by_another_run]
)
def test_a_save_is_refused_and_nothing_is_made_when_the_folder_was_deleted(
    remove, tmp_path, complaint_of
):
    folder = tmp_path / "runs" / "a"
    with Checkpoints(folder, 1, 2) as checkpoints:
        checkpoints.save(small(1), step=1)
        checkpoints.wait()
        remove(folder)
        files = sorted(tmp_path.rglob("*"))
        for step in (2, 3):
            assert (
                complaint_of(lambda step=step: checkpoints.save(small(step), step=step))
                == f"Checkpoints: step {step} cannot be saved: {folder} was deleted, replaced or"
                " unmounted while the job ran.\nFix: save to another folder, with a new"
                " Checkpoints."
            )
        assert sorted(tmp_path.rglob("*")) == files
    Checkpoints(folder, 1, 2).close()  # the lock is released


def test_a_save_is_refused_when_the_folder_was_deleted_on_another_machine(
    tmp_path, monkeypatch, complaint_of
):
    """Over NFS a descriptor of a deleted file is stale."""
    folder = tmp_path / "run"
    fstat = os.fstat
    with Checkpoints(folder, 1, 2) as checkpoints, monkeypatch.context() as patch:
        descriptor_of_lock = checkpoints._lock._lock.descriptor

        def stale(descriptor):
            if descriptor == descriptor_of_lock:
                raise STALE
            return fstat(descriptor)

        patch.setattr(os, "fstat", stale)
        assert complaint_of(lambda: checkpoints.save(small(2), step=2)).startswith(
            f"Checkpoints: step 2 cannot be saved: {folder} was deleted, replaced or unmounted"
        )
    error = write.write_error(
        "Checkpoints", folder, 3, ValueError("Error writing\nUNKNOWN: Stale file handle")
    )
    assert (
        str(error)
        == f"Checkpoints: step 3 could not be written to {folder} (ValueError: Error writing"
        " ... Stale file handle).\nFix: somebody deletes files there: end that, or save to"
        " another folder."
    )


def test_a_folder_that_cannot_be_looked_at_is_not_taken_for_deleted(
    tmp_path, monkeypatch, complaint_of, caplog
):
    folder = tmp_path / "run"
    stat = Path.stat

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


@pytest.mark.parametrize("deleted", ["run", "run/.saving-1"])
def test_a_write_fails_once_when_its_files_are_deleted(
    deleted, tmp_path, complaint_of, monkeypatch
):
    folder = tmp_path / "run"
    with Checkpoints(folder, 1, 1) as checkpoints:
        with monkeypatch.context() as patch:
            before(patch, "write_meta", lambda: shutil.rmtree(tmp_path / deleted))
            checkpoints.save(small(1), step=1)
            assert (
                complaint_of(checkpoints.wait)
                == f"Checkpoints: step 1 could not be written to {folder} (FileNotFoundError:"
                f" [Errno 2] No such file or directory: '{folder}/.saving-1/shardopt.json').\nFix:"
                " somebody deletes files there: end that, or save to another folder."
            )
        if folder.exists():
            checkpoints.save(small(2), step=2)
            checkpoints.wait()
            assert sorted(path.name for path in folder.iterdir()) == [".lock", "2"]


def test_what_is_written_into_a_folder_that_was_deleted_is_not_committed(
    tmp_path, complaint_of, monkeypatch
):
    """The writer of arrays makes folders that it misses, but not the files that were in them."""
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
