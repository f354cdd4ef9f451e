"""Open weights: the logits of the decoder equal transformers, on several meshes.

Files go in and out; wrong files are refused.
"""

import itertools

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from support import oracle
from support.tiers import tiered

import shardopt as so
from shardopt.models import decoder, from_pretrained

MESHES = {
    "fsdp": {"data": 4},
    "tensor": {"data": 2, "tensor": 2},
    "pipeline": {"data": 2, "pipeline": 2},
}
CASES = list(oracle.CASES)
LATER = CASES[CASES.index("phi3_longrope") :]
"""Cases that differ from another one in little."""
FAMILY = {name: oracle.CASES[name][0] for name in CASES}
QUICK_LOGITS = {
    "llama3",
    "qwen2_windows",
    "olmo2",
    "gemma2",
    "phi3",
    "gpt2",
    "gpt_oss",
    "deepseek_v3",
    "smollm3",
}
"""Cases that together have each part of the decoder: the others differ from one of them in little.
"""
VARIANTS = [name for name in LATER if FAMILY[name] in map(FAMILY.get, CASES[: CASES.index(name)])]
"""Later cases of a family that has another one: their steps are on one mesh."""


def strategy(mesh, model):
    """A strategy that shards all that it can over the mesh."""
    tx = optax.adamw(oracle.RATE, eps=oracle.EPSILON, weight_decay=oracle.DECAY)
    options = {"rules": model.rules, "min_shard_elements": 1}
    if "pipeline" in mesh.shape:
        return so.hybrid(tx, mesh, model.model, micro_batches=2, **options)
    return so.fsdp(tx, mesh, model.model, **options)


@pytest.fixture
def opened(tmp_path):
    """Return a function from a case to its open weights and the results of transformers."""

    def open_case(name):
        config, shapes, results = oracle.read_case(name)
        return from_pretrained(oracle.write_folder(tmp_path / name, config, shapes)), results

    return open_case


@pytest.mark.parametrize("name", tiered(CASES, lambda name: name in QUICK_LOGITS))
def test_logits_are_those_of_transformers(name, opened):
    model, results = opened(name)
    params = model.load_params(progress=False)
    tokens = oracle.TOKENS[: oracle.SHOWN, :-1]
    logits = jax.jit(lambda params: decoder.logits_of(model.config, params, tokens))(params)
    np.testing.assert_allclose(logits, results["logits"], rtol=0, atol=1e-5)


QUICK = {("gpt2", "fsdp")}
"""Steps of the default tier: compiling one takes seconds."""
ROWS = [
    (name, mesh)
    for name, mesh in itertools.product(CASES, MESHES)
    if name not in VARIANTS or mesh == "fsdp"
]
STEPS = tiered(ROWS, lambda step: step in QUICK, ids="-".join)


@pytest.mark.parametrize(("name", "mesh"), STEPS)
def test_a_step_of_adamw_is_that_of_torch(name, mesh, opened, mesh_of, tmp_path):
    model, results = opened(name)
    opt = strategy(mesh_of(**MESHES[mesh]), model)
    state, metrics = opt.step(
        model.load(opt, progress=False), {"tokens": oracle.TOKENS.astype(np.int32)}
    )
    np.testing.assert_allclose(metrics["loss"], results["loss"], rtol=1e-5)
    model.save(tmp_path / "stepped", state.params, progress=False)
    stepped = load_file(tmp_path / "stepped" / "model.safetensors")
    for tensor, numbers in stepped.items():
        np.testing.assert_allclose(
            oracle.sampled(numbers), results[f"step/{tensor}"], rtol=0, atol=1e-4, err_msg=tensor
        )
