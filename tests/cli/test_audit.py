"""`shardopt audit`: of a file, and what is said of what cannot be audited."""

import importlib.util
import json
from pathlib import Path

import pytest

import shardopt as so
from shardopt.audit import inner_product_flops
from shardopt.cli import main
from shardopt.planning import find_model

PROGRAM = Path(__file__).parents[1] / "audit" / "programs" / "v5e_fsdp.hlo"


def test_the_text_is_the_audits(capsys):
    assert main(["audit", str(PROGRAM), "--mesh", "data=4,tensor=2"]) == 0
    expected = so.audit(PROGRAM.read_text(), mesh={"data": 4, "tensor": 2})
    assert capsys.readouterr().out == f"{expected}\n"


def test_json(capsys):
    assert main(["audit", str(PROGRAM), "--mesh", "data=4,tensor=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = so.audit(PROGRAM.read_text(), mesh={"data": 4, "tensor": 2})
    assert found["by_axis"]["data"]["wire_bytes"] == expected.by_axis()[("data",)].wire_bytes
    assert len(found["collectives"]) == len(expected.collectives)
    assert found["flops"] == inner_product_flops(PROGRAM.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "audit: there is nothing to audit."),
        ([str(PROGRAM), "--topology", "v5e:4x4"], "audit: a file and --topology exclude each other."),
        ([str(PROGRAM), "--mesh", "depth=8"], "audit: --mesh depth=8 cannot be read."),
        ([str(PROGRAM), "--mesh", "data=4"], "audit: the mesh (data=4) has 4 devices, the program 8."),
        ([str(PROGRAM)], "audit: cannot tell the mesh of this program on 8 devices, none of its inputs has one."),
        ([__file__], "audit: this is not the text of an HLO module: it has no HloModule line."),
        (["--topology", "v9:2"], "aot: unknown topology 'v9:2'."),
        (["--topology", "v5e:2x4", "--model", "gpt9"], "audit: unknown model 'gpt9'."),
        (["--topology", "v5e:2x4", "--rows", "0"], "audit: --rows must be at least 1, got 0."),
    ],
)
def test_refusals(capsys, words, message):
    assert main(["audit", *words]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert f"error: {message}" in out.err


def test_a_missing_file_and_a_missing_compiler(capsys, monkeypatch):
    assert main(["audit", "nowhere.hlo"]) == 2
    assert "No such file or directory: 'nowhere.hlo'" in capsys.readouterr().err
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    assert main(["audit", "--topology", "v5e:2x4", "--model", "gpt2"]) == 2
    assert "Fix: pip install 'shardopt[tpu]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_is_compiled_for_chips_that_are_not_there(capsys):
    """Fails, rather than skips, where libtpu is not installed: pip install 'shardopt[tpu]'."""
    words = ["audit", "--model", "gpt2", "--length", "128", "--topology", "v5e:2x4", "--mesh", "replica=2"]
    assert main([*words, "--strategy", "zero1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"replica": 2, "data": 4, "pipeline": 1, "tensor": 1}
    # parameters whole, their moments split over data, and a row of tokens
    formula = (4 + 8 / 4) * find_model("test", "gpt2").num_parameters + 129 * 4
    stored = found["memory"]["arguments"] - found["memory"]["argument_padding"]
    assert stored == pytest.approx(formula, rel=0.01)
    assert 0 < found["memory"]["peak"] < found["memory"]["hbm"]
    assert found["flops"] > 0
    assert any("replica" in axes for axes in found["audit"]["by_axis"])
