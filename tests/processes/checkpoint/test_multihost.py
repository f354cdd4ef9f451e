"""Two processes over gloo save and restore together, agree on errors, and share checkpoints with
one process.
"""

import json

import jax
import numpy as np
import pytest
from processes.checkpoint import worker
from support.processes import run_processes

from shardopt.checkpoint._read import restore
from shardopt.checkpoint._write import save

pytestmark = pytest.mark.slow  # two processes

UNTOUCHED = "checkpoints that were committed before are untouched."


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, what process 0 found, what process 1 found)."""
    folder = tmp_path_factory.mktemp("processes")
    opt = four_devices()
    state = worker.run(opt, opt.init(worker.make_params()), 0, 2)
    save(folder / "alone", state)
    return folder, *(json.loads(said.last) for said in run_processes(worker.__file__, 2, folder))


def four_devices():
    """The workers' mesh in this process."""
    import optax

    import shardopt as so

    mesh = so.make_mesh(data=4, devices=jax.devices()[:4])
    return so.fsdp(optax.adamw(1e-2), mesh, worker.loss_fn, min_shard_elements=1)


def test_one_process_goes_on_where_two_were_and_they_where_it_was(run, same):
    folder, _, _ = run
    opt = four_devices()
    restored = restore(folder / "run", opt, step=7)
    expected = worker.run(opt, restore(folder / "alone", opt), 2, 7)
    for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(other), rtol=2e-5, atol=2e-6)


def test_each_process_holds_only_its_shards(run):
    assert [outcome["held"] for outcome in run[1:]] == [16 * 32 / 2, 16 * 32 / 2]


def test_both_processes_see_the_same(run):
    folder, first, second = run
    for outcome in (first, second):
        assert outcome["exchanged"] == [[3, 4], [510, 511], [0, 4000]]
        assert outcome["again"] == [True, {"position": 7}, [5, 6, 7]]
        assert outcome["moved"] is True
        assert outcome["new chain"] == [True, True, True, [7, 0, 0], True]
        assert outcome["left"] == [5, 6, 7]
    kind, message = first["spoiled"]
    damaged = message.split("\n")
    assert damaged[0] == f"restore: step 2 in {folder}/spoiled is damaged."
    assert len(damaged) == 7
    assert all(
        ": its bytes are not those that were written (SHA-256 " in line for line in damaged[1:-1]
    )
    assert (
        damaged[-1]
        == "Fix: bring the files back from a copy, or go back to step 1, which is intact (pass"
        f" step=1, or delete {folder}/spoiled/2)."
    )
    assert kind == "DamagedCheckpointError"
    assert [first[key][0] for key in ("nowhere", "second writer")] == [
        "StepNotFoundError",
        "CheckpointInUseError",
    ]
    for key in ("spoiled", "nowhere", "second writer"):
        assert first[key] == second[key]


def test_a_failure_in_one_process_is_heard_in_both(run):
    folder, first, second = run
    prefix = f"Checkpoints: step 8 could not be written to {folder}/run"
    assert second["failed write"][1].startswith(
        f"{prefix} (OSError: [Errno 5] Input/output error).\n"
    )
    assert first["failed write"][1].startswith(
        f"{prefix} (OSError: process 1 failed; its message has the reason).\n"
    )


def test_a_failure_of_orbax_in_one_process_does_not_let_the_other_wait(run):
    """It would wait for twenty minutes, in a barrier of its own."""
    folder, first, second = run
    prefix = f"Checkpoints: step 1 could not be written to {folder}/failing"
    kind = "CheckpointError"
    full_disk_error = [
        kind,
        (
            f"{prefix} (OSError: [Errno 28] No space left on device).\nFix: make room, then save"
            f" again; {UNTOUCHED}"
        ),
    ]
    peer_errors = [
        [
            kind,
            (
                f"{prefix} (OSError: process {failed_rank} failed; its message has the reason).\nFix: remove"
                f" the cause, then save again; {UNTOUCHED}"
            ),
        ]
        for failed_rank in range(2)
    ]
    assert first["writers"] == [full_disk_error, peer_errors[1], peer_errors[1], [], [2]]
    assert second["writers"] == [peer_errors[0], full_disk_error, full_disk_error, [], [2]]
