import functools
import importlib
import io
import json
import math
import os
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from shardopt.training import evaluation, jsonl
from shardopt.training._fit import fit
from shardopt.training._loggers import as_loggers, metrics_text, open_log, show_progress

pytestmark = pytest.mark.fast


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_the_json_lines_of_a_run_are_its_history(opt, new_state, batches, tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    result = fit(opt, new_state(), batches, num_steps=25, log=jsonl(path), progress=False)
    assert lines(path) == result.history
    assert [line["step"] for line in lines(path)] == [10, 20, 25]


def test_several_loggers_get_the_same(opt, new_state, batches, tmp_path):
    seen = []
    logs = [
        jsonl(tmp_path / "a.jsonl"),
        lambda step, metrics: seen.append((step, metrics)),
    ]
    result = fit(opt, new_state(), batches, num_steps=10, log=logs, progress=False)
    assert seen == [
        (10, {name: value for name, value in result.history[0].items() if name != "step"})
    ]
    assert lines(tmp_path / "a.jsonl") == result.history


def test_lines_are_there_at_once_and_no_number_is_null(tmp_path):
    path = tmp_path / "a.jsonl"
    log = jsonl(str(path))
    log(1, {"a": math.nan, "b": -math.inf, "c": 2})
    assert lines(path) == [{"step": 1, "a": None, "b": None, "c": 2}]
    log.close()
    log.close()


def test_a_resumed_run_replaces_what_the_broken_one_left(tmp_path):
    path = tmp_path / "a.jsonl"
    log = jsonl(path)
    for step in (10, 20, 30):
        log(step, {"loss": step / 10})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # killed here
    log = jsonl(path)
    log(20, {"loss": 7})
    log(20, {"val": 8})
    log.close()
    log(30, {"loss": 9})  # opened again
    assert lines(path) == [
        {"step": 10, "loss": 1.0},
        {"step": 20, "loss": 7},
        {"step": 20, "val": 8},
        {"step": 30, "loss": 9},
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]
    log.close()


def test_files_of_a_resumed_run_equal_those_of_an_unbroken_one(
    opt, new_state, batches, memory, tmp_path
):
    def loss(name):
        return [(line["step"], line["loss"]) for line in lines(tmp_path / name)]

    fit(
        opt,
        new_state(),
        batches,
        num_steps=30,
        log=jsonl(tmp_path / "whole"),
        log_every=2,
        progress=False,
    )
    fit(
        opt,
        new_state(),
        batches,
        num_steps=14,
        log=jsonl(tmp_path / "broken"),
        log_every=2,
        progress=False,
    )
    checkpoints = memory(9)
    fit(opt, new_state(), batches, num_steps=9, checkpoints=checkpoints, progress=False)
    resumed_checkpoints = memory(9, disk=checkpoints.disk, resume=True)
    log = jsonl(tmp_path / "broken")
    fit(
        opt,
        new_state(),
        batches,
        num_steps=30,
        checkpoints=resumed_checkpoints,
        log=log,
        log_every=2,
        progress=False,
    )
    assert loss("broken") == loss("whole")


def test_paths_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    message = (
        f"jsonl: '{tmp_path}' is a folder.\nFix: name a file in it, such as"
        f" '{tmp_path}/metrics.jsonl'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        jsonl(tmp_path)
    with pytest.raises(TypeError):
        jsonl(3)


def test_logs_that_are_no_callables_are_refused():
    message = (
        "shardopt: log must be callables (step, metrics) -> None, got str, int.\nFix: pass"
        " so.training.jsonl(path) or a function of your own."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        as_loggers(["a", print, 3])
    assert as_loggers(None) == ()
    assert as_loggers(print) == as_loggers([print]) == (print,)


def test_a_file_deleted_under_the_run_is_made_anew(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = jsonl(path)
    log(1, {"loss": 1.0})
    path.unlink()
    path.parent.rmdir()
    log(2, {"loss": 0.5})
    log(3, {"loss": 0.25})
    log.close()
    assert [line["step"] for line in lines(path)] == [2, 3]


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = jsonl(path)
    log(1, {"loss": 1.0})
    with log._file, Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), log._file.fileno())
        log._is_same_file = lambda file: True
        with pytest.raises(OSError, match="No space left") as caught:
            log(2, {"loss": 0.5})
    assert str(caught.value) == f"[Errno 28] No space left on device: '{path}'"
    log.close()
    assert [line["step"] for line in lines(path)] == [1]


def test_progress_prints_lines_where_there_is_no_terminal(opt, new_state, batches, capsys):
    history = fit(opt, new_state(), batches, num_steps=25).history
    out, err = capsys.readouterr()
    assert out == ""
    printed = err.splitlines()
    assert len(printed) == 3
    for line, record in zip(printed, history, strict=True):
        wanted = f"step {record['step']}/25  loss {record['loss']:.4g}  error {record['error']:.4g}"
        wanted += f"  grad_norm {record['grad_norm']:.4g}  {record['steps_per_second']:.4g} steps/s"
        wanted += (
            f"  {record['examples_per_second']:.4g} examples/s  goodput {record['goodput']:.4g}"
        )
        assert line == wanted


def test_progress_prints_nothing_when_off(opt, new_state, batches, capsys):
    fit(opt, new_state(), batches, num_steps=25, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shown", [True, False])
def test_messages_appear_in_any_case(shown):
    file = io.StringIO()
    with show_progress(10, shown=shown, console=Console(file=file, width=20)) as display:
        display.advance(3)
        display.say("a message that is longer than the console is wide, [bold]as it is")
    assert file.getvalue() == "a message that is longer than the console is wide, [bold]as it is\n"


@pytest.mark.parametrize("work", ["step", "reading weights", "writing weights"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_and_a_bar_name_the_work(work, is_terminal):
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100, color_system=None)
    with show_progress(12, shown=True, work=work, console=console) as display:
        display.advance(3)
        display.report(3, {"GB": 0.5})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert re.search(rf"\b{work} .*3/12 .*GB 0\.5", shown)


def test_a_terminal_shows_a_bar():
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


@pytest.mark.parametrize("total", [3, None])
def test_an_evaluation_shows_a_bar_of_its_batches(total, opt, new_state, batches, monkeypatch):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    module = importlib.import_module("shardopt.training._run")
    monkeypatch.setattr(module, "show_progress", functools.partial(show_progress, console=console))
    monkeypatch.setattr(Progress, "update", functools.partialmethod(Progress.update, refresh=True))

    class HeldOut:
        def __iter__(self):
            for batch in batches[:3]:
                yield batch
                console.print("")

    class Sized(HeldOut):
        def __len__(self):
            return 3

    evaluate = evaluation(opt, HeldOut() if total is None else Sized())
    fit(
        opt,
        new_state(),
        batches,
        num_steps=2,
        evaluate=(evaluate, 1),
    )
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    counts = re.findall(r"(\d)/(\S+) .*evaluation", drawn)
    totals = ["3"] if total else ["?", "3"]  # the second time it is known
    assert list(dict.fromkeys(counts)) == [
        (str(done), total) for total in totals for done in range(3)
    ]
    assert "evaluation" not in drawn.splitlines()[-1]


def test_other_processes_are_silent(monkeypatch, capsys):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with show_progress(10, shown=True) as display:
        display.advance(3)
        display.report(3, {"loss": 1.0})
        display.say("nothing")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_other_processes_call_only_loggers_that_ask_for_every_process(monkeypatch, rank):
    monkeypatch.setattr("jax.process_index", lambda: rank)
    calls = []

    class Everywhere:
        every_process = True

        def __call__(self, step, metrics):
            calls.append(("everywhere", step, metrics))

        def close(self):
            calls.append("closed")

    def first_only(step, metrics):
        calls.append(("first", step, metrics))

    with open_log([first_only, Everywhere()]) as write:
        write(5, {"loss": 2.0})
    expected = [("first", 5, {"loss": 2.0}), ("everywhere", 5, {"loss": 2.0}), "closed"]
    assert calls == (expected if rank == 0 else expected[1:])


def test_metrics_are_rounded_on_a_line():
    assert (
        metrics_text({"loss": 1.23456, "n": 100000, "bad": float("nan")})
        == "loss 1.235  n 1e+05  bad nan"
    )
    assert metrics_text({}) == ""
    assert metrics_text({"steps_per_second": 3.21987}) == "3.22 steps/s"
