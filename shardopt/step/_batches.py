"""Batches as users have them, converted to arrays: torch tensors, lists of numbers, mappings,
scalars.
"""

import dataclasses
from collections.abc import Mapping
from numbers import Number
from typing import Any

import jax
import numpy as np

from shardopt.core import PyTree, format_error, path_text


def as_arrays(caller: str, batch: PyTree) -> PyTree:
    """Return the batch with arrays and Python numbers as leaves.

    Return the batch itself if it has only such leaves.

    - A list of numbers, or of equally long lists of numbers (a column of `datasets`), becomes one
      array.
    - A torch tensor, or any object with `__array__`, becomes a numpy array, without a copy if it is
      on the host.
    - A mapping that jax does not know (a `BatchEncoding`) becomes a dict.

    Raises:
      TypeError: if a leaf is text, a dataclass that jax does not know, or anything else not listed
        above.
      ValueError: if the lists of a leaf have different lengths.
    """
    if all(map(_is_ready, jax.tree.leaves(batch))):
        return batch
    wrong_types: list[str] = []
    ragged_lists: list[str] = []
    converted = _convert(batch, (), wrong_types, ragged_lists)
    if wrong_types:
        problem = "batch leaves must be arrays [global batch, ...], or numbers that all rows share."
        raise TypeError(format_error(caller, problem, wrong_types))
    if ragged_lists:
        fix = "pad them."
        raise ValueError(
            format_error(
                caller, "lists in a batch must be as long as each other.", ragged_lists, fix
            )
        )
    return converted


def _is_ready(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in _NON_NUMERIC_KINDS
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


_NON_NUMERIC_KINDS = "OSUMm"
"""Kinds of numpy dtypes that no device can hold: objects, text, dates."""


def _convert(
    tree: PyTree, prefix: tuple, wrong_types: list[str], ragged_lists: list[str]
) -> PyTree:
    def convert_leaf(path, leaf):
        name = path_text((*prefix, *path)) or "batch"
        if _is_ready(leaf) or isinstance(leaf, bool | int | float | complex):
            return leaf
        if isinstance(leaf, Mapping):
            return _convert(dict(leaf), (*prefix, *path), wrong_types, ragged_lists)
        try:
            array = as_array(leaf)
        except ValueError:  # numpy raises it for lists of different lengths
            ragged_lists.append(f"{name}: {_describe_lengths(leaf)}")
            return leaf
        if array is None or array.dtype.kind in _NON_NUMERIC_KINDS:
            wrong_types.append(f"{name}: {_describe_leaf(leaf)}")
        return array

    return jax.tree_util.tree_map_with_path(convert_leaf, tree, is_leaf=_is_column)


def _is_column(node: Any) -> bool:
    """Return whether a list holds values (numbers, text, or lists of them) rather than arrays."""
    if not isinstance(node, list):
        return False
    if all(isinstance(entry, list) for entry in node):
        return all(map(_is_column, node))
    return all(isinstance(entry, Number | str | bytes | np.generic | None) for entry in node)


def as_array(leaf: Any) -> np.ndarray | None:
    """Return a value as a numpy array: a list, a torch tensor, or another object with `__array__`.

    None if it is none of these.
    """
    if isinstance(leaf, list | np.generic):
        return np.asarray(leaf)
    if all(callable(getattr(leaf, method, None)) for method in ("detach", "cpu", "numpy")):  # torch
        leaf = leaf.detach().cpu()
        try:
            return leaf.numpy()
        except TypeError:  # a dtype that numpy lacks, such as bfloat16
            return np.asarray(jax.dlpack.from_dlpack(leaf.contiguous()))
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return None


def _describe_lengths(leaf: Any) -> str:
    rows = [row for row in leaf if isinstance(row, list)]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        return (
            f"lists of {', '.join(map(str, lengths[:4]))}{', ...' if len(lengths) > 4 else ''}"
            " values"
        )
    return "lists within lists of different lengths"


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, str | bytes) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "SU"):
        return f"text ({type(leaf).__name__}); tokenize it, or leave it out"
    if isinstance(leaf, list):
        names = sorted({type(value).__name__ for value in np.asarray(leaf, object).flat})
        return f"a list of {' and '.join(names)}; make numbers of it, or leave it out"
    if dataclasses.is_dataclass(leaf):
        return (
            f"the dataclass {type(leaf).__name__}; register it with"
            " jax.tree_util.register_dataclass"
        )
    if isinstance(leaf, np.ndarray):
        return f"an array of dtype {leaf.dtype}"
    return type(leaf).__name__
