"""The two JSON files of a checkpoint: the record, `shardopt.json`, and the manifest,
`MANIFEST.json`.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from shardopt.checkpoint._multihost import assigned_names, exchange
from shardopt.checkpoint._store import Leaf, StoredLeaves, check_leaves, describe, dtype_of
from shardopt.checkpoint._tree import (
    Json,
    JsonObject,
    LeafPath,
    check_structure,
    describe_structure,
    leaves_by_path,
)
from shardopt.core import (
    CheckpointError,
    DamagedCheckpointError,
    PyTree,
    check_integer,
    error_text,
    format_error,
    type_error,
    value_error,
)
from shardopt.core._extras import version_of

T = TypeVar("T")

SMALL_BYTES = 2**16
"""A file of at most this size has no large array, and is compared before anything is read."""

RECORD_NAME = "shardopt.json"
MANIFEST_NAME = "MANIFEST.json"
_RECORD_FORMAT = 1
_MANIFEST_FORMAT = 1
_VALUES = "/d/"
"""The folders of an OCDBT store for the values of arrays, in the names of files."""


class Meta(NamedTuple):
    """The record of a checkpoint.

    Attributes:
      step: the number of the checkpoint.
      leaves: shape and dtype of every leaf by path, in the order of `jax.tree.leaves`.
      params: the structure of the parameters, see `describe_structure`; None if the state has none.
      metrics: the metrics of this step.
      extra: JSON values of the caller, for instance the position in the training rows.
      sums: the sum of the bits of each leaf in hexadecimal, see `_sums`; None if the state was not
        verified.
    """

    step: int
    leaves: StoredLeaves
    params: Json
    metrics: dict[str, float]
    extra: JsonObject
    sums: dict[LeafPath, str] | None = None


def describe_state(
    state: PyTree,
    step: int | None = None,
    metrics: Mapping[str, ArrayLike] | None = None,
    extra: JsonObject | None = None,
) -> Meta:
    """Return the record of a state; refuse a state that cannot be stored.

    Args:
      state: pytree of arrays.
      step: the number of the checkpoint; by default `state.step`.
      metrics: scalars by name.
      extra: JSON values.
    """
    step_number = _check_step(step, state)
    check_leaves(state)
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        problem = (
            f"extra must be JSON (dicts, lists, strings, numbers, true, false, null): {error}."
        )
        raise TypeError(
            format_error("checkpoint", problem, fix="convert arrays with .tolist().")
        ) from error
    leaves = {path: describe(leaf) for path, leaf in leaves_by_path(state).items()}
    params = getattr(state, "params", None)
    if params is not None and len(jax.tree.leaves(params)) != _num_params(leaves):
        # not a field of the state: these leaves are stored under other names, or not stored
        params = None
    return Meta(
        step=step_number,
        leaves=leaves,
        params=None if params is None else describe_structure(jax.tree.structure(params)),
        metrics=_as_numbers(metrics or {}),
        extra=extra or {},
    )


def _check_step(step: int | None, state: PyTree) -> int:
    if step is None:
        step = getattr(state, "step", None)
        if step is None:
            problem = f"step must be given, because the state ({type(state).__name__}) has none."
            raise type_error(problem, fix="pass step=.")
        step = int(np.asarray(jax.device_get(step)))
    check_integer("step", step)
    if step < 0:
        raise value_error(f"step must not be negative, got {step}.", fix="count steps from 0.")
    return int(step)


def write_meta(folder: Path, meta: Meta) -> None:
    """Write the record into a step's folder, one field a line, so that people can read it."""
    field_lines = [
        f"{json.dumps(name)}: {json.dumps(value)}" for name, value in to_json(meta).items()
    ]
    (folder / RECORD_NAME).write_text("{\n" + ",\n".join(field_lines) + "\n}\n")


def read_meta(folder: Path) -> Meta:
    """Return the record in a step's folder; see `from_json` for errors."""
    source = f"{folder.name}/{RECORD_NAME}"
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(f"{source} cannot be read", error) from error
    return from_json(source, record)


def to_json(meta: Meta) -> JsonObject:
    """Return the record as JSON, with the package versions that write it."""
    leaves = {
        "/".join(path): {"dtype": leaf.dtype, "shape": list(leaf.shape)}
        for path, leaf in meta.leaves.items()
    }
    # the version of shardopt is unknown if it runs from a source folder
    versions = {
        name: version_of(name) or "unknown"
        for name in ("shardopt", "jax", "optax", "orbax-checkpoint")
    }
    sums = meta.sums and {"/".join(path): text for path, text in meta.sums.items()}
    record = {"format": _RECORD_FORMAT, "versions": versions}
    return record | meta._replace(leaves=leaves, sums=sums)._asdict()


def from_json(source: str, record: Json) -> Meta:
    """Return the record from the JSON that `to_json` returned.

    Args:
      source: the name of the file or the header that holds the record, for messages.
      record: the JSON.

    Raises:
      DamagedCheckpointError: if the JSON is not a record.
      CheckpointError: if the record has another format.
    """
    try:
        if record["format"] != _RECORD_FORMAT:
            problem = (
                f"{source} has format {record['format']}, this version of shardopt reads"
                f" {_RECORD_FORMAT}."
            )
            fix = "use the version of shardopt that wrote it, or a newer one."
            raise CheckpointError(error_text(problem, fix=fix))
        sums = record.get("sums")  # records before 0.3 have none
        meta = Meta(
            step=record["step"],
            leaves=_by_path(record["leaves"], _leaf),
            params=record["params"],
            metrics=record["metrics"],
            extra=record["extra"],
            sums=None if sums is None else _by_path(sums, str),
        )
        _check_fields(meta)
        return meta
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(f"{source} is not a record of a checkpoint", error) from error


def _by_path(record: JsonObject, read: Callable[[Json], T]) -> dict[LeafPath, T]:
    return {tuple(path.split("/")): read(value) for path, value in record.items()}


def _check_fields(meta: Meta) -> None:
    """Raise a ValueError if a field is not one that `describe_state` can have made."""
    if meta.params is not None:
        check_structure(meta.params, _num_params(meta.leaves))
    are_numbers = (isinstance(value, int | float) for value in meta.metrics.values())
    are_valid = {
        "step": _is_count(meta.step),
        "metrics": isinstance(meta.metrics, dict) and all(are_numbers),
        "extra": isinstance(meta.extra, dict),
        "sums": meta.sums is None or meta.sums.keys() == meta.leaves.keys(),
    }
    for name, is_valid in are_valid.items():
        if not is_valid:
            raise ValueError(f"{name} is {getattr(meta, name)!r:.80}")


_HASH_THREADS = 4
"""A thread hashes one to two gigabytes a second, without the interpreter's lock."""


def write_manifest(folder: Path, digests: dict[str, str]) -> None:
    """Write the size and SHA-256 of each file of a folder, and sync the manifest to disk.

    `verify` compares both before a checkpoint is loaded, so that no damaged byte is used.
    """
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": digests[name]}
        for name in sorted(digests)
    }
    with (folder / MANIFEST_NAME).open("w") as file:
        file.write(_render({"format": _MANIFEST_FORMAT, "files": files}))
        file.flush()
        os.fsync(file.fileno())


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file in a folder, by path relative to the folder.

    Leave out the manifest.
    """
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path != folder / MANIFEST_NAME
    }


def digest(path: Path, sync: bool = False) -> str:
    """Return the SHA-256 of a file, in hexadecimal; `sync` syncs its bytes to disk first."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, *, arrays: bool = True) -> list[str]:
    """Compare a folder with its manifest; return one line for every missing or changed file.

    All processes must call it. Each process reads its share of the bytes, and all return the same
    list.

    Args:
      folder: the folder of a step.
      arrays: whether the bytes of large arrays are compared too; else only the sizes of their files.
    """
    records, damage_lines = _read_manifest(folder)
    damage_lines = damage_lines or _damaged_sizes(folder, records)
    names: list[str] = []
    if not damage_lines:
        sizes = {
            name: file_record["size"]
            for name, file_record in records.items()
            if arrays or _VALUES not in name or file_record["size"] <= SMALL_BYTES
        }
        names = assigned_names(sizes)
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        damage_of_files = threads.map(
            lambda name: _damaged_bytes(folder, name, records[name]), names
        )
        damage_lines = [*damage_lines, *itertools.chain(*damage_of_files)]
    return sorted(
        {line for text in exchange(json.dumps(damage_lines)) for line in json.loads(text)}
    )


def _render(body: JsonObject) -> str:
    # The manifest also holds a digest of its own body.
    body_digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"manifest": body, "sha256": body_digest}, indent=1, sort_keys=True) + "\n"


def _read_manifest(folder: Path) -> tuple[JsonObject, list[str]]:
    source = f"{folder.name}/{MANIFEST_NAME}"
    try:
        text = (folder / MANIFEST_NAME).read_bytes().decode()
        body = json.loads(text)["manifest"]
        if text != _render(body):
            return {}, [f"{source}: its bytes are not those that were written"]
        if body["format"] != _MANIFEST_FORMAT:
            return {}, [
                f"{source}: format {body['format']}, this version of shardopt reads"
                f" {_MANIFEST_FORMAT}"
            ]
        return body["files"], []
    except FileNotFoundError:
        return {}, [f"{source}: missing"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        return {}, [f"{source}: cannot be read ({type(error).__name__})"]


def _damaged_sizes(folder: Path, records: JsonObject) -> list[str]:
    actual_sizes = file_sizes(folder)
    lines = []
    for name, record in records.items():
        if name not in actual_sizes:
            lines.append(f"{folder.name}/{name}: missing")
        elif actual_sizes[name] != record["size"]:
            lines.append(
                f"{folder.name}/{name}: {actual_sizes[name]} bytes, {record['size']} were written"
            )
    return lines


def _damaged_bytes(folder: Path, name: str, record: Json) -> list[str]:
    source = f"{folder.name}/{name}"
    try:
        actual = digest(folder / name)
        expected = record["sha256"]
    except OSError as error:
        return [f"{source}: cannot be read ({error.strerror})"]
    if actual == expected:
        return []
    return [
        f"{source}: its bytes are not those that were written (SHA-256 {actual[:8]}..., not"
        f" {expected[:8]}...)"
    ]


def _damaged(problem: str, error: Exception) -> DamagedCheckpointError:
    problem = f"{problem} ({type(error).__name__}: {error})."
    return DamagedCheckpointError(error_text(problem, fix="bring the file back from a copy."))


def _leaf(record: Json) -> Leaf:
    shape = record["shape"]
    dtype = record["dtype"]
    if not isinstance(shape, list) or not all(map(_is_count, shape)) or not isinstance(dtype, str):
        raise ValueError(f"a leaf is {record!r:.80}")
    leaf = Leaf(tuple(shape), dtype)
    dtype_of(leaf)
    return leaf


def _num_params(leaves: Mapping[LeafPath, Leaf]) -> int:
    return sum(path[0] == "params" for path in leaves)


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _as_numbers(metrics: Mapping[str, ArrayLike]) -> dict[str, float]:
    values = {name: np.asarray(value) for name, value in metrics.items()}
    not_scalars = [
        f"{name}: {value.dtype}{list(value.shape)}"
        for name, value in values.items()
        if value.ndim or value.dtype.kind not in "biufV"
    ]
    if not_scalars:
        fix = "save scalars only, for instance jnp.mean of them."
        raise TypeError(
            format_error("checkpoint", "metrics must be numbers.", not_scalars, fix=fix)
        )
    return {name: float(value) for name, value in values.items()}
