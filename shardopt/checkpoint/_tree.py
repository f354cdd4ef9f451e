"""Pytrees as text: key paths as names, and structures as JSON.

The JSON rebuilds the parameters for an optimizer that has not seen them.
`opt_state[0].mu["blocks"]["qkv"]` is stored as opt_state -> 0 -> mu -> blocks -> qkv.
"""

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import jax

from shardopt.core import CheckpointError, PyTree, error_text, format_error

Json = Any
"""A value of `json.loads`: dict, list, string, number, boolean or None."""

JsonObject = dict[str, Json]

LeafPath = tuple[str, ...]
"""The escaped names from the root to a leaf."""


def path_of(keys: jax.tree_util.KeyPath) -> LeafPath:
    """Return the path of a leaf, from its keys."""
    return tuple(escape(jax.tree_util.keystr((key,), simple=True)) for key in keys)


def leaves_by_path(tree: PyTree) -> dict[LeafPath, Any]:
    """Return the leaves of a tree by path, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: if two leaves have the same path, or the path of one leaf leads through another
        leaf.
    """
    leaves: dict[LeafPath, Any] = {}
    clashes = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = path_of(keys)
        if path in leaves:
            clashes.append(show(path))
        leaves[path] = leaf
    inner_paths = {path[:length] for path in leaves for length in range(len(path))}
    clashes += [show(path) for path in leaves if path in inner_paths]
    if clashes:
        problem = (
            "leaves can only be stored under key paths of their own; these belong to several"
            " leaves."
        )
        fix = "give the pytree node distinct keys (jax.tree_util.register_pytree_with_keys)."
        raise ValueError(format_error("checkpoint", problem, clashes, fix=fix))
    return leaves


def nest(leaves: dict[LeafPath, Any]) -> dict[str, PyTree]:
    """Return nested dicts with each leaf under its path."""
    root: dict[str, PyTree] = {}
    for path, leaf in leaves.items():
        node = root
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return root


def unnest(nested: dict[str, PyTree], paths: list[LeafPath]) -> list[Any]:
    """Return the leaves of nested dicts under these paths, in the order of the paths."""
    return [functools.reduce(operator.getitem, path, nested) for path in paths]


def show(path: LeafPath) -> str:
    """Return a path for people: names joined by slashes."""
    return "/".join(map(unescape, path))


def escape(name: str) -> str:
    """Return a name without the separators of orbax and of the file system.

    `unescape` reverses it.
    """
    # `quote` never returns a percent sign alone, so it can stand for the empty name.
    return quote(name, safe="").replace(".", "%2E") or "%"


def unescape(name: str) -> str:
    """Return the name from which `escape` made this name."""
    return "" if name == "%" else unquote(name)


_CONTAINERS = {dict: "dict", list: "list", tuple: "tuple", type(None): "none"}
"""The containers that can be rebuilt from the name and the children."""


def describe_structure(treedef: Any) -> Json:
    """Return a tree structure as JSON: "*" for a leaf, else {"node": kind, "children": [...]}.

    A dict also has "keys".

    Example:
      >>> import jax
      >>> describe_structure(jax.tree.structure({"w": 1, "b": (2, None)}))["keys"]
      ['b', 'w']
    """
    node = treedef.node_data()
    if node is None:
        return "*"
    kind, metadata = node
    children = [describe_structure(child) for child in treedef.children()]
    name = _CONTAINERS.get(kind)
    if name == "dict" and not _are_keys(metadata, len(children)):
        name = None  # JSON would turn other keys into strings
    if name is None:
        return {"node": f"{kind.__module__}.{kind.__qualname__}", "children": children}
    return {"node": name, "children": children} | (
        {"keys": list(metadata)} if name == "dict" else {}
    )


def check_structure(description: Json, num_leaves: int) -> None:
    """Raise a ValueError if `describe_structure` cannot have written this of a tree with so many
    leaves.
    """
    leaves = itertools.count()
    _build(description, leaves, set())
    num_described = next(leaves)
    if num_described != num_leaves:
        raise ValueError(
            f"the structure of params has {num_described} leaves, {num_leaves} are listed"
        )


def rebuild(description: Json, leaves: list[Any]) -> PyTree:
    """Return the tree that `describe_structure` described, with these leaves.

    Raises:
      CheckpointError: if the tree has containers other than dict, list, tuple and None.
    """
    foreign_types: set[str] = set()
    tree = _build(description, iter(leaves), foreign_types)
    if foreign_types:
        problem = (
            "opt has not seen parameters yet, and theirs cannot be rebuilt from the checkpoint: it"
            " holds these types."
        )
        fix = (
            "pass abstract_params= (jax.eval_shape(init_fn, rng) gives them), or call opt.init or"
            " opt.specs first."
        )
        raise CheckpointError(error_text(problem, sorted(foreign_types), fix=fix))
    return tree


def _build(description: Json, leaves: Iterator[Any], foreign_types: set[str]) -> PyTree:
    """Build a described tree. Collect the names of foreign containers; lists stand in for them."""

    def build(children: list[Json]) -> list[PyTree]:
        return [_build(child, leaves, foreign_types) for child in children]

    match description:
        case "*":
            return next(leaves)
        case {"node": "none", "children": []}:
            return None
        case {"node": "list", "children": list(children)}:
            return build(children)
        case {"node": "tuple", "children": list(children)}:
            return tuple(build(children))
        case {"node": "dict", "children": list(children), "keys": list(keys)} if _are_keys(
            keys, len(children)
        ):
            return dict(zip(keys, build(children), strict=True))
        case {"node": str(node), "children": list(children)} if node not in _CONTAINERS.values():
            foreign_types.add(node)
            return build(children)
    raise ValueError(f"the structure of params has {description!r:.80}")


def _are_keys(keys: list[Any], count: int) -> bool:
    """Return whether these keys are distinct, and all strings or all integers.

    jax can sort such keys, and JSON keeps them.
    """
    numbers = all(isinstance(key, int) and not isinstance(key, bool) for key in keys)
    return (numbers or all(isinstance(key, str) for key in keys)) and len(set(keys)) == len(
        keys
    ) == count
