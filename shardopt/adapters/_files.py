"""Adapters in a folder: A and B as safetensors, and a hash of the base that they were trained on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from shardopt.checkpoint._hashed import hash_of_leaves
from shardopt.core import PyTree, error_text, leaves_with_paths, plural, value_error
from shardopt.core._extras import require
from shardopt.nn._low_rank import FACTORS
from shardopt.runtime._files import write_atomic

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def save_adapters(
    folder: Path, tensors: dict[str, np.ndarray], settings: dict[str, object], params: PyTree
) -> None:
    """Write tensors and settings; all processes take part, and the first one writes.

    The settings are written last.
    """
    require("safetensors", extra="huggingface")
    from safetensors.numpy import save

    metadata = {"format": "pt", "base_hash": base_hash(params)}
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        unfinished = folder / f"{WEIGHTS}.unfinished"
        # save_file would let nobody else read it
        unfinished.write_bytes(save(tensors, metadata=metadata))
        unfinished.replace(folder / WEIGHTS)
        write_atomic(folder / CONFIG, json.dumps(settings, indent=2) + "\n")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"adapters in {folder}")


def read_adapters(
    folder: Path, shapes: dict[str, tuple[int, ...]], params: PyTree
) -> dict[str, np.ndarray]:
    """Return the tensors of a folder, which must have these names and shapes.

    Raises:
      ValueError: if the base has another hash than the base of the tensors, or a tensor does not
        fit. Files of peft have no hash.
    """
    require("safetensors", extra="huggingface")
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="numpy") as file:
        stored_hash = (file.metadata() or {}).get("base_hash")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, since it is no dict
    if stored_hash is not None and stored_hash != (actual_hash := base_hash(params)):
        problem = (
            f"the adapters were trained on another base: its hash was {stored_hash}, and is"
            f" {actual_hash} here."
        )
        raise value_error(problem, fix="load the frozen parameters that they were trained on.")
    misfits = [
        f"{name}: {tensors[name].shape if name in tensors else 'absent'} in the folder,"
        f" {shapes.get(name, 'absent')} here"
        for name in sorted(tensors.keys() | shapes.keys())
        if name not in tensors or tensors[name].shape != shapes.get(name)
    ]
    if misfits:
        problem = f"{plural(len(misfits), 'tensor')} of the folder do not fit."
        raise value_error(
            problem, misfits, "use the targets and the rank of the adapters in the folder."
        )
    return tensors


def read_settings(folder: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of finished adapters in a folder.

    Raises:
      FileNotFoundError: if it has no settings, which are written last.
      ValueError: if the settings are damaged, or one of these names is missing.
    """
    path = folder / CONFIG
    if not path.exists():
        problem = (
            f"{folder} has no {CONFIG}, so it holds no adapters, or saving them did not finish."
        )
        raise FileNotFoundError(error_text(problem, fix="give the folder that save wrote."))
    fix = "copy the file again from where it came."
    try:
        settings = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise value_error(f"{path} is damaged: {error}.", fix=fix) from error
    missing = [name for name in names if name not in settings]
    if missing:
        raise value_error(f"{path} has no {' and no '.join(missing)}.", fix=fix)
    return settings


def check_settings(stored_settings: dict[str, Any], settings: dict[str, object]) -> None:
    """Refuse stored adapters that have other settings.

    Raises:
      ValueError: if a setting differs.
    """
    different = [
        f"{name}: {stored_settings.get(name)!r} in the folder, {value!r} here"
        for name, value in settings.items()
        if stored_settings.get(name) != value
    ]
    if different:
        raise value_error(
            "the adapters were trained with other settings.", different, "use their settings."
        )


def factors_of(params: PyTree) -> dict[str, jax.Array]:
    """Return key path -> A or B."""
    return {path: leaf for path, leaf in leaves_with_paths(params) if _is_factor(path)}


def _is_factor(path: str) -> bool:
    return path.rpartition("/")[2] in FACTORS


def with_factors(params: PyTree, factors: dict[str, np.ndarray]) -> PyTree:
    """Return the parameters with other A and B, in the placement and dtype of A and B in `params`."""
    leaves = [
        _placed(factors[path], leaf) if path in factors else leaf
        for path, leaf in leaves_with_paths(params)
    ]
    return jax.tree.structure(params).unflatten(leaves)


def base_hash(params: PyTree) -> str:
    """Return a hash of all leaves but A and B. It does not depend on how they are sharded."""
    return hash_of_leaves(
        (path, leaf) for path, leaf in leaves_with_paths(params) if not _is_factor(path)
    )


def _placed(tensor: np.ndarray, leaf: jax.Array) -> jax.Array:
    tensor = tensor.astype(leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return jnp.asarray(tensor)
    return jax.make_array_from_callback(tensor.shape, sharding, lambda index: tensor[index])
