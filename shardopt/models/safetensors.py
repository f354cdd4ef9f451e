"""The GPT as a folder that Hugging Face's tools read, and back: safetensors and config.json in the form of Llama.

The GPT is a Llama with as many key heads as query heads: RMS norms of 1e-6, SwiGLU, rotary positions on the two halves
of a head, no biases. Only names and the order of dims differ: there a weight is [out, in], and every block has its own.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import format_error
from shardopt.core.extras import require
from shardopt.models.gpt import GPTConfig, Params

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_EPSILON = 1e-6


def export_safetensors(directory: str | os.PathLike[str], params: Params, config: GPTConfig) -> Path:
    """Write the parameters of a GPT as `model.safetensors` and `config.json`, which transformers reads as a Llama.

    The whole model is gathered to the host.

    Args:
      directory: a folder, made if it does not exist. Files of these names in it are replaced.
      params: the parameters, on one device or sharded, all of them on devices of this process.
      config: the shape of the model.

    Returns:
      The folder.

    Raises:
      ModuleNotFoundError: if safetensors is not installed.
      ValueError: if a leaf has parts on devices of other processes.

    Example:
      >>> import tempfile, jax
      >>> from shardopt.models import gpt
      >>> config = gpt.GPTConfig(dim=32, num_layers=2)
      >>> params = gpt.init(config, jax.random.key(0))
      >>> folder = export_safetensors(tempfile.mkdtemp(), params, config)
      >>> again, its_config = import_safetensors(folder)
      >>> its_config == config, bool((again["blocks"]["mlp"]["up"] == params["blocks"]["mlp"]["up"]).all())
      (True, True)
    """
    require("safetensors", extra="huggingface", who="export_safetensors")
    from safetensors.numpy import save_file

    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)):
        what = "the parameters are on devices of several processes."
        fix = "save a checkpoint, restore it in one process, and export from there."
        raise ValueError(format_error("export_safetensors", what, fix=fix))
    host, L, D = jax.tree.map(np.asarray, params), config.num_layers, config.dim
    blocks = host["blocks"]
    tensors = {"model.embed_tokens.weight": host["embedding"], "model.norm.weight": host["norm"]}
    if not config.tied:
        tensors["lm_head.weight"] = host["head"]
    for i in range(L):
        block, attention, mlp = f"model.layers.{i}", blocks["attention"], blocks["mlp"]
        tensors[f"{block}.input_layernorm.weight"] = attention["norm"][i]
        tensors[f"{block}.post_attention_layernorm.weight"] = mlp["norm"][i]
        for c, name in enumerate("qkv"):
            tensors[f"{block}.self_attn.{name}_proj.weight"] = attention["qkv"][i, :, c].reshape(D, D).T
        tensors[f"{block}.self_attn.o_proj.weight"] = attention["out"][i].reshape(D, D).T
        for c, name in enumerate(("gate", "up")):
            tensors[f"{block}.mlp.{name}_proj.weight"] = mlp["up"][i, :, c].T
        tensors[f"{block}.mlp.down_proj.weight"] = mlp["down"][i].T
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    dtype = str(host["embedding"].dtype)
    (folder / _CONFIG).write_text(json.dumps(_llama(config, dtype), indent=2) + "\n")
    return folder


def import_safetensors(directory: str | os.PathLike[str]) -> tuple[Params, GPTConfig]:
    """Read a Llama without grouped heads, biases or scaled positions as a GPT; no code is run.

    Args:
      directory: a folder with `config.json` and `model.safetensors`.

    Returns:
      (params, config): numpy arrays in the dtype of the file, and the shape of the model.

    Raises:
      ModuleNotFoundError: if safetensors is not installed.
      FileNotFoundError: if a file is missing.
      ValueError: if the model is not one that `gpt` can be, or a tensor is missing, left over or of another shape.
    """
    require("safetensors", extra="huggingface", who="import_safetensors")
    from safetensors.numpy import load_file

    folder = Path(directory)
    said = json.loads((folder / _CONFIG).read_text())
    config = _config_of(folder, said)
    tensors, L, H, K = load_file(folder / _WEIGHTS), config.num_layers, config.num_heads, config.head_dim
    _check_tensors(folder, tensors, config)
    embedding = tensors["model.embed_tokens.weight"]
    config = dataclasses.replace(config, param_dtype=getattr(jnp, embedding.dtype.name))

    def stack(name: str) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{i}.{name}.weight"].T for i in range(L)])

    D, qkv = config.dim, [stack(f"self_attn.{name}_proj") for name in "qkv"]
    params: dict[str, Any] = {
        "embedding": embedding,
        "blocks": {
            "attention": {
                "norm": stack("input_layernorm"),
                "qkv": np.stack(qkv, axis=2).reshape(L, D, 3, H, K),
                "out": stack("self_attn.o_proj").reshape(L, H, K, D),
            },
            "mlp": {
                "norm": stack("post_attention_layernorm"),
                "up": np.stack([stack("mlp.gate_proj"), stack("mlp.up_proj")], axis=2),
                "down": stack("mlp.down_proj"),
            },
        },
        "norm": tensors["model.norm.weight"],
    }
    if not config.tied:
        params["head"] = tensors["lm_head.weight"]
    return params, config


def _llama(config: GPTConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_base,
        "rms_norm_eps": _EPSILON,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def _config_of(folder: Path, said: dict[str, Any]) -> GPTConfig:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [f"{name} is missing" for name in sizes if not isinstance(said.get(name), int)]:
        raise ValueError(format_error("import_safetensors", f"{folder / _CONFIG} describes no Llama.", missing))
    dim, hidden, layers, heads, vocab = (said[name] for name in sizes)
    rope = said.get("rope_parameters") or {}
    wanted = {
        "model_type": ("llama", said.get("model_type")),
        "num_key_value_heads": (heads, said.get("num_key_value_heads", heads)),
        "head_dim": (dim // heads, said.get("head_dim") or dim // heads),
        "hidden_act": ("silu", said.get("hidden_act", "silu")),
        "rms_norm_eps": (_EPSILON, said.get("rms_norm_eps", _EPSILON)),
        "attention_bias": (False, said.get("attention_bias", False)),
        "mlp_bias": (False, said.get("mlp_bias", False)),
        "rope_scaling": (None, said.get("rope_scaling")),
        "rope_type": ("default", rope.get("rope_type", "default")),
    }
    wrong = [f"{name} is {found!r}, must be {want!r}" for name, (want, found) in wanted.items() if found != want]
    if hidden % dim:
        wrong += [f"intermediate_size is {hidden}, must be a multiple of hidden_size {dim}"]
    if wrong:
        raise ValueError(format_error("import_safetensors", f"{folder} holds a model that gpt cannot be.", wrong))
    return GPTConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        mlp_multiple=hidden // dim,
        max_length=said.get("max_position_embeddings", 1024),
        rope_base=said.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        tied=said.get("tie_word_embeddings", False),
    )


def _check_tensors(folder: Path, tensors: dict[str, np.ndarray], config: GPTConfig) -> None:
    D, F, V = config.dim, config.hidden, config.vocab_size
    block = {f"self_attn.{name}_proj": (D, D) for name in "qkvo"} | {"mlp.down_proj": (D, F)}
    block |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D)}
    block |= {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
    wanted: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    wanted |= {} if config.tied else {"lm_head.weight": (V, D)}
    wanted |= {
        f"model.layers.{i}.{name}.weight": shape for i in range(config.num_layers) for name, shape in block.items()
    }
    wrong = [f"{name}: missing" for name in wanted if name not in tensors]
    wrong += [f"{name}: not part of a gpt" for name in tensors if name not in wanted]
    wrong += [
        f"{name}: shape {tensors[name].shape}, must be {shape}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        raise ValueError(format_error("import_safetensors", f"the tensors in {folder / _WEIGHTS} do not fit.", wrong))
