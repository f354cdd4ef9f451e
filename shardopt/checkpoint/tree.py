"""Pytrees as text: key paths as names, and structure as JSON, to restore where the parameters were never seen.

`opt_state[0].mu["blocks"]["qkv"]` is stored as opt_state -> 0 -> mu -> blocks -> qkv.
"""

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import jax

from shardopt.core.errors import CheckpointError, format_error
from shardopt.core.types import PyTree

Json = Any
"""What `json.loads` returns: dicts, lists, strings, numbers, booleans, None."""

LeafPath = tuple[str, ...]
"""The escaped names from the root to a leaf."""


def leaves_by_path(tree: PyTree) -> dict[LeafPath, Any]:
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
        raise ValueError(format_error("checkpoint", what, clashes, fix=fix))
    return found


def nest(leaves: dict[LeafPath, Any]) -> dict[str, PyTree]:
    """Return nested dicts that hold each leaf under its path."""
    root: dict[str, PyTree] = {}
    for path, leaf in leaves.items():
        node = root
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return root


def unnest(nested: dict[str, PyTree], paths: list[LeafPath]) -> list[Any]:
    """Return what nested dicts hold under the given paths, in their order."""
    return [functools.reduce(operator.getitem, path, nested) for path in paths]


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


_CONTAINERS = {dict: "dict", list: "list", tuple: "tuple", type(None): "none"}
"""The containers that can be rebuilt from their name and children alone."""


def describe_structure(treedef: Any) -> Json:
    """Return a tree structure as JSON: "*" for a leaf, else {"node": kind, "children": [...]}, dicts with their keys.

    Example:
      >>> import jax
      >>> describe_structure(jax.tree.structure({"w": 1, "b": (2, None)}))["keys"]
      ['b', 'w']
    """
    node = treedef.node_data()
    if node is None:
        return "*"
    kind, detail = node
    children = [describe_structure(child) for child in treedef.children()]
    name = _CONTAINERS.get(kind)
    if name == "dict" and not _are_keys(detail, len(children)):
        name = None  # JSON would turn other keys into strings
    if name is None:
        return {"node": f"{kind.__module__}.{kind.__qualname__}", "children": children}
    return {"node": name, "children": children} | ({"keys": list(detail)} if name == "dict" else {})


def check_structure(description: Json, num_leaves: int) -> None:
    """Refuse what `describe_structure` cannot have written of a tree with so many leaves, by a ValueError."""
    leaves = itertools.count()
    _build(description, leaves, set())
    if (found := next(leaves)) != num_leaves:
        raise ValueError(f"the structure of params has {found} leaves, {num_leaves} are listed")


def rebuild(who: str, description: Json, leaves: list[Any]) -> PyTree:
    """Return the tree that `describe_structure` described, with these leaves.

    Raises:
      CheckpointError: if it holds other containers than dict, list, tuple and None.
    """
    foreign: set[str] = set()
    tree = _build(description, iter(leaves), foreign)
    if foreign:
        what = (
            "opt has not seen parameters yet, and theirs cannot be rebuilt from the checkpoint: it holds these types."
        )
        fix = "pass abstract_params= (jax.eval_shape(init_fn, rng) gives them), or call opt.init or opt.specs first."
        raise CheckpointError(format_error(who, what, sorted(foreign), fix=fix))
    return tree


def _build(description: Json, leaves: Iterator[Any], foreign: set[str]) -> PyTree:
    """Build a described tree; note the names of containers that cannot be built, for which lists stand in."""

    def build(children: list[Json]) -> list[PyTree]:
        return [_build(child, leaves, foreign) for child in children]

    match description:
        case "*":
            return next(leaves)
        case {"node": "none", "children": []}:
            return None
        case {"node": "list", "children": list(children)}:
            return build(children)
        case {"node": "tuple", "children": list(children)}:
            return tuple(build(children))
        case {"node": "dict", "children": list(children), "keys": list(keys)} if _are_keys(keys, len(children)):
            return dict(zip(keys, build(children), strict=True))
        case {"node": str(node), "children": list(children)} if node not in _CONTAINERS.values():
            foreign.add(node)
            return build(children)
    raise ValueError(f"the structure of params has {description!r:.80}")


def _are_keys(keys: list[Any], count: int) -> bool:
    """Return whether they are keys that jax can sort and JSON keeps: distinct, all strings or all integers."""
    numbers = all(isinstance(key, int) and not isinstance(key, bool) for key in keys)
    return (numbers or all(isinstance(key, str) for key in keys)) and len(set(keys)) == len(keys) == count
