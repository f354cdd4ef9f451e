"""Each example of the page "Data on several processes" runs in two processes, which train on every
row once an epoch.
"""

import importlib.util
import json
import re

import numpy as np
import pytest
from support.paths import ROOT
from support.processes import run_processes

PAGE = (ROOT / "docs" / "data_on_several_processes.md").read_text()
FIRST, *EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
NAMES = ["own rows", "global rows", "grain", "torch", "datasets"]
BEGIN = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
"""
END = """
w = jax.jit(lambda w: w, out_shardings=jax.NamedSharding(opt.mesh, jax.P()))(result.state.params["w"])
print(json.dumps([result.step, result.stopped, result.history[-1]["loss"], np.asarray(w).tolist()]))
"""


def run(example, folder, count=2):
    """Run an example as several processes; return the trained result of each of them."""
    program = FIRST.replace(
        "so.initialize()", f"so.initialize('127.0.0.1:' + sys.argv[2], {count}, int(sys.argv[1]))"
    )
    script = folder / "example.py"
    script.write_text(
        BEGIN + program + example.replace("num_steps", "progress=False, num_steps") + END
    )
    outputs = run_processes(script, count, folder, strict=False)
    return [json.loads(output.last) for output in outputs]


def test_the_page_has_these_examples():
    assert len(EXAMPLES) == len(NAMES)


@pytest.mark.parametrize(
    "name", ["own rows", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_an_example_of_the_page_trains_on_two_processes(name, tmp_path):
    if name in ("torch", "datasets") and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    first, second = run(EXAMPLES[NAMES.index(name)], tmp_path)
    assert first == second
    step, stopped, loss, _ = first
    assert (step, stopped) == (10 if name == "datasets" else 40, "completed")
    assert loss < (2.0 if name == "datasets" else 0.3)


@pytest.mark.slow
def test_own_rows_and_global_rows_train_the_same_on_two_and_on_four_processes(tmp_path):
    results = []
    for number, count in [(0, 2), (1, 2), (0, 4)]:
        folder = tmp_path / f"{number}-{count}"
        folder.mkdir()
        results.append(run(EXAMPLES[number], folder, count)[0])
    for result in results[1:]:
        np.testing.assert_allclose(result[3], results[0][3], rtol=1e-4)
