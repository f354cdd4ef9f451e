"""What works without the extras, and the error that names the extra where one is needed.

The packages are hidden, not removed.
"""

import importlib.metadata
import subprocess
import sys

import pytest

HIDDEN = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("rich", "tyro", "matplotlib", "grain", "safetensors", "flax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
"""

TRAINS = """
import jax, jax.numpy as jnp, optax, tempfile
import shardopt as so

jax.config.update("jax_num_cpu_devices", 2)
opt = so.fsdp(optax.sgd(0.5), so.make_mesh(), lambda params, x: ((x - params["w"]) ** 2).mean(), min_shard_elements=1)
folder = tempfile.mkdtemp()
with so.Checkpoints(folder + "/saved", every=1, keep=1) as checkpoints:
    result = so.fit(opt, opt.init({"w": jnp.zeros(4)}), [jnp.ones((2, 4))] * 2, num_steps=2, log_every=1,
                    checkpoints=checkpoints, log=so.training.jsonl(folder + "/metrics.jsonl"))
assert so.restore(folder + "/saved", opt).step == result.step == 2
assert "data" in str(so.plan("llama3-8b", hardware="v5p", chips=8, batch_size=16).best.mesh)
schedule = so.schedules.gpipe(2, 4)
print(schedule)

def refused(call):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)

from shardopt import data, models
from shardopt.cli import main
gpt = models.gpt.config(dim=32, num_layers=2)
refused(lambda: data.batches(data.split(data.open_corpus(), 16)[0], 2))
refused(lambda: so.interop.nnx(None, None))
print(main(["plan"]))
"""


@pytest.fixture(scope="module")
def without_extras():
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PATH": "",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
    }
    if importlib.metadata.version("jaxlib").startswith(
        "0.10."
    ):  # or programs are not stored, with a warning
        environment["XLA_FLAGS"] = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", HIDDEN + TRAINS],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.mark.slow  # test_distribution.py reads all imports
def test_training_checkpoints_and_planning_need_no_extra(without_extras):
    assert without_extras.returncode == 0, without_extras.stderr
    steps, _ = without_extras.stderr.split("error: ")
    # lines, without rich
    assert [line.split("  ")[0] for line in steps.splitlines()] == ["step 1/2", "step 2/2"]
    assert "stage 0" in without_extras.stdout


@pytest.mark.slow  # test_distribution.py reads all imports
def test_the_error_names_the_extra(without_extras):
    needed = [
        ("data.batches", "grain", "data"),
        ("interop.nnx", "flax", "flax"),
    ]
    message = "".join(
        f"{module}: {library} is needed, which is not installed.\nFix: pip install 'shardopt[{extra}]'\n"
        for module, library, extra in needed
    )
    assert without_extras.stdout.endswith(f"{message}2\n")
    assert without_extras.stderr.endswith(
        "error: shardopt: tyro is needed, which is not installed.\nFix: pip install"
        " 'shardopt[cli]'\n"
    )
