"""The GPT and Hugging Face's files: out and in again, what transformers computes from them, what is refused."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import shardopt as so
from shardopt.models import export_safetensors, gpt, import_safetensors

CONFIG = gpt.GPTConfig(vocab_size=32, dim=16, num_layers=2, num_heads=2, max_length=64)
LOGITS = [[0.08940, -0.64880, 0.80971, -0.47328], [1.73748, -1.53819, 0.39412, 0.99201]]
"""Of positions 0 and 7, tokens 0, 8, 16 and 24."""


def sines(config):
    """Parameters that a formula gives, the same everywhere."""
    abstract = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    leaves, tree = jax.tree.flatten(abstract)
    sizes = np.cumsum([0, *(leaf.size for leaf in leaves)])
    values = [
        np.sin(np.arange(begin, begin + leaf.size)).astype(np.float32).reshape(leaf.shape)
        for begin, leaf in zip(sizes, leaves, strict=False)
    ]
    return jax.tree.unflatten(tree, [jnp.asarray(value) for value in values])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_out_and_in_again_is_the_same_also_of_a_split_model(tied, dtype, tmp_path, mesh_of):
    config = gpt.GPTConfig(
        vocab_size=32, dim=16, num_layers=2, num_heads=2, max_length=64, tied=tied, rope_base=500.0, param_dtype=dtype
    )
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), sines(config))
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=2, tensor=2), gpt.model(config), rules=gpt.rules, min_shard_elements=1)
    export_safetensors(tmp_path / "hf", opt.init(params).params, config)
    again, its_config = import_safetensors(tmp_path / "hf")
    assert its_config == config
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def llama(tensors, heads, tokens, base=10_000.0):
    """A Llama in numpy float64, by the names of its tensors: y = x W^T, rotary positions on halves of a head."""
    w = {name.removeprefix("model.").removesuffix(".weight"): x.astype(np.float64) for name, x in tensors.items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def split(x):
        return x.reshape(len(tokens), heads, -1).transpose(1, 0, 2)

    def turn(x):
        half = x.shape[-1] // 2
        angle = np.arange(len(tokens))[:, None] / base ** (np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        parts = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
        return np.concatenate(parts, -1)

    x = w["embed_tokens"][tokens]
    for i in range(1 + max(int(name.split(".")[1]) for name in w if name.startswith("layers."))):
        at = {name.removeprefix(f"layers.{i}."): one for name, one in w.items() if name.startswith(f"layers.{i}.")}
        h = norm(x, at["input_layernorm"])
        q, k, v = (split(h @ at[f"self_attn.{name}_proj"].T) for name in "qkv")
        scores = turn(q) @ turn(k).transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((len(tokens),) * 2)), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (share / share.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(tokens), -1)
        x = x + mixed @ at["self_attn.o_proj"].T
        h = norm(x, at["post_attention_layernorm"])
        gate, up = h @ at["mlp.gate_proj"].T, h @ at["mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ at["mlp.down_proj"].T
    return norm(x, w["norm"]) @ w["lm_head"].T


def test_the_file_is_a_llama_with_the_logits_that_transformers_computes(tmp_path):
    """LOGITS are those of its LlamaForCausalLM for this file: transformers 5.23.0, torch 2.13.0, float32 on a CPU."""
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    export_safetensors(tmp_path, sines(CONFIG), CONFIG)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 3 + 2 * 9
    theirs = llama(tensors, CONFIG.num_heads, tokens)
    ours = np.asarray(gpt.logits_of(CONFIG, sines(CONFIG), tokens[None]))[0]
    np.testing.assert_allclose(theirs[::7, ::8], LOGITS, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_what_transformers_saves_is_read(tmp_path):
    """It writes head_dim, and the rotary base in a dict of its own."""
    export_safetensors(tmp_path, sines(CONFIG), CONFIG)
    said = json.loads((tmp_path / "config.json").read_text())
    del said["rope_theta"], said["torch_dtype"]
    said |= {"dtype": "float32", "head_dim": 8, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert import_safetensors(tmp_path)[1].rope_base == 500.0


def test_a_model_that_gpt_cannot_be_is_refused_with_every_reason(tmp_path):
    export_safetensors(tmp_path, sines(CONFIG), CONFIG)
    said = json.loads((tmp_path / "config.json").read_text())
    said |= {"num_key_value_heads": 1, "attention_bias": True, "rope_scaling": {"factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    message = (
        f"import_safetensors: {tmp_path} holds a model that gpt cannot be.\n"
        "  num_key_value_heads is 1, must be 2\n"
        "  attention_bias is True, must be False\n"
        "  rope_scaling is {'factor': 8.0}, must be None"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        import_safetensors(tmp_path)


def test_what_describes_no_llama_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 16, "vocab_size": "many"}')
    message = (
        f"import_safetensors: {tmp_path}/config.json describes no Llama.\n  intermediate_size is missing\n"
        "  num_hidden_layers is missing\n  num_attention_heads is missing\n  vocab_size is missing"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        import_safetensors(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    export_safetensors(tmp_path, sines(CONFIG), CONFIG)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(48, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:30]
    save_file(tensors, path)
    message = (
        f"import_safetensors: the tensors in {path} do not fit.\n"
        "  model.norm.weight: missing\n"
        "  model.layers.0.mlp.up_proj.bias: not part of a gpt\n"
        "  lm_head.weight: shape (30, 16), must be (32, 16)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        import_safetensors(tmp_path)
