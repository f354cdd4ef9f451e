"""The README: its code runs as it stands, its commands are the ones promised, each claim has tests."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.paths import ROOT
from support.processes import Fork

import shardopt as so

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_runs_as_it_stands(tmp_path):
    """As many devices as the script asks for, compiled as cheaply as in all tests."""
    script, out, err = (tmp_path / name for name in ("readme.py", "out", "err"))
    script.write_text("\n".join(blocks("python")))
    process = Fork(script, [], out, err, strict=True)
    try:
        assert process.wait(300) == 0, err.read_text()
    finally:
        process.kill()
    loss, spec = out.read_text().split(maxsplit=1)
    assert float(loss) < 1e-3
    assert "('data', None)" in spec


def test_names_that_pages_write_with_so_are_found_though_nothing_has_imported_them(monkeypatch):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages if "changes" not in page.name)
    names = set(re.findall(r"\bso\.([A-Za-z]\w*)", text))
    assert {"fsdp", "fit", "schedules", "models", "data"} <= names
    for name in names:
        if f"shardopt.{name}" in sys.modules:  # other tests have imported it
            monkeypatch.delattr(so, name)
        assert getattr(so, name) is not None


def test_strategies_are_called_as_the_readme_says(mesh_of):
    def loss_fn(params, batch):
        return jnp.mean(batch @ params["w"])

    params, batch = {"w": np.ones((8, 2), np.float32)}, np.ones((8, 8), np.float32)
    for strategy in (so.ddp, so.zero, so.fsdp):
        for mesh in (mesh_of(data=8), so.make_mesh(data=1, devices=jax.devices()[:1])):
            opt = strategy(optax.adamw(0.1), mesh, loss_fn)
            opt.step.lower(opt.abstract_state(params), batch)
    with pytest.raises(TypeError, match="micro_batches"):
        so.hybrid(optax.adamw(0.1), mesh, loss_fn)
    with pytest.raises(TypeError, match="BlockModel"):
        so.hybrid(optax.adamw(0.1), mesh, loss_fn, micro_batches=1)


def test_the_example_has_ten_lines_and_the_own_loop_six():
    assert [len(block.splitlines()) for block in blocks("python")] == [10, 6]


def test_it_fits_in_150_lines():
    assert len(README.splitlines()) <= 150


def test_two_commands_set_everything_up():
    assert blocks("bash")[:2] == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/shardopt train\n",
        ".venv/bin/python -m pytest -n auto\n",
    ]


CLAIMS = {
    "The same steps as one device.": [
        "contract/test_exact.py::test_equals_one_device_on_the_union_batch",
        "contract/test_own_mesh.py::test_a_step_on_an_own_mesh_equals_the_step_on_ours",
        "contract/test_all_optimizers.py::test_each_transformation_trains_as_on_one_device",
        "contract/test_complex.py::test_complex_numbers_are_trained_as_on_one_device",
    ],
    "Any loss.": [
        "contract/test_edge_cases.py::test_the_global_view_takes_rows_that_the_devices_do_not_divide",
        "rooms/training/test_evaluation_of_sets.py::test_any_other_loss_warns_once_with_a_remedy",
    ],
    "Refusal instead of a wrong result.": [
        "contract/test_all_optimizers.py::test_updates_that_are_not_of_the_parameters_are_refused_when_traced",
        "contract/test_all_optimizers.py::test_each_transformation_is_accepted_when_traced_or_refused_by_name",
        "refusals/test_values.py::test_ids_that_a_model_does_not_have_are_refused_in_numpy",
        "refusals/test_values.py::test_a_target_that_is_no_token_is_nan_and_so_is_its_gradient",
    ],
    "Known costs.": [
        "contract/test_placement.py::test_bytes_per_device_follow_the_formula",
        "contract/test_few_collectives.py",
    ],
    "Runs that look after themselves.": [
        "processes/fit/test_stops.py::test_the_last_finished_step_is_on_disk_three_seconds_after_a_signal",
        "contract/test_hybrid_checkpoints.py::test_a_run_comes_into_a_pipeline_from_anywhere",
        "processes/launch/test_faults.py",
    ],
}
"""Each claim of the README, and the tests that hold it."""


def test_each_claim_has_tests_that_exist():
    listed = (ROOT / "README.md").read_text().split("## What you can rely on")[1].split("## ")[0]
    assert re.findall(r"^- \*\*(.+?)\*\*", listed, re.MULTILINE) == list(CLAIMS)
    for tests in CLAIMS.values():
        for test in tests:
            path, _, function = test.partition("::")
            assert f"def {function}" in (ROOT / "tests" / path).read_text(), test


def test_what_is_refused_among_optimizers_is_named():
    from shardopt.config._transformation import UNSUPPORTED

    text = (ROOT / "README.md").read_text()
    for transformation in UNSUPPORTED:
        name = re.search(r"optax\.([\w.]+)", transformation.problem)[1]
        assert name.split(".")[-1] in text


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_no_page_installs_a_package_that_is_not_published(page):
    """A fresh environment has no shardopt yet; with it, pip adds the packages of an extra."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert not [block for block in blocks if re.search(r"pip install '?shardopt", block)]
