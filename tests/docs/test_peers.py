"""The peers benchmark: tables in docs show the results, and only equal computations are compared."""

import importlib
import json
import os
import re
import sys

import jax
import numpy as np
import pytest
from support.paths import ROOT

RECORD = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())
PAGES = ("docs/benchmarks.md", "docs/notes/peers.md")


@pytest.fixture
def load(monkeypatch):
    """Import a module of benchmarks/peers/, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(ROOT))
    before = set(sys.modules)
    yield lambda name: importlib.import_module(f"benchmarks.peers.{name}")
    for name in set(sys.modules) - before:
        if name.startswith("benchmarks."):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_table_of_the_results(load, page):
    tables = load("tables")
    text = (ROOT / page).read_text()
    assert tables.with_section(text, tables.sections()[page]) == text, (
        "run: python -m benchmarks.peers.tables"
    )


@pytest.mark.parametrize("name", ["short_section", "full_section"])
def test_another_number_would_be_another_table(load, name):
    changed = json.loads(json.dumps(RECORD))
    size = next(iter(changed["results"]["cpu"].values()))
    next(iter(size["torch"].values()))["contestants"]["shardopt fsdp"]["tokens_per_second"] *= 2
    section = getattr(load("tables"), name)
    assert section(changed) != section(RECORD)


@pytest.mark.parametrize("edit", [lambda end: "", lambda end: end + end], ids=["none", "two"])
def test_a_page_without_its_markers_is_refused(load, edit):
    tables = load("tables")
    message = f"peers: the page needs one {tables.BEGIN} and, after it, one {tables.END}."
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    with pytest.raises(ValueError, match=re.escape(message)):
        tables.with_section(
            text.replace(tables.END, edit(tables.END)), tables.short_section(RECORD)
        )


def test_all_contestants_computed_the_same(load):
    for size in RECORD["results"]["cpu"].values():
        groups = [size[name] for name in ("processes", "devices") if name in size] + list(
            size["torch"].values()
        )
        for group in groups:
            losses = np.array(list(group["losses"].values()))
            assert len(losses) >= 6
            assert losses.shape[1] == load("measure").CHECKED_STEPS
            np.testing.assert_allclose(losses, losses[:1].repeat(len(losses), 0), rtol=1e-4)
            assert losses[0, -1] < 0.9 * losses[0, 0]  # and they learned


def test_speeds_of_what_computes_something_else_are_not_compared(load):
    agreement = load("measure").agreement
    right = [(5.5 - 0.1 * i, 2.0) for i in range(10)]
    wrong = [*right[:9], (right[9][0] * 1.001, 2.0)]
    assert agreement({"a": right, "b": right}, 1e-4, 1e-2)["b"] == {"loss": 0.0, "grad_norm": 0.0}
    with pytest.raises(
        SystemExit, match=r"^peers: b computed something else; \(loss, gradient norm\) by step:\n"
    ):
        agreement({"a": right, "b": wrong}, 1e-4, 1e-2)
    with pytest.raises(SystemExit, match=r"^peers: b computed something else;"):
        agreement({"a": right, "b": [*right[:9], (float("nan"), 2.0)]}, 1e-4, 1e-2)


def test_lines_are_counted_without_blanks_and_comments(load):
    measure = load("measure")
    jobs = load("jobs")
    assert measure.lines_of(jobs.Contestant("shardopt", "ddp", 2)) == 9
    rows = RECORD["results"]["cpu"]["128x4"]["processes"]["contestants"]
    for name in ("shardopt fsdp", "jax fsdp", "jax jit"):
        assert rows[name]["lines"] == measure.lines_of(jobs.Contestant(*name.split(), 2))


@pytest.mark.slow  # a script that is run by hand
def test_others_get_the_same_parameters_in_their_own_layouts(load, tmp_path):
    task = load("task")
    maxtext = load("contestants.maxtext")
    levanter = load("contestants.levanter")
    config = task.Config(dim=16, num_layers=3, num_heads=2, batch=4, length=8)
    task.write_task(config, tmp_path, count=1)
    params = task.Task(config, tmp_path, 0, 1).params()
    attention = params["blocks"]["attention"]
    mlp = params["blocks"]["mlp"]

    leaves = maxtext.leaves_of(params)
    assert sum(leaf.size for leaf in leaves.values()) == sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )
    key, gate = (
        leaves[f"decoder.layers.{name}.kernel"] for name in ("self_attention.key", "mlp.wi_0")
    )
    np.testing.assert_array_equal(key[:, 2], attention["qkv"][2, :, 1])  # block 2, the second part
    np.testing.assert_array_equal(gate[:, 2], mlp["up"][2, :, 0])
    np.testing.assert_array_equal(leaves["decoder.logits_dense.kernel"], params["head"].T)
    unstacked = maxtext.with_unstacked_blocks(leaves)
    # of each of nine leaves, one for each of three blocks
    assert len(unstacked) == len(leaves) + 9 * (3 - 1)
    np.testing.assert_array_equal(
        unstacked["decoder.layers_2.self_attention.key.kernel"], key[:, 2]
    )

    leaves = levanter.leaves_of(params)
    assert sum(leaf.size for leaf in leaves.values()) == sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )
    names = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    query, key, out, up, down = (
        leaves[f"transformer.layers.stacked.{name}.weight"][2] for name in names
    )
    # [H, 1, K, D]
    np.testing.assert_array_equal(query, np.moveaxis(attention["qkv"][2, :, 0], 0, -1)[:, None])
    np.testing.assert_array_equal(key, np.moveaxis(attention["qkv"][2, :, 1], 0, -1))
    np.testing.assert_array_equal(out, np.moveaxis(attention["out"][2], -1, 0))  # [D, H, K]
    np.testing.assert_array_equal(up, mlp["up"][2, :, 1].T)
    np.testing.assert_array_equal(down, mlp["down"][2].T)


def test_others_are_compared_with_the_same_strategy_and_their_lines_are_counted_without_them(load):
    measure = load("measure")
    jobs = load("jobs")
    rows = [
        "shardopt fsdp",
        "maxtext ddp",
        "maxtext fsdp",
        "levanter fsdp",
        "torch alone",
        "maxtext stacked",
    ]
    assert measure.rivals("shardopt fsdp", rows) == [
        "maxtext fsdp",
        "levanter fsdp",
        "torch alone",
        "maxtext stacked",
    ]
    assert measure.lines_of(jobs.Contestant("levanter", "fsdp", 1, "/elsewhere/python")) == 50
    assert measure.lines_of(jobs.Contestant("maxtext", "fsdp", 1, "/elsewhere/python")) == 34


def test_a_contestant_is_run_by_the_python_that_has_its_library(load, tmp_path):
    jobs = load("jobs")
    failing_contestant, missing_contestant = (
        jobs.Contestant("maxtext", "fsdp", 1, python)
        for python in ("/bin/false", "/nowhere/python")
    )
    with (
        pytest.raises(FileNotFoundError, match="/nowhere/python"),
        jobs.running(missing_contestant, tmp_path),
    ):
        pass
    message = r"^maxtext fsdp did not take its first step\.\n"
    with pytest.raises(RuntimeError, match=message), jobs.running(failing_contestant, tmp_path):
        pass


def test_flops_of_a_token_are_those_of_the_products(load):
    gpu = load("gpu")
    config = gpu.SIZES["124M"]
    # 4 + 9 squares of the width a block, and the tied head
    products = 12 * 13 * 768**2 + 50304 * 768
    norms = (2 * 12 + 1) * 768
    assert gpu.flops_per_token(config) == 6 * (products + norms) + 12 * 12 * 768 * 1024
    assert gpu.peak_flops("NVIDIA H200") == 989.4e12
    untied = config._replace(tied=False)  # the embedding is then looked up only
    assert gpu.flops_per_token(untied) == gpu.flops_per_token(config)
    assert gpu.peak_flops("cpu") is None


def test_the_copy_moves_as_many_bytes_as_the_update(load):
    gpu = load("gpu")
    update, copy = gpu.jax_pair(8 * 4096)
    assert 2 * copy().nbytes == gpu.UPDATE_BYTES * 8 * 4096  # read and written
    update()
    update()  # the donated array is replaced
    rates = gpu.rates_of("jax", 8 * 4096, 1)
    assert set(rates) == {"update_bytes_per_second", "copy_bytes_per_second"}
    assert all(rate > 0 for rate in rates.values())


def test_processes_of_jax_leave_torch_half_the_gpu(load, monkeypatch):
    for name in ("PREALLOCATE", "MEM_FRACTION"):
        monkeypatch.setenv(f"XLA_PYTHON_CLIENT_{name}", "unset")
    load("gpu").share_device()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


def test_a_library_that_was_not_measured_at_a_size_has_a_gap_there(load, tmp_path):
    record = json.loads(json.dumps(RECORD))
    size = next(iter(record["results"]["cpu"].values()))
    for name in [
        name
        for name in size["processes"]["contestants"]
        if name.startswith(("maxtext", "levanter"))
    ]:
        del size["processes"]["contestants"][name]
    record["results"].pop("maxtext", None)
    other = json.loads(json.dumps(size))
    row = size["processes"]["contestants"]["shardopt fsdp"]
    other["processes"]["contestants"]["levanter fsdp"] = row | {
        "tokens_per_second": 1234.0,
        "lines": 45,
    }
    record["results"]["cpu"] = {"without": size, "with": other}
    record["results"]["levanter"] = {"levanter": "1.2", "jax": "0.10.2"}
    section = load("tables").full_section(record)
    assert '| fsdp, Levanter | `Trainer`, `fsdp_axis="embed"` | 45 | - | - | - | 1,234 |' in section
    assert ", Levanter 1.2 (with jax 0.10.2). Sizes are" in section
    load("plot").draw(record["results"], tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_gpu_is_told_as_a_table(load):
    script = load("tables")
    gpu = load("gpu")
    row = {
        "tokens_per_second": 400_000.0,
        "mfu": 0.363,
        "device_peak_bytes": 41_200_000_000,
        "seconds_to_first_step": 61.2,
    }
    size = {
        "config": gpu.SIZES["124M"]._asdict(),
        "contestants": {
            "shardopt ddp": row,
            "torch compiled": row | {"tokens_per_second": 390_000.0},
        },
        "update": {"jax": {"share_of_best_copy": 0.91}, "torch": {"share_of_best_copy": 0.95}},
    }
    results = {"device": "NVIDIA H200", "torch": "2.13.0+cu130", "sizes": {"124M": size}}
    section = script.full_section(RECORD, {"versions": {"jax": "0.12.0"}, "results": results})
    for line in (
        "| NVIDIA H200 | with | tokens/s | MFU | GB | first step |",
        "| GPT-2 124M, 16 x 1024, **shardopt** | `so.ddp`, bf16 | 400,000 | 36.3% | 41 | 61 s |",
        (
            "| GPT-2 124M, 16 x 1024, torch | `torch.compile`, bf16 autocast, fused AdamW | 390,000"
            " | 36.3% | 41 | 61 s |"
        ),
        (
            "jax 0.12.0, torch 2.13.0+cu130. AdamW's update, of the bandwidth of a copy: 124M: jax"
            " 91%, torch 95%."
        ),
    ):
        assert f"\n{line}\n" in section
    assert gpu.NOT_MEASURED not in section


@pytest.mark.slow
def test_jax_by_hand_takes_the_steps_of_shardopt(load, tmp_path):
    task = load("task")
    load("contestants.jax")
    config = task.Config(dim=32, num_layers=2, num_heads=2, batch=8, length=16)
    task.write_task(config, tmp_path, count=4)
    local_task = task.Task(config, tmp_path, 0, 1)
    for strategy in ("ddp", "fsdp"):
        both = [
            getattr(load(f"contestants.{library}"), strategy)(local_task)
            for library in ("shardopt", "jax")
        ]
        with jax.numpy_rank_promotion("allow"):  # by hand, as people write it
            ours, by_hand = (np.array([next(steps) for _ in range(3)]) for steps in both)
        np.testing.assert_allclose(ours, by_hand, rtol=1e-5)
