"""`shardopt launch`: train as several processes, killed and started again with fewer.

Scripts are launched too, and wrong commands are refused.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from support.paths import ROOT

from shardopt.checkpoint._run_folder import committed
from shardopt.cli import main
from shardopt.cli._commands import child_command, parse_processes, split_words
from shardopt.core._errors import calling
from shardopt.runtime import _devices


@pytest.fixture
def start(shardopt, tmp_path):
    """Return a function that starts `shardopt launch`; its errors come on standard output."""
    return lambda *words: shardopt("launch", *words, stderr=subprocess.STDOUT, cwd=tmp_path)


def pid_of(rank, folder):
    """Return the process of this number that trains in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended, or be another user's
            words = (process / "cmdline").read_bytes().split(b"\0")
            place = (process / "environ").read_bytes().split(b"\0")
            if str(folder).encode() in words and f"JAX_PROCESS_ID={rank}".encode() in place:
                return int(process.name)
    raise AssertionError(f"no process {rank} trains in {folder}")


SCRIPT = """
import os, sys, jax, numpy as np, shardopt as so
jax.config.update("jax_num_cpu_devices", 1)
so.initialize()
from jax.experimental import multihost_utils
assert multihost_utils.process_allgather(np.int32(jax.process_index())).tolist() == list(range(jax.process_count()))
if sys.argv[1] == "fail" and jax.process_index() == 1:
    raise RuntimeError("the disk is full")
if sys.argv[1] == "fail":
    multihost_utils.process_allgather(np.int32(0))  # waits for the other
if sys.argv[1] == "fit":
    import optax

    def batches():
        for step in range(100):
            if step == 14 and jax.process_index() == 1:
                os.kill(os.getpid(), 9)
            yield np.random.default_rng(step).normal(size=(4, 8)).astype(np.float32)

    opt = so.fsdp(optax.adam(0.1), so.make_mesh(), lambda p, x: ((x @ p["w"]) ** 2).mean(), min_shard_elements=1)
    with so.Checkpoints("saved", every=5, keep=1) as checkpoints:
        so.fit(opt, opt.init({"w": np.ones(8, np.float32)}), so.GlobalRows(batches()), num_steps=20, checkpoints=checkpoints)
print("done")
"""


@pytest.mark.slow
def test_a_script_is_launched_and_ends_well(start, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    good, _ = (job := start("--", "mine.py", "well")).communicate(timeout=300)
    assert (job.returncode, good) == (0, "done\n")


@pytest.mark.slow  # test_launch.py, without the command
def test_a_script_is_launched_and_an_error_of_one_process_ends_all_at_once(start, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    # Without our hook jax would wait five minutes for the other process, and the other one for it.
    bad, _ = (job := start("--log-dir", "here", "--", "mine.py", "fail")).communicate(timeout=100)
    assert job.returncode == 1
    assert "launch: process 1 of 2 ended with exit code 1; the others were ended.\n" in bad
    assert "  RuntimeError: the disk is full\n" in bad
    assert "done" not in bad
    assert sorted(path.name for path in (tmp_path / "here").glob("*.log")) == [
        "process-0.log",
        "process-1.log",
    ]


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_a_script_goes_on_from_its_checkpoint_with_fewer(
    start, tmp_path
):
    (tmp_path / "mine.py").write_text(SCRIPT)
    job = start("--processes", "1:2", "--max-restarts", 1, "--", "mine.py", "fit")
    said, _ = job.communicate(timeout=300)
    assert job.returncode == 0, said
    assert "launch: process 1 of 2 was killed by SIGKILL; the others were ended.\n" in said
    assert "launch: starting again with 1 process, restart 1 of 1.\n" in said
    assert re.search(r"Resuming from step (5|10) in \S+/saved, ", said)
    assert said.endswith("done\n")
    assert committed(tmp_path / "saved") == [20]


@pytest.mark.parametrize(
    ("words", "attempt", "saved", "command"),
    [
        (["train", "--steps", "3"], 0, True, ["-m", "shardopt.cli", "train", "--steps", "3"]),
        (["train", "--steps", "3"], 1, False, ["-m", "shardopt.cli", "train", "--steps", "3"]),
        (
            ["train", "--steps", "3"],
            1,
            True,
            ["-m", "shardopt.cli", "train", "--steps", "3", "--resume"],
        ),
        (["train", "--resume"], 2, True, ["-m", "shardopt.cli", "train", "--resume"]),
        (["mine.py", "--fast"], 1, True, ["mine.py", "--fast"]),
        (["python", "mine.py"], 1, True, None),
    ],
)
def test_train_is_resumed_where_there_is_something_to_go_on_with(
    words, attempt, saved, command, tmp_path, monkeypatch
):
    monkeypatch.setattr("shardopt.cli._commands.committed", lambda folder: [4] if saved else [])
    folder = tmp_path if words[0] == "train" else None
    assert child_command(words, folder, attempt) == (
        words if command is None else [sys.executable, *command]
    )


@pytest.mark.slow
def test_a_killed_process_ends_the_job_which_goes_on_with_fewer(start, tiny, tmp_path):
    folder = tmp_path / "run"
    options = ("--processes", "1:2", "--max-restarts", 1)
    sizes = (
        "--devices",
        2,
        "--mesh",
        "data=2",
        "--steps",
        14,
        "--checkpoint-every",
        4,
        "--evaluate-every",
        100,
    )
    job = start(*options, "--", *tiny, *sizes, "--run-dir", folder)
    said = []
    for line in job.stdout:
        said.append(line)
        # not when it comes there again
        if line.startswith("step 10/") and "launch:" not in "".join(said):
            os.kill(pid_of(1, folder), signal.SIGKILL)
    assert job.wait() == 0, said
    text = "".join(said)
    assert "launch: process 1 of 2 was killed by SIGKILL; the others were ended.\n" in text
    assert "launch: starting again with 1 process, restart 1 of 1.\n" in text
    (step,) = re.findall(r"Resuming from step (\d+) in", text)
    assert int(step) in (4, 8, 12)
    assert "[Gloo]" not in text
    assert committed(folder / "checkpoints")[-1] == 14
    assert sorted(path.name for path in (folder / "logs").glob("*.log")) == [
        "process-0.log",
        "process-0.restart-1.log",
        "process-1.log",
    ]
    losses = [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(10))
def test_wherever_a_process_is_killed_the_outcome_is_that_of_an_unbroken_run(
    start, tiny, tmp_path, draw
):
    """The last of the metrics are the same to the last digit."""
    sizes = ("--devices", 4, "--steps", 30, "--checkpoint-every", 3, "--evaluate-every", 100)

    def last(name):
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        return {key: lines[-1][key] for key in ("step", "loss", "grad_norm", "val_loss")}

    assert start("--processes", 4, "--", *tiny, *sizes, "--run-dir", tmp_path / "whole").wait() == 0
    job = start(
        "--processes", 4, "--max-restarts", 1, "--", *tiny, *sizes, "--run-dir", tmp_path / "broken"
    )
    killed = False
    for line in job.stdout:
        if line.startswith("step 10/") and not killed:
            killed = True
            try:
                job.wait(timeout=0.3 * draw)
            except subprocess.TimeoutExpired:
                os.kill(pid_of(draw % 4, tmp_path / "broken"), signal.SIGKILL)
    assert job.wait() == 0
    assert last("broken") == last("whole")


def test_devices_that_cannot_be_shared_are_refused(monkeypatch):
    monkeypatch.setattr(_devices, "initialize", lambda: None)
    monkeypatch.setattr(_devices, "num_processes", lambda: 2)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)  # as before jax starts
    message = (
        "shardopt: --devices 7 cannot be shared out evenly among 2 processes.\nFix: use --devices 6"
        " or 8."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _devices.start_devices(7)


@pytest.mark.slow
def test_devices_that_cannot_be_shared_are_refused_by_all(start, tiny, tmp_path):
    job = start("--processes", 2, "--", *tiny, "--devices", 7, "--run-dir", tmp_path / "run")
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 2
    message = (
        "error: train: --devices 7 cannot be shared out evenly among 2 processes.\nFix: use"
        " --devices 6 or 8.\n"
    )
    assert said.startswith(message)
    assert "Its last lines:\n  " + message.replace("\nFix", "\n  Fix") in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (),
            (
                "launch: there is no command to launch.\n"
                "Fix: say the command after --: shardopt launch --processes 4 -- train --steps 100"
            ),
        ),
        (
            ("--processes", "0", "--", "train"),
            "launch: --processes must be at least 1, got 0.",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(capsys, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not list(tmp_path.iterdir())


def test_a_command_that_nobody_has_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--", "trian", "--steps", "3"]) == 2
    message = (
        "error: launch: 'trian' is no command of shardopt, and no program.\nFix: check its name"
    )
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", [4]),
        ("1:3", [1, 2, 3]),
        ("4,2,1", [4, 2, 1]),
        (
            "3:1",
            (
                "launch: --processes 3:1 cannot be read.\nFix: write 4, 1:4 for as many as are left"
                " down to one, or 1,2,4 for as many of these."
            ),
        ),
        ("two", "launch: --processes two cannot be read."),
    ],
)
def test_how_many_processes_there_may_be(text, message):
    if isinstance(message, list):
        assert list(parse_processes(text)) == message
        return
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        calling("launch")(parse_processes)(text)


def test_the_words_of_train_are_read_before_anything_is_started(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--", "train", "--setps", "3"]) == 2
    assert "--setps: did you mean --steps?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_begins_after_the_first_dashes():
    assert split_words(["launch", "--processes", "2", "--", "a", "--", "b"]) == (
        ["launch", "--processes", "2"],
        ["a", "--", "b"],
    )
    assert split_words(["train", "--steps", "3"]) == (["train", "--steps", "3"], [])


def test_a_vault_that_anybody_could_read_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("SHARDOPT_VAULT_TOKEN", raising=False)
    assert main(["vault"]) == 2
    assert "vault: SHARDOPT_VAULT_TOKEN is not set: anybody could read" in capsys.readouterr().err


def test_a_vault_listens_at_the_stated_address_alone():
    command = [sys.executable, "-m", "shardopt.cli", "vault", "--port", "0"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "SHARDOPT_VAULT_TOKEN": "of the job",
        "SHARDOPT_LISTEN_ADDRESS": "127.0.0.2",
    }
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    with program, contextlib.ExitStack() as stack:
        stack.callback(program.kill)
        assert program.stdout is not None
        port = int(program.stdout.readline().removesuffix(".\n").rpartition(" ")[2])
        socket.create_connection(("127.0.0.2", port), timeout=10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
