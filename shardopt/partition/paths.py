"""Key paths as text: `params["blocks"]["attention"]["qkv"]` is "blocks/attention/qkv"."""

from typing import Any

import jax


def path_text(path: tuple[Any, ...]) -> str:
    """Return a key path as names joined by slashes: dict keys, attribute names, sequence positions."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_with_paths(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """Return the leaves of a tree, each with its key path as text."""
    return [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]
