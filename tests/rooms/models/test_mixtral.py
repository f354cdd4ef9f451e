"""The decoder with experts and Hugging Face's Mixtral: out and in again, what transformers computes from it, what is refused."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import shardopt as so
from shardopt.models import export_safetensors, import_safetensors, moe

CONFIG = moe.MoEConfig(
    vocab_size=32,
    dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    num_experts=4,
    hidden=12,
    balance=None,
    max_length=64,
    rope_base=1e6,
    norm_epsilon=1e-5,
)
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
LOGITS = [[-1.39595, 0.72648, 0.38921, -1.26584], [-0.85590, 0.19777, 0.58183, -1.00407]]
"""Of positions 0 and 7, tokens 0, 8, 16 and 24: transformers' MixtralForCausalLM of this file."""


def sines(config):
    """Parameters that a formula gives, the same everywhere; loads stay 0."""
    abstract = jax.eval_shape(lambda: moe.init(config, jax.random.key(0)))
    leaves, tree = jax.tree.flatten_with_path(abstract)
    sizes = np.cumsum([0, *(leaf.size for _, leaf in leaves)])
    values = [
        np.sin(np.arange(begin, begin + leaf.size)).reshape(leaf.shape) * ("router_" not in str(path))
        for begin, (path, leaf) in zip(sizes, leaves, strict=False)
    ]
    return tree.unflatten([jnp.asarray(value, leaf.dtype) for value, (_, leaf) in zip(values, leaves, strict=True)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_out_and_in_again_is_the_same_also_of_sharded_experts(dtype, tmp_path, mesh_of):
    config = dataclasses.replace(CONFIG, param_dtype=dtype, tied=dtype == jnp.bfloat16)
    params = sines(config)
    opt = so.fsdp(
        optax.sgd(0.1),
        mesh_of(data=2, expert=2),
        moe.model(config),
        expert_leaves=moe.expert_leaves,
        frozen=moe.frozen,
        min_shard_elements=1,
    )
    export_safetensors(tmp_path / "hf", opt.init(params).params, config)
    again, its_config = import_safetensors(tmp_path / "hf")
    assert its_config == config
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_the_logits_are_those_that_transformers_computes(tmp_path):
    """LOGITS are those of its MixtralForCausalLM for this file: transformers 5.23.0, torch 2.13.0, float32 on a CPU."""
    export_safetensors(tmp_path, sines(CONFIG), CONFIG)
    assert len(load_file(tmp_path / "model.safetensors")) == 3 + 2 * (7 + 4 * 3)
    params, config = import_safetensors(tmp_path)
    ours = np.asarray(moe.logits_of(config, jax.tree.map(jnp.asarray, params), TOKENS))[0]
    np.testing.assert_allclose(ours[::7, ::8], LOGITS, rtol=1e-3, atol=1e-4)


def test_a_model_in_several_files_is_read(tmp_path):
    export_safetensors(tmp_path, sines(CONFIG), CONFIG)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: x for name, x in tensors.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    again, _ = import_safetensors(tmp_path)
    np.testing.assert_array_equal(again["blocks"]["experts"]["up"], sines(CONFIG)["blocks"]["experts"]["up"])
    export_safetensors(tmp_path, sines(CONFIG), CONFIG)
    path.unlink()
    with pytest.raises(FileNotFoundError):  # the index is gone
        import_safetensors(tmp_path)


def test_what_mixtral_cannot_be_is_refused_with_every_reason(tmp_path):
    config = dataclasses.replace(CONFIG, score="sigmoid", shared_hidden=4, balance="bias")
    message = (
        "export_safetensors: the model is none that Mixtral can be.\n  shared_hidden is 4, must be 0\n"
        "  score is 'sigmoid', must be 'softmax'\n  balance is 'bias', and Mixtral's router has none"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        export_safetensors(tmp_path / "hf", sines(config), config)
    assert not (tmp_path / "hf").exists()


def test_a_mixtral_that_moe_cannot_be_is_refused(tmp_path):
    export_safetensors(tmp_path, sines(CONFIG), CONFIG)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"sliding_window": 16, "hidden_act": "gelu"}))
    message = (
        f"import_safetensors: {tmp_path} holds a model that moe cannot be.\n"
        "  hidden_act is 'gelu', must be 'silu'\n  sliding_window is 16, must be None"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        import_safetensors(tmp_path)
    del said["num_local_experts"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    message = f"import_safetensors: {tmp_path}/config.json describes no Mixtral.\n  num_local_experts is missing"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        import_safetensors(tmp_path)
