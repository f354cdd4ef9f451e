"""`shardopt schedule`: text, JSON, a picture, and refusals."""

import json

import shardopt as so
from shardopt.cli import main


def test_the_text_is_the_schedules(capsys):
    assert main(["schedule", "--kind", "zero_bubble", "--stages", "4", "--micro-batches", "16"]) == 0
    assert capsys.readouterr().out == f"{so.schedules.zero_bubble(4, 16)}\n"


def test_json_holds_the_numbers_and_the_rows(capsys):
    words = ["schedule", "--kind", "interleaved", "--stages", "2", "--micro-batches", "4", "--json"]
    assert main(words) == 0
    found, table = json.loads(capsys.readouterr().out), so.schedules.interleaved(2, 4, num_chunks=2)
    assert (found["chunks"], found["ticks"], found["bubble"]) == (2, table.num_ticks, table.bubble_fraction)
    assert found["table"]["forward_micro_batch"] == table.table()["forward_micro_batch"].tolist()
    assert main([*words, "--chunks", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 3


def test_a_picture(capsys, tmp_path):
    path = tmp_path / "out.png"
    assert main(["schedule", "--kind", "gpipe", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{so.schedules.gpipe(4, 8)}\n"


def test_refusals(capsys):
    assert main(["schedule", "--kind", "gpipe", "--chunks", "2"]) == 2
    what = "schedule: --chunks 2 is for schedules that have chunks; gpipe has one a stage."
    assert f"error: {what}" in capsys.readouterr().err
    assert main(["schedule", "--stages", "0"]) == 2
    assert "error: eager_one_f_one_b: " in capsys.readouterr().err
