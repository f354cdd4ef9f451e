"""Export and import models as folders of Hugging Face: safetensors and config.json in the form of Llama and Mixtral."""

import dataclasses
import json
import os
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core._errors import calling, format_error
from shardopt.core._extras import require
from shardopt.core._types import leaves_with_paths
from shardopt.models import _llama as llama
from shardopt.models import _mixtral as mixtral
from shardopt.models import gpt, moe
from shardopt.models._llama import Place
from shardopt.models.gpt import GPTConfig, Params
from shardopt.models.moe import MoEConfig

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@calling("export_safetensors")
def export_safetensors(directory: str | os.PathLike[str], params: Params, config: GPTConfig | MoEConfig) -> Path:
    """Write `model.safetensors` and `config.json`, which transformers reads: a GPT as a Llama, a moe as a Mixtral.

    The whole model is gathered to the host. The loads of a moe's last step are not written.

    Args:
      directory: a folder, created if it does not exist. Existing files of these names are replaced, and an index is removed.
      params: the parameters, on one device or sharded over devices of this process.
      config: the shape of the model.

    Returns:
      The folder.

    Raises:
      ModuleNotFoundError: if safetensors is not installed.
      ValueError: if a leaf has shards on devices of other processes, or if Mixtral cannot represent a moe: for example with a
        sigmoid router, biases or a shared expert.

    Example:
      >>> import tempfile, jax
      >>> from shardopt.models import gpt
      >>> config = gpt.GPTConfig(dim=32, num_layers=2)
      >>> params = gpt.init(config, jax.random.key(0))
      >>> folder = export_safetensors(tempfile.mkdtemp(), params, config)
      >>> imported, imported_config = import_safetensors(folder)
      >>> imported_config == config, bool((imported["blocks"]["mlp"]["up"] == params["blocks"]["mlp"]["up"]).all())
      (True, True)
    """
    require("safetensors", extra="huggingface")
    from safetensors.numpy import save_file

    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)):
        problem = "the parameters are on devices of several processes."
        fix = "save a checkpoint, restore it in one process, and export from there."
        raise ValueError(format_error("export_safetensors", problem, fix=fix))
    hf_format = _format_of(config)
    leaves = {path: np.asarray(leaf) for path, leaf in leaves_with_paths(params)}
    hf_config = hf_format.described(config, str(leaves["embedding"].dtype))
    tensors = {}
    for name, place in hf_format.tensor_places(config).items():
        tensor = leaves[place.path][place.leaf_index]
        tensors[name] = np.ascontiguousarray(tensor.reshape(place.shape[::-1]).T if place.leaf_index else tensor)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _INDEX).unlink(missing_ok=True)  # transformers would read the files of an index instead
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(hf_config, indent=2) + "\n")
    return folder


@calling("import_safetensors")
def import_safetensors(directory: str | os.PathLike[str]) -> tuple[Params, GPTConfig | MoEConfig]:
    """Read a Llama as a GPT, or a Mixtral as a moe; no code of the folder is run.

    The Llama must have no grouped heads, no biases and no scaled positions.

    Args:
      directory: a folder with `config.json` and `model.safetensors`, or several files and `model.safetensors.index.json`.

    Returns:
      (params, config): numpy arrays in the dtype of the file, and the shape of the model. A Mixtral has balance=None.

    Raises:
      ModuleNotFoundError: if safetensors is not installed.
      FileNotFoundError: if a file is missing.
      ValueError: if `gpt` or `moe` cannot represent the model; if a tensor is missing, unexpected or of another shape.
    """
    require("safetensors", extra="huggingface")
    from safetensors.numpy import load_file

    folder = Path(directory)
    hf_config = json.loads((folder / _CONFIG).read_text())
    hf_format, model = (mixtral, moe) if hf_config.get("model_type") == "mixtral" else (llama, gpt)
    config = hf_format.config_of(folder, hf_config)
    files = [_WEIGHTS]
    if (folder / _INDEX).exists():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    tensors, places = {}, hf_format.tensor_places(config)
    for file in files:
        tensors |= load_file(folder / file)
    _check_tensors(folder, tensors, places, "gpt" if model is gpt else "moe")
    config = dataclasses.replace(config, param_dtype=getattr(jnp, tensors["model.embed_tokens.weight"].dtype.name))
    abstract = jax.eval_shape(lambda rng: model.init(config, rng), jax.random.key(0))
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves_with_paths(abstract)}
    for name, place in places.items():
        leaf = leaves[place.path]
        leaf[place.leaf_index] = (
            tensors[name].T.reshape(leaf[place.leaf_index].shape) if place.leaf_index else tensors[name]
        )
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves.values()), config


def _format_of(config: GPTConfig | MoEConfig) -> ModuleType:
    return mixtral if isinstance(config, MoEConfig) else llama


def _check_tensors(folder: Path, tensors: dict[str, np.ndarray], places: dict[str, Place], model: str) -> None:
    problems = [f"{name}: missing" for name in places if name not in tensors]
    problems += [f"{name}: not part of a {model}" for name in tensors if name not in places]
    problems += [
        f"{name}: shape {tensors[name].shape}, must be {place.shape}"
        for name, place in places.items()
        if name in tensors and tensors[name].shape != place.shape
    ]
    if problems:
        raise ValueError(
            format_error("import_safetensors", f"the tensors in {folder / _WEIGHTS} do not fit.", problems)
        )
