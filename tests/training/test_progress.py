import io
import re

import pytest
from rich.console import Console

from shardopt.training import fit
from shardopt.training.progress import describe, show_progress


def test_lines_where_there_is_no_terminal(opt, new_state, batches, capsys):
    history = fit(opt, new_state(), batches, num_steps=25).history
    out, err = capsys.readouterr()
    assert out == ""
    printed = err.splitlines()
    assert len(printed) == 3
    for line, record in zip(printed, history, strict=True):
        wanted = f"step {record['step']}/25  loss {record['loss']:.4g}  error {record['error']:.4g}"
        wanted += f"  grad_norm {record['grad_norm']:.4g}  {record['steps_per_second']:.4g} steps/s"
        assert line == f"{wanted}  {record['examples_per_second']:.4g} examples/s"


def test_nothing_when_off(opt, new_state, batches, capsys):
    fit(opt, new_state(), batches, num_steps=25, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shown", [True, False])
def test_messages_appear_in_any_case(shown):
    file = io.StringIO()
    with show_progress(10, shown=shown, console=Console(file=file, width=20)) as display:
        display.advance(3)
        display.say("a message that is longer than the console is wide, [bold]as it is")
    assert file.getvalue() == "a message that is longer than the console is wide, [bold]as it is\n"


def test_a_bar_on_a_terminal():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    with show_progress(40, shown=True, console=console) as display:
        display.advance(10)
        display.report(10, {"loss": 1.23456, "[b]": 2})
        display.say("a message above the bar")
        display.report(20, {"loss": 0.5})
        display.advance(20)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "a message above the bar" in shown
    assert re.search(r"20/40 .*loss 0\.5  \[b\] 2", shown.splitlines()[-1])


def test_other_processes_are_silent(monkeypatch, capsys):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with show_progress(10, shown=True) as display:
        display.advance(3)
        display.report(3, {"loss": 1.0})
        display.say("nothing")
    assert capsys.readouterr() == ("", "")


def test_describe():
    assert describe({"loss": 1.23456, "n": 100000, "bad": float("nan")}) == "loss 1.235  n 1e+05  bad nan"
    assert describe({}) == ""
    assert describe({"steps_per_second": 3.21987}) == "3.22 steps/s"
