"""Models as folders that Hugging Face's tools read, and back: safetensors and config.json in the form of Llama and Mixtral."""

import dataclasses
import json
import os
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import format_error
from shardopt.core.extras import require
from shardopt.core.types import leaves_with_paths
from shardopt.models import gpt, llama, mixtral, moe
from shardopt.models.gpt import GPTConfig, Params
from shardopt.models.llama import Place
from shardopt.models.moe import MoEConfig

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def export_safetensors(directory: str | os.PathLike[str], params: Params, config: GPTConfig | MoEConfig) -> Path:
    """Write parameters as `model.safetensors` and `config.json`, which transformers reads: a GPT as a Llama, a moe as a Mixtral.

    The whole model is gathered to the host. Of a moe the loads of the last step are left out.

    Args:
      directory: a folder, made if it does not exist. Files of these names in it are replaced, an index is removed.
      params: the parameters, on one device or sharded, all of them on devices of this process.
      config: the shape of the model.

    Returns:
      The folder.

    Raises:
      ModuleNotFoundError: if safetensors is not installed.
      ValueError: if a leaf has parts on devices of other processes, or a moe is no Mixtral: its router has a sigmoid or biases,
        say, or there is a shared expert.

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
    form = _form_of(config)
    leaves = {path: np.asarray(leaf) for path, leaf in leaves_with_paths(params)}
    described = form.described(config, str(leaves["embedding"].dtype))
    tensors = {}
    for name, place in form.tensor_places(config).items():
        tensor = leaves[place.path][place.at]
        tensors[name] = np.ascontiguousarray(tensor.reshape(place.shape[::-1]).T if place.at else tensor)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _INDEX).unlink(missing_ok=True)  # of several files, which would be read instead
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(described, indent=2) + "\n")
    return folder


def import_safetensors(directory: str | os.PathLike[str]) -> tuple[Params, GPTConfig | MoEConfig]:
    """Read a Llama without grouped heads, biases or scaled positions as a GPT, or a Mixtral as a moe; no code is run.

    Args:
      directory: a folder with `config.json` and `model.safetensors`, or several files and `model.safetensors.index.json`.

    Returns:
      (params, config): numpy arrays in the dtype of the file, and the shape of the model; a Mixtral comes with balance=None.

    Raises:
      ModuleNotFoundError: if safetensors is not installed.
      FileNotFoundError: if a file is missing.
      ValueError: if the model is not one that `gpt` or `moe` can be, or a tensor is missing, left over or of another shape.
    """
    require("safetensors", extra="huggingface", who="import_safetensors")
    from safetensors.numpy import load_file

    folder = Path(directory)
    said = json.loads((folder / _CONFIG).read_text())
    form, model = (mixtral, moe) if said.get("model_type") == "mixtral" else (llama, gpt)
    config = form.config_of(folder, said)
    files = [_WEIGHTS]
    if (folder / _INDEX).exists():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    tensors, places = {}, form.tensor_places(config)
    for file in files:
        tensors |= load_file(folder / file)
    _check_tensors(folder, tensors, places, "gpt" if model is gpt else "moe")
    config = dataclasses.replace(config, param_dtype=getattr(jnp, tensors["model.embed_tokens.weight"].dtype.name))
    abstract = jax.eval_shape(lambda rng: model.init(config, rng), jax.random.key(0))
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves_with_paths(abstract)}
    for name, place in places.items():
        leaf = leaves[place.path]
        leaf[place.at] = tensors[name].T.reshape(leaf[place.at].shape) if place.at else tensors[name]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves.values()), config


def _form_of(config: GPTConfig | MoEConfig) -> ModuleType:
    return mixtral if isinstance(config, MoEConfig) else llama


def _check_tensors(folder: Path, tensors: dict[str, np.ndarray], wanted: dict[str, Place], model: str) -> None:
    wrong = [f"{name}: missing" for name in wanted if name not in tensors]
    wrong += [f"{name}: not part of a {model}" for name in tensors if name not in wanted]
    wrong += [
        f"{name}: shape {tensors[name].shape}, must be {place.shape}"
        for name, place in wanted.items()
        if name in tensors and tensors[name].shape != place.shape
    ]
    if wrong:
        raise ValueError(format_error("import_safetensors", f"the tensors in {folder / _WEIGHTS} do not fit.", wrong))
