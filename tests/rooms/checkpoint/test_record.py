"""A checkpoint with a changed, cut or missing file is never loaded, and the file is named."""

import json
import shutil

import jax
import numpy as np
import pytest

import shardopt as so
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._read import restore
from shardopt.checkpoint._write import save

pytestmark = pytest.mark.fast


@pytest.fixture
def damage_of(complaint_of):
    """Return a function that calls an action that must find damage, and returns its whole message."""
    return lambda action: complaint_of(action, so.errors.DamagedCheckpointError)


@pytest.fixture(scope="module")
def intact_run(tmp_path_factory, trained):
    """Return a folder with steps 1, 2 and 3."""
    folder, (_, state) = tmp_path_factory.mktemp("whole"), trained
    for step in (1, 2, 3):
        save(folder, state(), step=step)
    return folder


@pytest.fixture
def run(intact_run, tmp_path):
    """Return a copy of the folder to spoil."""
    return shutil.copytree(intact_run, tmp_path / "run")


def find(step_folder, kind):
    """Return one file of each kind in a checkpoint."""
    patterns = {
        "manifest": "MANIFEST.json",
        "record": "shardopt.json",
        "tree": "state/_METADATA",
        "sharding": "state/_sharding",
        "index": "state/manifest.ocdbt",
        "data": "state/ocdbt.process_0/d/*",
        "merged data": "state/d/*",
        "step metadata": "_CHECKPOINT_METADATA",
        "commit": "state/commit_success.txt",
    }
    return max(step_folder.glob(patterns[kind]), key=lambda path: path.stat().st_size)


KINDS = [
    "manifest",
    "record",
    "tree",
    "sharding",
    "index",
    "data",
    "merged data",
    "step metadata",
    "commit",
]
REMEDY = (
    "Fix: bring the files back from a copy, or go back to step {back}, which is intact (pass"
    " step={back}, or delete {run}/3)."
)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return "its bytes are not those that were written"


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    return f"{len(data) - 1} bytes, {len(data)} were written"


def grow(path):
    data = path.read_bytes()
    path.write_bytes(data + b" ")
    return f"{len(data) + 1} bytes, {len(data)} were written"


def delete(path):
    path.unlink()
    return "missing"


@pytest.mark.parametrize("damage", [flip, cut, grow, delete])
@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_to_every_kind_of_file_is_named(kind, damage, run, trained, damage_of):
    victim = find(run / "3", kind)
    reason = damage(victim)
    if kind == "manifest" and damage is not delete:
        # The manifest knows only that its own text has changed. It may not even be JSON any more.
        reason = "(its bytes are not those that were written|cannot be read)"
    message = damage_of(lambda: restore(run, trained[0]))
    lines = message.split("\n")
    assert lines[0] == f"restore: step 3 in {run} is damaged."
    name = f"  {victim.relative_to(run)}: "
    assert lines[1].startswith(name)
    cause = lines[1].removeprefix(name).split(" (")[0]
    assert cause in reason
    assert lines[2:] == [REMEDY.format(run=run, back=2)]


def test_all_damage_is_listed_and_the_older_whole_step_is_found(run, trained, damage_of, same):
    opt, state = trained
    data = find(run / "3", "data")
    record = find(run / "3", "record")
    flip(data)
    record.unlink()
    cut(find(run / "2", "index"))
    with Checkpoints(run, 1, 3) as checkpoints:
        message = damage_of(lambda: checkpoints.restore(opt))
    assert (
        message == f"Checkpoints: step 3 in {run} is damaged.\n  3/shardopt.json:"
        f" missing\n{REMEDY.format(run=run, back=1)}"
    )
    assert same(restore(run, opt, step=1), state())


def test_an_explicit_step_is_checked_as_well(run, trained, damage_of):
    cut(find(run / "1", "record"))
    assert damage_of(lambda: restore(run, trained[0], step=1)).endswith(
        "\nFix: bring the files back from a copy; no earlier step is intact."
    )


def test_nothing_is_read_from_a_damaged_record(run, trained, damage_of, monkeypatch):
    flip(find(run / "3", "record"))
    flip(find(run / "3", "data"))
    monkeypatch.setattr("shardopt.checkpoint._store.read_arrays", None)
    monkeypatch.setattr("shardopt.checkpoint._read.read_meta", None)
    lines = damage_of(lambda: restore(run, trained[0])).split("\n")
    assert lines[0] == f"restore: step 3 in {run} is damaged."
    assert len(lines) == 4  # both files are named


@pytest.mark.parametrize("can_read", [True, False])
def test_no_state_is_returned_from_damaged_arrays(can_read, run, trained, damage_of, monkeypatch):
    flip(find(run / "3", "data"))
    monkeypatch.setattr("shardopt.checkpoint._record.SMALL_BYTES", 0)
    asked = []

    def read_arrays(folder, target):
        asked.append(folder)
        if not can_read:
            raise ValueError("invalid chunk")
        return target

    monkeypatch.setattr("shardopt.checkpoint._store.read_arrays", read_arrays)
    lines = damage_of(lambda: restore(run, trained[0])).split("\n")
    assert asked == [run / "3"]
    assert lines[0] == f"restore: step 3 in {run} is damaged."


def test_a_forged_manifest_is_noticed(run, trained, damage_of):
    path = find(run / "3", "manifest")
    body = json.loads(path.read_text())
    del body["manifest"]["files"]["state/_METADATA"]
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    assert (
        damage_of(lambda: restore(run, trained[0]))
        == f"restore: step 3 in {run} is damaged.\n  3/MANIFEST.json: its bytes are not those that"
        f" were written\n{REMEDY.format(run=run, back=2)}"
    )


def test_files_that_others_put_there_do_no_harm(run, trained, same):
    opt, state = trained
    (run / "3" / ".DS_Store").write_text("finder was here")
    (run / "3" / "state" / "notes.txt").write_text("so was I")
    assert same(restore(run, opt), state())


def test_a_checkpoint_of_a_newer_format_says_so(run, trained, complaint_of):
    from shardopt.checkpoint._record import digest, file_sizes, write_manifest

    record = find(run / "3", "record")
    record.write_text(record.read_text().replace('"format": 1', '"format": 2'))
    write_manifest(run / "3", {name: digest(run / "3" / name) for name in file_sizes(run / "3")})
    assert (
        complaint_of(lambda: restore(run, trained[0]))
        == "restore: 3/shardopt.json has format 2, this version of shardopt reads 1.\n"
        "Fix: use the version of shardopt that wrote it, or a newer one."
    )


def test_random_flips_anywhere_are_found(run, trained, damage_of):
    """Thirty flips at random places of random files, weighted by nothing: each is found."""
    draw = np.random.default_rng(0)
    files = sorted(path for path in (run / "3").rglob("*") if path.is_file())
    for _ in range(30):
        victim = files[draw.integers(len(files))]
        before = victim.read_bytes()
        data = bytearray(before)
        data[draw.integers(len(data))] ^= 1 << int(draw.integers(8))
        victim.write_bytes(data)
        assert f"  {victim.relative_to(run)}: " in damage_of(lambda: restore(run, trained[0]))
        victim.write_bytes(before)
    assert jax.tree.leaves(restore(run, trained[0]))
