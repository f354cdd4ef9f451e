"""The stable names have the signatures of the last release, or the changelog says that they
changed.
"""

import importlib.util
import re

import pytest
from support.paths import ROOT

import shardopt as so

pytestmark = pytest.mark.fast

SPEC = importlib.util.spec_from_file_location("stable_names", ROOT / ".ci" / "stable_names.py")
stable_names = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stable_names)

TEXT = (ROOT / ".ci" / "stable_names.txt").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


RENAMES = "Old name, new name"
"""The section of a release with a table of the names that changed."""


def test_the_changelog_names_every_changed_signature():
    assert stable_names.untold(TEXT, CHANGELOG) == []


def test_the_changelog_has_a_part_for_the_next_release():
    assert CHANGELOG.count("\n## Unreleased\n") == 1, (
        "after a merge: take main's CHANGELOG.md, add your line again"
    )


def test_a_release_takes_at_most_three_screens():
    # the table of names is to look things up in, not to read
    text = re.sub(rf"\n### {RENAMES}\n.*?(?=\n##)", "", CHANGELOG, flags=re.DOTALL)
    parts = text.split("\n## ")[1:]
    assert max(len(part.splitlines()) for part in parts) <= 150, (
        "after a merge: take main's, add your line again"
    )
    titles = {line for line in CHANGELOG.splitlines() if line.startswith("### ")}
    assert titles <= {
        f"### {title}"
        for title in (RENAMES, "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    }


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("so.make_mesh(data=-1", "so.make_mesh(data=1", "make_mesh"),
        ("so.fit(opt, state, batches, *, num_steps", "so.fit(opt, state, batches, *, steps", "fit"),
        (
            "so.ShardedOptimizer.step(state, batch)",
            "so.ShardedOptimizer.step(batch, state)",
            "ShardedOptimizer.step",
        ),
        (
            "so.errors.CheckpointError: ValueError",
            "so.errors.CheckpointError: OSError",
            "errors.CheckpointError",
        ),
        ("so.replace(", "so.set_params(state, values)\nso.replace(", "set_params"),
    ],
)
def test_a_change_needs_a_line_of_the_changelog(old, new, name):
    text = TEXT.replace(old, new)
    assert text != TEXT
    assert name in stable_names.changed(text)
    before = "# Changes\n\n## Unreleased\n\n- `so.fsdp` is faster.\n\n## 0.1.0\n\n"
    assert name in stable_names.untold(text, f"{before}- `so.{name}` is new.\n")
    assert name not in stable_names.untold(text, before.replace("so.fsdp", f"so.{name}"))


def test_every_strategy_is_stable():
    assert {"ddp", "zero", "fsdp", "hybrid", "local_sgd", "diloco"} <= set(
        stable_names.names_of(TEXT)
    )


def test_a_signature_is_the_same_in_every_process():
    assert " at 0x" not in TEXT
    assert stable_names.signatures(["make_mesh"]) == {
        "make_mesh": (
            "(data=-1, tensor=1, pipeline=1, *, replica=1, context=1, expert=1, devices=None)"
        )
    }
    assert set(stable_names.signatures(["ShardedOptimizer"])) >= {
        f"ShardedOptimizer.{name}" for name in ("init", "step")
    }
    assert not hasattr(so, "set_params")
