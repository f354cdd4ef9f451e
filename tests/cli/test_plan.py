"""`shardopt plan`: a table, JSON, a picture, and refusals."""

import json

import pytest

from shardopt.cli import main

GPT2 = ["plan", "--model", "gpt2", "--hardware", "a100", "--chips", "4"]


def run(capsys, *words):
    code = main(list(words))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_table_and_what_to_type(capsys):
    code, out, _ = run(capsys, *GPT2, "--top", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "gpt2 (124 million parameters) on 4 chips of a100, 8 rows per batch"
    assert lines[4].startswith("... and ")
    assert lines[-3] == "the first of them:"
    assert lines[-2].startswith("  mesh = so.make_mesh(data=")
    assert lines[-1].startswith("  opt = so.hybrid(tx, mesh, model, placement=")


def test_what_to_type_is_python(capsys):
    _, out, _ = run(capsys, "plan", "--model", "llama2-70b", "--chips", "64", "--batch-size", "64")
    for line in out.splitlines()[-2:]:
        compile(line.strip(), "plan", "exec")


def test_json(capsys):
    code, out, _ = run(capsys, *GPT2, "--json", "--top", "3", "--optimizer", "sgd(momentum=0.9)")
    found = json.loads(out)
    assert code == 0
    assert (found["model"], found["chips"], len(found["ranked"])) == ("gpt2", 4, 3)
    best = found["ranked"][0]
    assert best["memory"]["total"] < found["usable_bytes"]
    assert best["seconds"]["total"] <= found["ranked"][1]["seconds"]["total"]


def test_a_picture(capsys, tmp_path):
    path = tmp_path / "plans.png"
    code, _, _ = run(capsys, *GPT2, "--top", "4", "--png", str(path))
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", "0"], "plan: --top must be at least 1, got 0."),
        (["--length", "0"], "plan: --length must be at least 1, got 0."),
        (["--hardware", "abacus"], "plan: unknown hardware 'abacus'."),
        (["--model", "gpt9"], "plan: unknown model 'gpt9'."),
        (["--optimizer", "adamw("], "plan: --optimizer adamw( cannot be read."),
        (["--optimizer", "adamx"], "plan: optax has no optimizer 'adamx' that a learning rate is enough for."),
        (["--model", "llama3-405b"], "plan: llama3-405b on 4 chips of a100 with 8 rows per batch: nothing fits into"),
    ],
)
def test_refusals(capsys, words, message):
    code, out, err = run(capsys, *GPT2, *words)
    assert (code, out) == (2, "")
    assert f"error: {message}" in err
