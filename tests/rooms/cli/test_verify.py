"""`shardopt verify`: its table, its JSON, its exit codes, and its refusals.

It works without the packages of the extra too.
"""

import json
import re

import pytest

from shardopt import cli
from shardopt.cli import main
from shardopt.verify import Measurement, NotRun, Row

pytestmark = pytest.mark.fast

ROWS = [
    Row("training", "fsdp", lambda devices: Measurement(True, "1e-7 of 1e-4", {"tolerance": 1e-4})),
    Row("training", "ddp", lambda devices: Measurement(False, "2e-1 of 1e-4", {})),
    Row(
        "kernels",
        "cudnn",
        lambda devices: (_ for _ in ()).throw(NotRun("not on this platform", "it needs gpu")),
    ),
]


@pytest.fixture(params=["with extras", "without extras"])
def verify(request, monkeypatch, tmp_path):
    """Return a function that runs the command on the rows above."""
    monkeypatch.setattr("shardopt.verify.all_rows", lambda devices: ROWS)
    monkeypatch.chdir(tmp_path)
    if request.param == "without extras":

        def refuse(module, *, extra):
            raise ModuleNotFoundError(f"{module} is needed")

        monkeypatch.setattr(cli, "require", refuse)
    return lambda *words: main(["verify", *words])


def test_it_prints_every_row_writes_json_and_returns_one_for_a_failure(verify, capsys, tmp_path):
    assert verify("--output", "all.json") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 x cpu, 1 process, jax ")
    assert [re.split(r"  +", line.strip()) for line in lines[1:5]] == [
        ["status", "group", "row", "measured"],
        ["passed", "training", "fsdp", "1e-7 of 1e-4"],
        ["failed", "training", "ddp", "2e-1 of 1e-4"],
        ["not on this platform", "kernels", "cudnn", "it needs gpu"],
    ]
    assert re.fullmatch(
        r"1 passed, 1 failed, 1 not on this platform; \d+ s; exit code 1; all\.json", lines[5]
    )
    written = json.loads((tmp_path / "all.json").read_text())
    assert (written["exit_code"], [row["status"] for row in written["rows"]]) == (
        1,
        ["passed", "failed", "not on this platform"],
    )
    assert {"python", "jax", "jaxlib", "optax", "numpy"} <= written["versions"].keys()


def test_some_rows_can_be_chosen(verify, tmp_path):
    assert verify("--only", "training: fsdp") == 0
    assert [row["name"] for row in json.loads((tmp_path / "verify.json").read_text())["rows"]] == [
        "fsdp"
    ]


def test_a_tiny_limit_is_told_from_a_failure_in_one_line(verify, capsys):
    assert verify("--minutes", "1e-9") == 3
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()[2:]]
    remedy = "raise --minutes; the JSON lists them as not_run"
    assert lines[0] == ["out of time", "3 rows", "2 training, 1 kernels", remedy]
    assert [line[0].partition(";")[0] for line in lines[1:]] == ["3 out of time"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "verify: --minutes must be positive, got 0."),
        (["--devices", "0"], "verify: --devices must be at least 1, got 0."),
        (
            ["--only", "fsp"],
            (
                "verify: no row contains 'fsp'.\nFix: use a group, such as training, kernels, or a"
                " part of a name."
            ),
        ),
        (
            ["--output", "none/all.json"],
            (
                "verify: the folder of --output none/all.json does not exist.\nFix: mkdir -p none,"
                " or name another file."
            ),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_requests_are_refused_before_anything_runs(verify, capsys, words, message):
    assert verify(*words) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
