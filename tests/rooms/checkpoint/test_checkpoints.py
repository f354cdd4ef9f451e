"""`Checkpoints`: when, how many, which, and what happens when a write fails."""

import contextlib
import os
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._read import restore
from shardopt.checkpoint._run_folder import remove_stale
from shardopt.checkpoint._write import save, write_error

UNTOUCHED = "Fix: make room, then save again; checkpoints that were committed before are untouched."


def small(value):
    return {"a": jnp.full(4, value)}


def test_a_checkpoint_is_due_at_each_multiple_of_every(tmp_path):
    with Checkpoints(tmp_path, every=3, keep=1) as checkpoints:
        assert [step for step in range(10) if checkpoints.due(step)] == [3, 6, 9]


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_the_newest_and_the_best_are_kept(mode, best, tmp_path):
    scores = {
        1: 0.5,
        2: jnp.float32(0.1),
        3: np.float64(0.9),
        4: float("nan"),
        5: None,
        6: 0.4,
        7: 0.5,
    }
    with Checkpoints(tmp_path, 1, 2, best="val", mode=mode) as checkpoints:
        for step, score in scores.items():
            metrics = {"loss": step} if score is None else {"val": score}
            checkpoints.save(small(step), step=step, metrics=metrics)
        checkpoints.wait()
        assert checkpoints.steps() == [best, 6, 7]
        assert checkpoints.best_step() == best
        assert checkpoints.latest() == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", str(best), "6", "7"]


def test_of_equals_the_earliest_is_best(tmp_path):
    with Checkpoints(tmp_path, 1, None, best="val") as checkpoints:
        assert checkpoints.best_step() is None
        for step in (1, 2):
            checkpoints.save(small(step), step=step, metrics={"val": 1.0})
        checkpoints.wait()
        assert checkpoints.best_step() == 1


def test_without_a_metric_nothing_is_best(tmp_path):
    with Checkpoints(tmp_path, 1, 1) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(small(1), step=1, metrics={"loss": 1.0})
        checkpoints.wait()
        assert checkpoints.best_step() is None


@pytest.mark.parametrize("damage", ['{"format": 1,\n', None, "[]"])
def test_a_checkpoint_whose_record_cannot_be_read_is_not_the_best_and_is_named(
    damage, tmp_path, caplog
):
    file = tmp_path / "2" / "shardopt.json"
    with Checkpoints(tmp_path, 1, 1, best="val") as checkpoints:
        for step, value in enumerate([3.0, 1.0, 2.0], 1):
            checkpoints.save(small(step), step=step, metrics={"val": value})
            checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        file.unlink() if damage is None else file.write_text(damage)
        checkpoints.save(small(4), step=4, metrics={"val": 9.0})
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best_step()) == ([3, 4], 3)
    (message,) = caplog.messages
    assert message.startswith(f"Checkpoints: step 2 in {tmp_path} is not the best: ")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            ValueError("Encountered 2 errors:\n1. No space left on device\n2. x"),
            "Encountered 2 errors: ... No space left on device",
        ),
        (
            ExceptionGroup("several", [ValueError("x"), OSError(28, "No space left on device")]),
            "several (2 sub-exceptions) ... No space left on device",
        ),
        (OSError(27, "File too large"), "[Errno 27] File too large"),
    ],
)
def test_a_full_disk_is_told_wherever_it_is_said(error, cause, tmp_path):
    wrapped = RuntimeError("the writer failed")
    wrapped.__cause__ = error
    reason = cause.partition("] ")[2] or cause.partition(" ... ")[2]
    for raised, said in (
        (error, f"{type(error).__name__}: {cause}"),
        (wrapped, f"RuntimeError: the writer failed ... {reason}"),
    ):
        assert (
            str(write_error("save", tmp_path, 1, raised))
            == f"save: step 1 could not be written to {tmp_path} ({said}).\n"
            "Fix: make room, then save again; checkpoints that were committed before are untouched."
        )


def test_restore_gives_state_and_extra(tmp_path, trained, same):
    opt, state = trained
    extra = {"position": 3, "iterator": {"epoch": [1, 2.5, None, True, "x"]}}
    with Checkpoints(tmp_path, 1, 2) as checkpoints:
        checkpoints.save(state(), step=3, extra=extra)
        restored, restored_extra = checkpoints.restore(opt)  # without wait: restoring waits
        assert same(restored, state())
        assert restored_extra == extra
        checkpoints.save(state(), step=4)
        assert checkpoints.restore(opt, step=3)[1] == extra
        assert checkpoints.restore(opt)[1] == {}
    with Checkpoints(tmp_path, 1, 2) as later:
        assert later.steps() == [3, 4]
    assert same(restore(tmp_path, opt), state())


def test_saving_a_step_again_replaces_it(tmp_path):
    with Checkpoints(tmp_path, 1, 3) as checkpoints:
        checkpoints.save(small(1), step=5, metrics={"loss": 1.0})
        checkpoints.save(small(2), step=5, metrics={"loss": 2.0})
        checkpoints.wait()
        assert checkpoints.steps() == [5]
    assert '"metrics": {"loss": 2.0}' in (tmp_path / "5" / "shardopt.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "5"]


def test_what_is_saved_is_what_was_there(
    tmp_path, make_opt, new_params, steps_on, same, monkeypatch
):
    """The next steps, which take over the state's buffers, run before the folder for its bytes is
    even made.
    """
    let_go = threading.Event()
    held_back = []
    mkdir = os.mkdir

    def slow(path, *args, **kwargs):
        if "orbax-checkpoint-tmp" in str(path):
            held_back.append(let_go.wait(60))
        return mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", slow)
    opt = make_opt()
    state = steps_on(opt, opt.init(new_params()), 0, 2)
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    with Checkpoints(tmp_path, 1, 2) as checkpoints:
        checkpoints.save(state, step=2)
        state = steps_on(opt, state, 2, 6)
        jax.block_until_ready(state)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        let_go.set()
        assert same(checkpoints.restore(opt)[0], expected)
    assert held_back
    assert all(held_back)
    assert not same(state, expected)


def test_a_fork_of_the_job_neither_saves_nor_waits(tmp_path, monkeypatch, complaint_of):
    """It has neither the lock nor the thread that writes."""
    with Checkpoints(tmp_path, 1, 2) as checkpoints:
        pid = os.getpid()
        pending = Future()
        checkpoints._pending = pending  # which never ends
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 7)
            assert (
                complaint_of(
                    lambda: checkpoints.save(small(1), step=1), so.errors.CheckpointInUseError
                )
                == f"Checkpoints: {tmp_path} is written to by process {pid}, and this one, 7, is a"
                " fork of it.\nFix: write in the process that began to."
            )
            checkpoints._pending = pending
            checkpoints.wait()


def test_two_histories_do_not_mix(tmp_path, complaint_of):
    with Checkpoints(tmp_path, 10, 3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(small(step), step=step)
        assert (
            complaint_of(lambda: checkpoints.save(small(0), step=15))
            == f"Checkpoints: step 15 cannot be saved: {tmp_path} holds later ones (20, 30).\nFix:"
            " delete them if the run was wound back on purpose, or choose another folder: two"
            " histories do not mix."
        )
        assert checkpoints.steps() == [10, 20, 30]


@contextlib.contextmanager
def full_disk():
    """Let the background find no room. (A disk that is really full is met in
    test_killed_writers.py.)
    """

    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardopt.checkpoint._write.digest", no_room)
        yield


@pytest.mark.parametrize(
    "notice", tiered(["wait", "save", "close", "with"], lambda notice: notice == "save")
)
def test_a_failed_write_is_raised_at_the_next_occasion(
    notice, tmp_path, trained, complaint_of, caplog, same
):
    opt, state = trained
    checkpoints = Checkpoints(tmp_path, 1, 1)
    checkpoints.save(state(), step=1)
    checkpoints.wait()
    with full_disk():
        checkpoints.save(state(), step=2)
        assert checkpoints._pending.exception() is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "1",
    ]  # what cannot be finished makes room at once

    def in_a_with():
        with checkpoints:
            pass

    occasions = {
        "wait": checkpoints.wait,
        "save": lambda: checkpoints.save(state(), step=3),
        "close": checkpoints.close,
        "with": in_a_with,
    }
    message = complaint_of(occasions[notice])
    assert (
        message
        == f"Checkpoints: step 2 could not be written to {tmp_path} (OSError: [Errno 28] No space"
        f" left on device).\n{UNTOUCHED}"
    )
    assert message in caplog.text
    assert checkpoints.steps() == [1]
    if notice in ("wait", "save"):  # once there is room, it goes on
        checkpoints.save(state(), step=4)
        checkpoints.wait()
        assert checkpoints.steps() == [4]
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "4"]
    checkpoints.close()
    assert same(restore(tmp_path, opt), state())


def test_a_failed_write_leaves_nothing_where_orbax_still_writes(tmp_path, trained, monkeypatch):
    _, state = trained
    late_writes = [tmp_path / ".saving-2" / "late", tmp_path / ".saving-2" / "later"]

    def remove_stale_while_orbax_writes(directory):
        if late_writes and [*directory.glob(".saving-2*")]:  # else it is before the save
            late_writes.pop().mkdir(parents=True)
            raise OSError(39, "Directory not empty")
        remove_stale(directory)

    module = "shardopt.checkpoint._checkpoints"
    monkeypatch.setattr(f"{module}._REMOVAL_PAUSE", 0)
    monkeypatch.setattr(f"{module}.remove_stale", remove_stale_while_orbax_writes)
    with Checkpoints(tmp_path, 1, 1) as checkpoints, full_disk():
        checkpoints.save(state(), step=2)
        with pytest.raises(so.errors.CheckpointError, match="step 2 could not be written"):
            checkpoints.wait()
    assert late_writes == []
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_failed_write_does_not_hide_the_error_that_ends_the_run(tmp_path, trained):
    _, state = trained

    def run():
        with Checkpoints(tmp_path, 1, 1) as checkpoints, full_disk():
            checkpoints.save(state(), step=2)
            assert checkpoints._pending.exception() is not None
            raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError) as caught:
        run()
    assert caught.value.args == ("first",)
    (note,) = caught.value.__notes__
    assert note.startswith(
        f"Checkpoints: step 2 could not be written to {tmp_path} (OSError: [Errno 28] No space"
    )


def test_save_names_a_full_disk_and_leaves_older_steps(tmp_path, trained, complaint_of, same):
    opt, state = trained
    save(tmp_path, state(), step=1)
    with full_disk():
        assert (
            complaint_of(lambda: save(tmp_path, state(), step=2))
            == f"save: step 2 could not be written to {tmp_path} (OSError: [Errno 28] No space left"
            f" on device).\n{UNTOUCHED}"
        )
    assert same(restore(tmp_path, opt), state())
    save(tmp_path, state(), step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "1", "2"]


def test_a_step_that_cannot_be_deleted_is_reported(tmp_path, complaint_of, monkeypatch):
    def refuse(directory, step):
        raise PermissionError(13, "Permission denied")

    with Checkpoints(tmp_path, 1, 1) as checkpoints:
        checkpoints.save(small(1), step=1)
        checkpoints.wait()
        monkeypatch.setattr("shardopt.checkpoint._checkpoints.discard", refuse)
        checkpoints.save(small(2), step=2)
        assert (
            complaint_of(checkpoints.wait)
            == f"Checkpoints: step 2 was written, but step 1 in {tmp_path} could not be deleted "
            "([Errno 13] Permission denied).\nFix: delete it, or give the job the right to."
        )
        assert checkpoints.steps() == [1, 2]


def test_leftovers_of_killed_writers_go(tmp_path):
    for name in (".saving-3", ".saving-4.orbax-checkpoint-tmp", ".deleting-2"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / ".saving-3.digests-1").write_text("{}")
    (tmp_path / "mine.txt").write_text("stays")
    save(tmp_path, small(1), step=1)
    # killed between the two renames of a replacement
    (tmp_path / "1").rename(tmp_path / ".replaced-1")
    with Checkpoints(tmp_path, 1, 1) as checkpoints:
        assert checkpoints.steps() == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "1", "mine.txt"]


def test_saving_after_close_is_refused(tmp_path, complaint_of):
    checkpoints = Checkpoints(tmp_path, 1, 1)
    checkpoints.close()
    checkpoints.close()
    assert (
        complaint_of(lambda: checkpoints.save(small(1), step=1))
        == "Checkpoints: save was called after close.\nFix: make a new Checkpoints."
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"every": 0}, ValueError, "Checkpoints: every must be at least 1, got 0."),
        ({"every": 1.5}, TypeError, "Checkpoints: every must be an integer, got 1.5 (float)."),
        ({"every": True}, TypeError, "Checkpoints: every must be an integer, got True (bool)."),
        ({"keep": 0}, ValueError, "Checkpoints: keep must be at least 1, got 0."),
        ({"keep": "2"}, TypeError, "Checkpoints: keep must be an integer, got '2' (str)."),
        (
            {"mode": "smallest"},
            ValueError,
            "Checkpoints: mode must be 'min' or 'max', got 'smallest'.",
        ),
        (
            {"directory": None},
            TypeError,
            "Checkpoints: directory must be a path, got NoneType.\nFix: pass a path.",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, kind, message, tmp_path, complaint_of):
    arguments = {"directory": tmp_path / "run", "every": 1, "keep": 1} | arguments
    assert complaint_of(lambda: Checkpoints(**arguments), kind) == message
    assert not (tmp_path / "run").exists()


def test_values_that_cannot_be_stored_are_refused(tmp_path, complaint_of):
    with Checkpoints(tmp_path, 1, 1) as checkpoints:
        assert (
            complaint_of(
                lambda: checkpoints.save(small(1), step=1, extra={"x": np.ones(2)}), TypeError
            )
            == "checkpoint: extra must be JSON (dicts, lists, strings, numbers, true, false, null):"
            " Object of type ndarray is not JSON serializable.\nFix: convert arrays with"
            " .tolist()."
        )
        metrics = {"loss": 1.0, "per_row": jnp.ones(3), "name": "x"}
        assert (
            complaint_of(lambda: checkpoints.save(small(1), step=1, metrics=metrics), TypeError)
            == "checkpoint: metrics must be numbers.\n  per_row: float32[3]\n  name: <U1[]\n"
            "Fix: save scalars only, for instance jnp.mean of them."
        )
        assert checkpoints.steps() == []


def test_it_is_a_value_error():
    assert issubclass(so.errors.CheckpointError, ValueError)


def test_leaving_on_an_error_asks_no_other_process(tmp_path, monkeypatch):
    """The others may be training on: a question to all of them would wait for ever."""

    def run():
        with Checkpoints(tmp_path, every=1, keep=2) as checkpoints:
            checkpoints.save({"w": jnp.ones((4,))}, step=1)
            monkeypatch.setattr(
                "shardopt.checkpoint._checkpoints.raise_together", lambda _: pytest.fail("asked")
            )
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert Checkpoints(tmp_path, every=1, keep=2).latest() == 1
