"""A batch of one process: its rows, its form and its digests, to compare with other processes."""

import base64
import hashlib
import json
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.config._config import StrategyConfig
from shardopt.core import PyTree, format_error, is_key, leaves_with_paths
from shardopt.losses._batch_dims import FIX_ROWS, check_row_dims, map_rows, row_dim, shown_leaves
from shardopt.step._batches import as_arrays
from shardopt.step._global_rows import leaves_with_rows, unwrap
from shardopt.step._inputs import check_rows

Claim = Literal["process", "global", "placed"]
"""Whose rows a batch has: of this process, of all processes, or on the devices already."""


class HostBatch(NamedTuple):
    """A batch as one process passes it.

    Attributes:
      leaves: the batch; leaves of this host are numpy arrays with the dtype of the device.
      claim: whose rows it has.
      rows: how many rows its leaves on this host have.
    """

    leaves: PyTree
    claim: Claim
    rows: int

    def form(self, config: StrategyConfig) -> list[str]:
        """Return a line for each leaf: all that must be equal on all processes at every step."""
        return [
            self._line(path, leaf, row_dim(config, path, np.ndim(leaf)))
            for path, leaf in leaves_with_paths(self.leaves)
        ]

    def _line(self, path: str, leaf: Any, dim: int | None) -> str:
        name = path or "batch"
        if not hasattr(leaf, "shape"):
            return f"{name}: {leaf!r}"
        shape = list(leaf.shape)
        if dim is not None and self.claim == "process" and is_on_host(leaf):
            shape[dim] = "rows"
        return f"{name}: {leaf.dtype}[{', '.join(map(str, shape))}]"

    def digests(self, config: StrategyConfig) -> dict[str, str]:
        """Return key path -> digest of the values, for leaves on this host.

        The path begins with "rows" if the leaf has rows, else with "shared". A leaf without values
        is left out.
        """
        digests = {}
        for path, leaf in leaves_with_paths(self.leaves):
            if is_on_host(leaf) and leaf.size:
                has_rows = row_dim(config, path, np.ndim(leaf)) is not None
                digests[f"{'rows' if has_rows else 'shared'} {path or 'batch'}"] = digest_of(leaf)
        return digests

    def sample(self, config: StrategyConfig) -> str:
        """Return a digest of the first row, which costs microseconds."""
        first_rows = [
            digest_of(np.take(leaf, range(min(1, leaf.shape[dim])), axis=dim))
            for leaf, dim in leaves_with_rows(config, self.leaves)
            if is_on_host(leaf)
        ]
        return " ".join(first_rows)

    def without_rows(self, config: StrategyConfig) -> PyTree:
        """Return the same batch with 0 rows."""
        return map_rows(config, lambda leaf, dim: np.take(leaf, [], axis=dim), self.leaves)


def read_batch(config: StrategyConfig, batch: PyTree) -> HostBatch:
    """Return the batch of a process as a `HostBatch`.

    Raises:
      TypeError: if a leaf is no array.
      ValueError: if the leaves do not agree on a number of rows, and each process has its own.
    """
    batch, is_global = unwrap(batch)
    arrays = as_arrays(config.strategy, batch)
    key_paths = [path for path, leaf in leaves_with_paths(arrays) if is_key(leaf)]
    if key_paths:
        problem = "several processes cannot pass random keys in a batch."
        fix = "let the loss take a keyword rng: a new key each step, other numbers on each device."
        raise TypeError(format_error(config.strategy, problem, key_paths, fix))
    leaves = jax.tree.map(_on_host, arrays)
    check_row_dims(config, leaves)
    rows = {leaf.shape[dim] for leaf, dim in leaves_with_rows(config, leaves) if is_on_host(leaf)}
    if is_global:
        return HostBatch(leaves, "global", max(rows, default=0))
    if not rows:
        check_rows(config, leaves)
        return HostBatch(leaves, "placed", 0)
    if len(rows) > 1:
        problem = "the rows of a process must be as many in each leaf."
        fix = f"{FIX_ROWS}; or pass the global batch on each process: so.GlobalRows(batch)."
        raise ValueError(format_error(config.strategy, problem, shown_leaves(config, leaves), fix))
    return HostBatch(leaves, "process", rows.pop())


def is_on_host(leaf: Any) -> bool:
    """Return whether a leaf of a `HostBatch` is not on the devices yet."""
    return isinstance(leaf, np.ndarray)


def to_text(tree: PyTree) -> str | None:
    """Return a batch without rows as text, for a process that has none.

    None if it has containers other than dicts, lists and tuples.
    """
    leaves, treedef = jax.tree.flatten(tree)
    try:
        structure = treedef.serialize_using_proto()
        arrays = [
            {"array": [leaf.dtype.name, leaf.shape, _encoded(leaf.tobytes())]}
            if is_on_host(leaf)
            else {"number": leaf}
            for leaf in leaves
        ]
        return json.dumps({"structure": _encoded(structure), "leaves": arrays})
    except (TypeError, ValueError):
        return None


def from_text(text: str) -> PyTree:
    """Return the batch of `to_text`."""
    content = json.loads(text)
    registry = jax.tree_util.default_registry
    structure = base64.b64decode(content["structure"])
    treedef = jax.tree_util.PyTreeDef.deserialize_using_proto(registry, structure)
    return treedef.unflatten([_decoded(leaf) for leaf in content["leaves"]])


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _decoded(leaf: dict[str, Any]) -> Any:
    if "number" in leaf:
        return leaf["number"]
    dtype, shape, content = leaf["array"]
    return np.frombuffer(base64.b64decode(content), jnp.dtype(dtype)).reshape(shape)


def digest_of(values: np.ndarray) -> str:
    """Return a digest of shape, dtype and values."""
    if values.dtype.hasobject:  # refused later, on all processes
        values = np.asarray(repr(values.tolist()))
    digest = hashlib.sha256(f"{values.dtype}{values.shape}".encode())
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _on_host(leaf: Any) -> Any:
    """Return an array that only this process has as numpy, with the dtype of the device."""
    if isinstance(leaf, jax.Array):
        return np.asarray(leaf) if leaf.is_fully_addressable else leaf
    if isinstance(leaf, np.ndarray):
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return leaf
