"""Each command as a process of its own, and under `launch`: one place joins the job and sets the
devices. No other code of the command uses jax before.
"""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import oracle
from support.paths import ROOT

from shardopt.cli import _commands, main


@pytest.mark.parametrize(
    "name", ["train", "tune", "verify", "doctor", "export", "merge", "generate", "diff"]
)
def test_devices_are_set_before_a_command_begins(name, monkeypatch):
    """Recorded in this process, where jax has started already."""
    calls = []
    monkeypatch.setattr(_commands, "start_devices", lambda count: calls.append(("devices", count)))
    monkeypatch.setattr(_commands, "initialize", lambda: calls.append(("join",)))
    table = {
        kind: command._replace(run=lambda options: calls.append(("run",)))
        for kind, command in _commands._COMMANDS.items()
    }
    monkeypatch.setattr(_commands, "_COMMANDS", table)
    has_devices = name in ("train", "tune", "verify")
    words = {"export": ["run", "out"], "merge": ["adapters", "out"], "generate": ["run", "a text"]}
    words["diff"] = ["run", "other"]
    assert main([name, *(["--devices", "3"] if has_devices else words.get(name, []))]) == 0
    assert calls == [("devices", 3) if has_devices else ("join",), ("run",)]


def test_every_command_with_devices_sets_them():
    for kind, command in _commands._COMMANDS.items():
        groups = [kind, *(field.type for field in dataclasses.fields(kind))]
        has_devices = any("devices" in getattr(group, "__annotations__", {}) for group in groups)
        assert has_devices == (command.devices is not None), command.name


@pytest.mark.parametrize("name", ["launch", "vault"])
def test_what_is_no_process_of_a_job_is_refused(name, capsys):
    assert main(["launch", "--", name]) == 2
    assert f"error: launch: {name} cannot be a process of a job.\n" in capsys.readouterr().err


@pytest.mark.parametrize("port", [-1, 2**16, 10**20])
def test_a_port_that_python_cannot_bind_is_an_error_without_a_traceback(port, monkeypatch, capsys):
    monkeypatch.setenv("SHARDOPT_VAULT_TOKEN", "0123456789abcdef")
    assert main(["vault", "--port", str(port)]) == 2
    message = f"error: vault: --port must be finite, at least 0 and below 65536; got {port}.\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("name", ["doctor", "plan", "audit", "verify"])
def test_a_command_under_launch_is_run_by_this_python(name):
    assert _commands.child_command([name, "--help"], None, 0) == [
        sys.executable, "-m", "shardopt.cli", name, "--help",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tune_words(tmp_path_factory):
    """A tiny Llama and conversations."""
    root = tmp_path_factory.mktemp("tune")
    config, shapes, _ = oracle.read_case("llama3")
    folder = oracle.write_folder(root / "llama", config, shapes)
    (folder / "tokenizer.json").write_text("{}")
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(40):
        tokens = draw.integers(2, 14, 6).tolist()
        lines.append(json.dumps({"tokens": tokens, "weights": [0, 0, 0, 1, 1, 1]}))
    (root / "chat.jsonl").write_text("\n".join(lines))
    words = f"--model {folder} --data {root / 'chat.jsonl'} --length 16 --batch-size 8 --steps 2"
    return ["tune", *words.split(), "--evaluate-every", "2"]


COMMANDS = {  # words, and a part of the output
    "train": ("--devices 4 --mesh data=4 --steps 2", "data=4"),
    "tune": ("--devices 4 --mesh data=4", "data=4"),
    "tune with adapters": ("--devices 4 --mesh data=4 --lora-rank 2", "data=4"),
    "tune in 4 bits": ("--devices 4 --mesh data=4 --lora-rank 2 --base nf4", "data=4"),
    "doctor": ("", "jax"),
    "plan": ("--model gpt2 --hardware v5e --chips 8", "make_mesh(data=8)"),
    "audit": (f"{ROOT}/tests/rooms/hlo/programs/v5e_fsdp.hlo --mesh data=8", "all-gather"),
    "verify": ("--devices 4 --only same", "4 x cpu"),
}


OF_A_RUN = {  # after `tune`, with the folder of its run and a new one
    "diff": "diff {run} {run}",
    "export": "export {run} {out}",
    "merge": "merge {run}/adapters {out}",
    "generate": "generate {run} 1,2,3 --ids --num-tokens 3 --temperature 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["--lora-rank 2", ""], ids=["adapters", "weights"])
def test_commands_after_a_run_of_tune_do_the_same_alone_and_under_launch(
    adapters, shardopt, tune_words, tmp_path
):
    run = tmp_path / "run"
    words = [*tune_words, "--devices", "4", "--mesh", "data=4", *adapters.split()]
    assert shardopt(*words, "--run-dir", run).wait(timeout=900) == 0
    for name, text in OF_A_RUN.items():
        if name == "merge" and not adapters:
            continue
        results = []
        for before in ([], ["launch", "--processes", "2", "--"]):
            out = tmp_path / f"{name}{len(before)}"
            words = text.format(run=run, out=out).split()
            job = shardopt(*before, *words, cwd=tmp_path)
            said, err = job.communicate(timeout=900)
            assert job.returncode == 0, err
            (path,) = out.glob("*.safetensors") if out.exists() else [None]
            results.append(said if path is None else load_file(path))
        np.testing.assert_equal(*results)


@pytest.mark.slow
@pytest.mark.parametrize("launched", [False, True], ids=["alone", "launched"])
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_runs_alone_and_under_launch(
    name, launched, shardopt, tiny, tune_words, tmp_path
):
    options, piece = COMMANDS[name]
    command = name.split()[0]
    words = {"train": tiny, "tune": tune_words}.get(command, [command]) + options.split()
    if command in ("train", "tune"):
        words += ["--run-dir", str(tmp_path / "run")]
    if launched:
        words = ["launch", "--processes", "2", "--", *words]
    job = shardopt(*words, stderr=subprocess.STDOUT, cwd=tmp_path)
    said, _ = job.communicate(timeout=900)
    assert job.returncode == 0, said
    assert piece in said


def test_the_module_of_the_command_line_is_found():
    assert (ROOT / "shardopt/cli/__main__.py").is_file()
