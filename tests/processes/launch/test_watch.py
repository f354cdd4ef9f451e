"""Who hangs: found from marks alone, and in small processes that are stopped, busy or cut off under
`launch`.
"""

import json
import os
import re
import signal
import socket
import sys
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest
from support.paths import ROOT

from shardopt.runtime import _progress as progress
from shardopt.runtime._launch import launch
from shardopt.runtime._progress import MAIN, SAVING, START, ProgressMark
from shardopt.runtime._watch import (
    Hang,
    RankReport,
    Watch,
    describe,
    find_hang,
    main_frames,
)


def heard(step, nth, phase, at, *, ago=0.0, new=False, usual=0.0, **lanes):
    marks = {MAIN: ProgressMark(step, nth, phase, at, -1.0 if new else usual, 7)}
    marks |= {name: ProgressMark(*lane, 0.0, 8) for name, lane in lanes.items()}
    return RankReport(ago, marks, 100, "here")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("ranks", "hang"),
    [
        ([heard(5, 1, "data", 3), heard(5, 2, "wait", 3)], None),
        ([heard(5, 0, "data", 11), heard(6, 1, "wait", 10.5)], Hang((0,), False, MAIN, 11)),
        # it waits for one that has only begun
        ([heard(6, 1, "wait", 99), heard(5, 0, "data", 2)], None),
        ([heard(5, 1, "evaluate", 50, new=True), heard(5, 2, "wait", 50)], None),  # it may compile
        (
            [heard(5, 1, "evaluate", 101, new=True), heard(5, 2, "wait", 90)],
            Hang((0,), False, MAIN, 101),
        ),
        # it took ten seconds before
        ([heard(5, 1, "evaluate", 29, usual=30), heard(5, 2, "wait", 29)], None),
        (
            [heard(5, 1, "evaluate", 31, usual=30), heard(5, 2, "wait", 29)],
            Hang((0,), False, MAIN, 31),
        ),
        # none lags
        ([heard(5, 2, "wait", 12), heard(5, 2, "wait", 11)], Hang((0, 1), False, MAIN, 12)),
        ([heard(5, 2, "wait", 0), heard(4, 2, "wait", 0, ago=11)], Hang((1,), True, MAIN, 11)),
        # it was stopped there
        ([heard(5, 2, "wait", 11), heard(5, 2, "wait", 5, ago=6)], Hang((1,), True, MAIN, 6)),
        ([heard(5, 2, "", 99), heard(5, 2, "", 99)], None),  # at its end
        # nobody knows how long
        ([heard(0, 0, START, 999, new=True), heard(0, 0, START, 999, new=True)], None),
        (
            [heard(0, 0, START, 999, new=True), heard(1, 0, "wait", 11)],
            Hang((0,), False, MAIN, 999),
        ),
        ([heard(0, 0, START, 999, new=True), None], None),
        ([None, heard(1, 0, "data", 1)], Hang((0,), True, MAIN, 1000)),
        (
            [
                heard(9, 1, "checkpoint", 12, saving=(8, 1, "barrier", 12)),
                heard(9, 1, "checkpoint", 12, saving=(8, 0, "write", 12)),
            ],
            Hang((1,), False, SAVING, 12),
        ),
        (
            [
                heard(9, 1, "wait", 1, saving=(8, 9, "", 500)),
                heard(9, 1, "wait", 1, saving=(8, 9, "", 500)),
            ],
            None,
        ),
    ],
)
def test_the_one_that_lags_is_found_not_those_that_wait_for_it(ranks, hang):
    assert find_hang(dict(enumerate(ranks)), 10, 1000) == hang


@pytest.mark.fast
def test_one_that_stopped_before_its_first_report_is_named_once_others_wait():
    assert find_hang({0: None, 1: heard(5, 2, "wait", 2)}, 10, 50) is None
    assert find_hang({0: None, 1: heard(5, 2, "wait", 11)}, 10, 50) == Hang((0,), True, MAIN, 11)


STACKS = """Thread 0x0000000000000008 (most recent call first):
  File "a.py", line 1 in other

Current thread 0x0000000000000007 (most recent call first):
  File "b.py", line 2 in inner
  File "b.py", line 9 in <module>
"""


@pytest.mark.fast
def test_a_hang_is_described_with_its_process_and_stack():
    hung_report = heard(5, 0, "data", 11)
    assert main_frames(STACKS, hung_report, MAIN) == [
        'File "b.py", line 2 in inner',
        'File "b.py", line 9 in <module>',
    ]
    seen = {0: hung_report, 1: heard(6, 0, "wait", 10)}
    assert (
        describe("launch", Hang((0,), False, MAIN, 11), seen, 2, {0: STACKS, 1: STACKS}, {0: "S"})
        == "launch: process 0 of 2 hangs: without progress for 11 s, last on here at step 5 in 'data'.\n"
        'Process 0 is in:\n  File "b.py", line 2 in inner\n  File "b.py", line 9 in <module>\n'
        "The others:\n  process 1: at step 6 in 'wait', in File \"b.py\", line 2 in inner"
    )
    stopped = describe("launch", Hang((0,), True, MAIN, 11), {0: hung_report}, 2, {}, {0: "T"})
    assert stopped.endswith(
        "\nProcess 0 is stopped by a signal (SIGSTOP), so its stack cannot be taken."
    )
    lost = describe("watchdog", Hang((0,), True, MAIN, 11), {0: hung_report}, 2, {}, {})
    assert "its host or network is lost" in lost
    both = describe("launch", Hang((0, 1), False, MAIN, 11), seen, 2, {}, {})
    assert "all 2 processes wait for 11 s, at step 5 in 'data', and none lags behind.\n" in both


@pytest.mark.fast
def test_a_first_step_that_waits_for_the_others_in_between_may_still_compile(monkeypatch):
    monkeypatch.setattr(progress, "_lanes", {})
    monkeypatch.setattr(progress, "_durations", {})
    progress.mark("step", 0)
    with progress.waiting("agree"):
        assert progress._lanes[MAIN].phase == "agree"
    resumed = progress._lanes[MAIN]
    assert resumed.phase == "step"
    assert resumed.expected_seconds < 0  # ten times the timeout
    progress.mark("data", 1)
    assert progress._durations[MAIN, "step"][0] == 1  # the second one shows how long a step takes


@pytest.mark.fast
def test_who_does_not_know_the_token_is_not_heard():
    watch = Watch(2, 60, say=print)
    try:
        host, _, port = watch.environment[progress.ADDRESS].rpartition(":")
        server_address = (host, int(port))
        with pytest.raises(AuthenticationError):
            Client(server_address, authkey=b"guessed")
        with socket.create_connection(server_address) as rude:
            rude.sendall(b"\0\0\0\4{}{}" * 99)
        report = json.dumps({"rank": 1, **progress.current()}).encode()
        with Client(server_address, authkey=watch.environment[progress.TOKEN].encode()) as good:
            good.send_bytes(report)
            while watch.reports()[1] is None:
                time.sleep(0.01)
            with Client(server_address, authkey=watch.environment[progress.TOKEN].encode()) as odd:
                odd.send_bytes(b'{"rank": 0, "lanes": 3}')
                with pytest.raises(EOFError):  # it is put off
                    odd.recv_bytes()
        heard = watch.reports()
        assert heard[0] is None
        assert heard[1] is not None
        assert heard[1].pid == os.getpid()
    finally:
        watch.close()


@pytest.mark.fast
def test_marks_of_waiting_end_where_they_began(monkeypatch):
    monkeypatch.setattr(progress, "_lanes", {})
    with progress.waiting("agree"):
        assert progress._lanes == {}
    progress.mark("data", 3)
    with progress.waiting("agree"):
        assert progress._lanes[MAIN][:3] == (3, 1, "agree")
    assert progress._lanes[MAIN][:3] == (3, 2, "data")
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_durations", {})
    usual = []
    for step, seconds in enumerate((300.0, 5.0, 7.0, 2.0)):
        progress.mark("evaluate", step)
        usual.append(progress._lanes[MAIN].expected_seconds)
        now[0] += seconds
        progress.mark("log")
    assert usual == [-1.0, 600.0, 15.0, 21.0]
    with pytest.raises(TypeError, match="step must be an integer"):
        progress.report_progress(1.5)  # pyright: ignore[reportArgumentType]


HEAD = f"""
import os, pathlib, re, signal, sys, time
sys.path.insert(0, {str(ROOT / "shardopt" / "runtime")!r})
import _progress as progress
rank = int(os.environ["JAX_PROCESS_ID"])
first = "SHARDOPT_RESTART" not in os.environ
progress.start_reports(rank)

def meet(step):
    progress.mark("wait")
    (here / f"{{step}}-{{rank}}-{{first}}").touch()
    while not (here / f"{{step}}-{{1 - rank}}-{{first}}").exists(): time.sleep(0.01)

def train(fault):
    for step in range(9):
        progress.mark("data", step)
        if first and rank == 1 and step == 4: fault()
        meet(step)
    progress.mark("")
"""
STOP = "train(lambda: os.kill(os.getpid(), signal.SIGSTOP))"
BUSY = "def spin():\n    while True: pass\ntrain(spin)"
NATIVE = "def spin(): re.match('(a*)*b', 'a' * 99)\ntrain(spin)"
KINDS = [
    pytest.param(
        STOP, "not heard of", "is stopped by a signal (SIGSTOP), so its stack", id="stopped"
    ),
    pytest.param(BUSY, "without progress", "in spin", id="busy", marks=pytest.mark.slow),
    pytest.param(NATIVE, "not heard of", "in spin", id="native", marks=pytest.mark.slow),
]


@pytest.mark.slow  # the tests of watches above, and test_launch.py
@pytest.mark.parametrize(("fault", "how", "stack"), KINDS)
def test_a_process_that_hangs_is_named_and_the_job_started_again(tmp_path, fault, how, stack):
    said = []
    script = f"{HEAD}\nhere = pathlib.Path({str(tmp_path)!r})\n{fault}"
    options = {
        "processes": 2,
        "log_dir": tmp_path / "logs",
        "hang_timeout": 3.0,
        "say": said.append,
    }
    assert launch(lambda attempt: [sys.executable, "-c", script], max_restarts=1, **options) == 0
    hang, restart = said
    position = (
        # it may have stopped before its next report
        r"(, last on \S+ at step [0-4] in '(start|data|wait)'|, and never was)"
    )
    assert re.match(rf"launch: process 1 of 2 hangs: {how} for [3-9] s{position}\.\n", hang)
    assert stack in hang
    assert re.search(r"The others:\n  process 0: at step 4 in 'wait', in File .* in meet\n", hang)
    assert hang.endswith(f"All stacks: {tmp_path}/logs/*.stacks")
    assert "in train" in (tmp_path / "logs" / "process-0.stacks").read_text()
    assert restart == "launch: starting again with 2 processes, restart 1 of 1."


@pytest.mark.slow
def test_a_job_that_hangs_to_the_last_ends_as_a_timeout_does(tmp_path):
    script = f"{HEAD}\nhere = pathlib.Path({str(tmp_path)!r})\n{STOP}"
    options = {"log_dir": tmp_path / "logs", "hang_timeout": 3.0, "say": lambda line: None}
    assert (
        launch(lambda attempt: [sys.executable, "-c", script], processes=2, **options)
        == progress.HUNG
    )


def test_a_timeout_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=re.escape("launch: --hang-timeout must be finite, above 0; got 0.")
    ):
        launch(
            lambda attempt: [sys.executable], processes=2, log_dir=tmp_path / "logs", hang_timeout=0
        )
    assert signal.getsignal(progress.STACKS_SIGNAL) == signal.SIG_DFL
