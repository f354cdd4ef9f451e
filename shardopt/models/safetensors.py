"""The GPT as a folder that Hugging Face's tools read, and back: safetensors and config.json in the form of Llama.

The GPT is a Llama with as many key heads as query heads: RMS norms of 1e-6, SwiGLU, rotary positions on the two halves
of a head, no biases. Only names and the order of dims differ: there a weight is [out, in], and every block has its own.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import format_error
from shardopt.core.extras import require
from shardopt.core.types import leaves_with_paths
from shardopt.models.gpt import GPTConfig, Params, init

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
    leaves = {path: np.asarray(leaf) for path, leaf in leaves_with_paths(params)}
    tensors = {}
    for name, place in _llama_tensors(config).items():
        tensor = leaves[place.path][place.at]
        tensors[name] = np.ascontiguousarray(tensor.reshape(place.shape[::-1]).T if place.at else tensor)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    described = _llama_config(config, str(leaves["embedding"].dtype))
    (folder / _CONFIG).write_text(json.dumps(described, indent=2) + "\n")
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
    config = _config_of(folder, json.loads((folder / _CONFIG).read_text()))
    tensors, places = load_file(folder / _WEIGHTS), _llama_tensors(config)
    _check_tensors(folder, tensors, places)
    config = dataclasses.replace(config, param_dtype=getattr(jnp, tensors["model.embed_tokens.weight"].dtype.name))
    abstract = jax.eval_shape(lambda rng: init(config, rng), jax.random.key(0))
    leaves = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in leaves_with_paths(abstract)}
    for name, place in places.items():
        leaf = leaves[place.path]
        leaf[place.at] = tensors[name].T.reshape(leaf[place.at].shape) if place.at else tensors[name]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves.values()), config


class _Place(NamedTuple):
    """Where the GPT has a tensor of a Llama: `leaf[at]`, in blocks transposed; and the shape of the tensor."""

    path: str
    at: tuple[int | slice, ...]
    shape: tuple[int, ...]


def _llama_tensors(config: GPTConfig) -> dict[str, _Place]:
    D, F, V = config.dim, config.hidden, config.vocab_size
    places = {"embed_tokens": _Place("embedding", (), (V, D)), "norm": _Place("norm", (), (D,))}
    for i in range(config.num_layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        places[f"layers.{i}.input_layernorm"] = _Place("blocks/attention/norm", (i,), (D,))
        places[f"layers.{i}.post_attention_layernorm"] = _Place("blocks/mlp/norm", (i,), (D,))
        for c, name in enumerate("qkv"):
            places[f"{attention}.{name}_proj"] = _Place("blocks/attention/qkv", (i, slice(None), c), (D, D))
        places[f"{attention}.o_proj"] = _Place("blocks/attention/out", (i,), (D, D))
        for c, name in enumerate(("gate", "up")):
            places[f"{mlp}.{name}_proj"] = _Place("blocks/mlp/up", (i, slice(None), c), (F, D))
        places[f"{mlp}.down_proj"] = _Place("blocks/mlp/down", (i,), (D, F))
    head = {} if config.tied else {"lm_head.weight": _Place("head", (), (V, D))}
    return {f"model.{name}.weight": place for name, place in places.items()} | head


def _llama_config(config: GPTConfig, dtype: str) -> dict[str, object]:
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


def _check_tensors(folder: Path, tensors: dict[str, np.ndarray], wanted: dict[str, _Place]) -> None:
    wrong = [f"{name}: missing" for name in wanted if name not in tensors]
    wrong += [f"{name}: not part of a gpt" for name in tensors if name not in wanted]
    wrong += [
        f"{name}: shape {tensors[name].shape}, must be {place.shape}"
        for name, place in wanted.items()
        if name in tensors and tensors[name].shape != place.shape
    ]
    if wrong:
        raise ValueError(format_error("import_safetensors", f"the tensors in {folder / _WEIGHTS} do not fit.", wrong))
