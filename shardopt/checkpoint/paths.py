"""Key paths as names: `opt_state[0].mu["blocks"]["qkv"]` is stored as opt_state -> 0 -> mu -> blocks -> qkv."""

from typing import Any
from urllib.parse import quote, unquote

import jax

from shardopt.core.errors import complaint

LeafPath = tuple[str, ...]
"""The escaped names from the root to a leaf."""


def leaves_by_path(tree: Any) -> dict[LeafPath, Any]:
    """Return the leaves of a tree under their paths, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: if two leaves have the same path, or one leaf's path leads through another leaf.
    """
    found: dict[LeafPath, Any] = {}
    clashes = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = tuple(escape(jax.tree_util.keystr((key,), simple=True)) for key in keys)
        if path in found:
            clashes.append(show(path))
        found[path] = leaf
    inner = {path[:length] for path in found for length in range(len(path))}
    clashes += [show(path) for path in found if path in inner]
    if clashes:
        what = "leaves can only be stored under key paths of their own; these belong to several leaves."
        fix = "give the pytree node distinct keys (jax.tree_util.register_pytree_with_keys)."
        raise ValueError(complaint("checkpoint", what, clashes, fix=fix))
    return found


def nest(leaves: dict[LeafPath, Any]) -> dict[str, Any]:
    """Return nested dicts that hold each leaf under its path."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return root


def unnest(nested: dict[str, Any], paths: list[LeafPath]) -> list[Any]:
    """Return what nested dicts hold under the given paths, in their order."""

    def find(path):
        node = nested
        for name in path:
            node = node[name]
        return node

    return [find(path) for path in paths]


def show(path: LeafPath) -> str:
    """Return a path as people write it: names joined by slashes."""
    return "/".join(unescape(name) for name in path)


def escape(name: str) -> str:
    """Return a name without the separators of orbax and the file system; `unescape` undoes it."""
    # A percent sign alone cannot come out of quote, so it is free to stand for the empty name.
    return quote(name, safe="").replace(".", "%2E") or "%"


def unescape(name: str) -> str:
    """Return the name that `escape` was given."""
    return "" if name == "%" else unquote(name)
