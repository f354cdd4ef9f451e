"""Parameters that a checkpoint has only a hash of, such as the frozen base of adapters."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.checkpoint._tree import Json, JsonObject
from shardopt.core import (
    CheckpointError,
    PyTree,
    error_text,
    leaves_with_paths,
    type_error,
    value_error,
    with_leaves,
)
from shardopt.core._checksum import checksum

Patterns = Sequence[str | re.Pattern[str]]
KEY = "hash_only"
"""The entry of a checkpoint's `extra` with the hash and the regexes."""


def compile_patterns(name: str, patterns: Patterns, fix: str) -> tuple[re.Pattern[str], ...]:
    """Return the regexes of an argument.

    Args:
      name: the name of the argument.
      patterns: its value.
      fix: what to pass, for the message.

    Raises:
      TypeError: if they are no sequence of regexes.
      ValueError: if one does not compile.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise type_error(f"{name} must be a list of regexes, got {patterns!r}.", fix=fix)
    try:
        return tuple(re.compile(pattern) for pattern in patterns)
    except (re.error, TypeError) as error:
        raise value_error(f"{name} has no regular expression: {error}.") from error


def is_hashed(path: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    """Return whether a checkpoint has only a hash of the parameter with this key path."""
    return any(pattern.search(path) for pattern in patterns)


def without_hashed(state: Any, patterns: Sequence[re.Pattern[str]]) -> Any:
    """Return a train state with None in place of the parameters that match."""
    leaves = [
        None if is_hashed(path, patterns) else leaf
        for path, leaf in leaves_with_paths(state.params)
    ]
    return state._replace(params=with_leaves(state.params, leaves))


def record_of(params: PyTree, patterns: Sequence[re.Pattern[str]]) -> JsonObject:
    """Return the record that a checkpoint stores of the parameters that match."""
    hashed = [(path, leaf) for path, leaf in leaves_with_paths(params) if is_hashed(path, patterns)]
    return {"hash": hash_of_leaves(hashed), "patterns": [pattern.pattern for pattern in patterns]}


def check_hash(source: str, record: Json, params: PyTree) -> tuple[re.Pattern[str], ...]:
    """Return the regexes of a checkpoint, if the parameters have the hash that it stores.

    Raises:
      CheckpointError: if there are no parameters, or they have another hash.
    """
    patterns = tuple(map(re.compile, record["patterns"]))
    if params is None:
        problem = f"{source} holds no frozen parameters: it has their hash, {record['hash']}."
        fix = (
            "load them from where they are, and pass them as params=; fit does this if checkpoints"
            " have hash_only=."
        )
        raise CheckpointError(error_text(problem, fix=fix))
    actual = record_of(params, patterns)["hash"]
    if actual != record["hash"]:
        problem = (
            f"{source} was trained on another base: its hash is {record['hash']}, and that of"
            f" params is {actual}."
        )
        raise CheckpointError(
            error_text(problem, fix="load the frozen parameters that it was trained on.")
        )
    return patterns


def with_hashed(
    state: Any, abstract_params: PyTree, params: PyTree, patterns: Sequence[re.Pattern[str]]
) -> Any:
    """Return a restored state with the parameters that match, placed as `abstract_params`."""
    restored = dict(leaves_with_paths(state.params))
    leaves = [
        jax.device_put(leaf, abstract.sharding) if is_hashed(path, patterns) else restored[path]
        for (path, leaf), abstract in zip(
            leaves_with_paths(params), jax.tree.leaves(abstract_params), strict=True
        )
    ]
    return state._replace(params=with_leaves(abstract_params, leaves))


def hash_of_leaves(paths_and_leaves: Iterable[tuple[str, Any]]) -> str:
    """Return a hash of leaves with their key paths. It does not depend on how they are sharded."""
    digest = hashlib.sha256()
    for path, leaf in paths_and_leaves:
        first, second = np.asarray(_checksum(jnp.asarray(leaf)))
        # The sums are computed where the leaves are: a frozen base of many gigabytes is not
        # fetched.
        digest.update(f"{path} {leaf.dtype} {leaf.shape} {first} {second}\n".encode())
    return digest.hexdigest()[:32]


_checksum = jax.jit(checksum)
