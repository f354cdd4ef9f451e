"""Four processes load open weights, each the bytes of its own shards, and save them together."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import oracle
from support.paths import ROOT
from support.processes import run_processes

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
MEGABYTE = 2**20


def shapes():
    """The tensors of a Llama of 55 million parameters."""
    D = SIZES["hidden_size"]
    F = SIZES["intermediate_size"]
    V = SIZES["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for i in range(SIZES["num_hidden_layers"]):
        block = f"model.layers.{i}."
        tensors |= {f"{block}self_attn.{name}_proj.weight": (D, D) for name in "qkvo"}
        tensors |= {f"{block}mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        tensors |= {f"{block}mlp.down_proj.weight": (D, F)}
        tensors |= {
            f"{block}{name}.weight": (D,)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    return tensors


def test_each_process_reads_its_shards_and_writes_its_part(tmp_path):
    oracle.write_folder(tmp_path / "model", {"model_type": "llama"} | SIZES | HEADS, shapes())
    said = run_processes(
        ROOT / "tests" / "processes" / "worker_open_weights.py", 4, tmp_path, timeout=700
    )
    reports = [json.loads(process.last) for process in said]
    for report in reports:
        assert report["shards"] <= report["read"] <= 1.3 * report["shards"]
        assert report["rise"] <= report["shards"] + report["largest"] + 16 * MEGABYTE
    assert len({report["loss"] for report in reports}) == 1
    before = load_file(tmp_path / "model" / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    after = {}
    for file in set(index["weight_map"].values()):
        after |= load_file(tmp_path / "out" / file)
    assert after.keys() == before.keys()
    for name, numbers in before.items():
        np.testing.assert_array_equal(after[name], numbers, err_msg=name)
