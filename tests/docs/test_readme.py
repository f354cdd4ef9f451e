"""The README: its code runs as it stands, its commands are the ones promised, its table is what
strategies do.
"""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest
from support.paths import ROOT

import shardopt as so
from shardopt.cli._optimizer import optimizers
from shardopt.cli._strategy import parse_mesh

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    "count", [1, pytest.param(None, marks=pytest.mark.slow)], ids=["example", "all"]
)
def test_the_python_runs_as_it_stands(count, tmp_path):
    # as many devices as the script asks for, compiled as cheaply as in all tests
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")[:count]))
    command = [sys.executable, "-W", "error", str(script)]
    environment["PYTHONPATH"] = str(ROOT)  # where it is not installed
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    loss, spec = done.stdout.split(maxsplit=1)
    assert float(loss) < 1e-3
    assert "('data', None)" in spec
    assert ("Resuming from step 10" in done.stderr) == (count is None)


def test_the_example_has_ten_lines():
    assert len(blocks("python")[0].splitlines()) == 10


def test_two_commands_set_everything_up():
    assert blocks("bash")[:2] == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/shardopt train\n",
        ".venv/bin/python -m pytest -n auto\n",
    ]


def test_the_commands_shown_exist():
    shown = "".join(blocks("bash")[2:])
    for mesh in re.findall(r"--mesh (\S+)", shown):
        assert parse_mesh(mesh)
    assert set(re.findall(r"--optimizer (\S+)", shown)) <= set(optimizers())


@pytest.mark.parametrize("name", ["ddp", "zero(stage=1)", "zero(stage=2)", "fsdp"])
def test_the_table_tells_the_bytes_a_parameter(name, mesh_of):
    (row,) = re.findall(rf"^\| `so\.{re.escape(name)}`.*$", README, re.MULTILINE)
    said = eval(row.split("|")[4], {"N": 8})

    options = {"stage": int(name[-2])} if "stage" in name else {}
    make = getattr(so, name.split("(")[0])
    opt = make(
        optax.adam(0.1),
        mesh_of(data=8),
        lambda params, batch: jnp.mean(batch @ params["w"]),
        **options,
    )
    params = {"w": jnp.zeros((1024, 64))}
    report = opt.config.report(params)
    gradients = 4 / (8 if opt.config.placement.grads else 1)
    held = (report.params_bytes + report.opt_state_bytes) / params["w"].size + gradients
    assert held == pytest.approx(said, rel=1e-3)
