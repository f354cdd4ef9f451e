"""Blocks of the pages that are no python are checked too: shell by its grammar, commands by their
parser, yaml by its form.
"""

import dataclasses
import re
import shlex
import subprocess

import jax
import optax
import pytest
import yaml
from support.paths import ROOT

from shardopt.cli._commands import LaunchOptions, parse, split_words
from shardopt.cli._options import TrainOptions
from shardopt.cli._strategy import check_options, fitted, make_strategy, mesh_of
from shardopt.cli._train import decoder_config
from shardopt.models import gpt

pytestmark = pytest.mark.fast

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def blocks(language):
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(
            rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        )
    ]


COMMANDS = sorted(
    {
        line
        for _, block in blocks("bash")
        for line in block.replace("\\\n", "").splitlines()  # a command may go on in the next line
        if re.match(r"shardopt (train|launch)\b", line)
    }
)


@pytest.mark.parametrize(("page", "block"), blocks("bash"), ids=lambda text: text[:20])
def test_shell_is_shell(page, block):
    done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("line", [line for line in COMMANDS if "--help" not in line])
def test_a_command_is_one(line):
    words, command = split_words(shlex.split(line)[1:])
    options = parse(words, TrainOptions())
    if isinstance(options, LaunchOptions):
        assert command
        options = parse(command, TrainOptions()) if command[0] == "train" else None
    # the folder of a resumed run has the options that its command leaves out
    if options is not None and not options.run.resume:
        check_options(options)
        pipelined = options.where.strategy == "hybrid"
        mesh = mesh_of(options.where.mesh, jax.devices(), pipelined=pipelined)
        options = fitted(options, mesh)
        make_strategy(
            options, optax.sgd(0.1), mesh, gpt.model(decoder_config(options.model)), rules=gpt.rules
        )


def test_there_are_commands_to_check():
    assert sum("launch" in line for line in COMMANDS) >= 4
    assert len(COMMANDS) > 6


def test_the_options_of_launch_are_all_told():
    text = (ROOT / "docs" / "commands.md").read_text()
    option_names = re.findall(r"^\| `--([\w-]+)` \|", text, re.MULTILINE)
    assert option_names == [
        field.name.replace("_", "-") for field in dataclasses.fields(LaunchOptions)
    ]


def test_the_job_of_kubernetes_tells_each_pod_its_place():
    ((_, block),) = blocks("yaml")
    job = yaml.safe_load(block)
    template = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = template["template"]["spec"]["containers"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert template["completionMode"] == "Indexed"
    assert (
        int(environment["JAX_NUM_PROCESSES"]) == template["parallelism"] == template["completions"]
    )
    first = f"{job['metadata']['name']}-{job['spec']['replicatedJobs'][0]['name']}-0-0.{job['metadata']['name']}"
    assert environment["JAX_COORDINATOR_ADDRESS"].split(":")[0] == first
    assert environment["JAX_PROCESS_ID"] is None  # from the annotation
