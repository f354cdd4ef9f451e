"""A pytree's structure as JSON, so that a checkpoint can be restored where the parameters were never seen."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import jax

from shardopt.core.errors import CheckpointError, format_error

# Key paths as names: `opt_state[0].mu["blocks"]["qkv"]` is stored as opt_state -> 0 -> mu -> blocks -> qkv.


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
        raise ValueError(format_error("checkpoint", what, clashes, fix=fix))
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


_BUILDERS = {"dict": dict, "list": list, "tuple": tuple, "none": type(None)}
"""The containers that can be rebuilt from their name and children alone."""


def describe_structure(treedef: Any) -> Any:
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
    name = next((name for name, builder in _BUILDERS.items() if builder is kind), None)
    if name == "dict" and not all(isinstance(key, str | int) and not isinstance(key, bool) for key in detail):
        name = None  # JSON would turn other keys into strings
    if name is None:
        return {"node": f"{kind.__module__}.{kind.__qualname__}", "children": children}
    return {"node": name, "children": children} | ({"keys": list(detail)} if name == "dict" else {})


def check_structure(description: Any, num_leaves: int) -> None:
    """Refuse what `describe_structure` cannot have written of a tree with so many leaves.

    Raises:
      ValueError: if it is of another form, or speaks of another number of leaves.
    """
    if (found := _count(description)) != num_leaves:
        raise ValueError(f"the structure of params has {found} leaves, {num_leaves} are listed")


def rebuild(who: str, description: Any, leaves: list[Any]) -> Any:
    """Return the tree that `describe_structure` described, with these leaves.

    Raises:
      CheckpointError: if it holds other containers than dict, list, tuple and None.
    """
    if foreign := sorted(set(_foreign(description))):
        what = (
            "opt has not seen parameters yet, and theirs cannot be rebuilt from the checkpoint: it holds these types."
        )
        fix = "pass abstract_params= (jax.eval_shape(init_fn, rng) gives them), or call opt.init or opt.specs first."
        raise CheckpointError(format_error(who, what, foreign, fix=fix))
    remaining = iter(leaves)
    return _build(description, remaining)


def _build(description: Any, leaves: Iterator[Any]) -> Any:
    if description == "*":
        return next(leaves)
    children = [_build(child, leaves) for child in description["children"]]
    match description["node"]:
        case "none":
            return None
        case "dict":
            return dict(zip(description["keys"], children, strict=True))
        case kind:
            return _BUILDERS[kind](children)


def _count(description: Any) -> int:
    if description == "*":
        return 1
    if not isinstance(description, dict) or not isinstance(description.get("node"), str):
        raise ValueError(f"the structure of params has {description!r:.80}")
    node, children = description["node"], description.get("children")
    keys = description.get("keys", []) if node == "dict" else None
    simple = all(isinstance(key, str | int) and not isinstance(key, bool) for key in keys or ())
    if (
        not isinstance(children, list)
        or (node == "none" and children)
        or (
            keys is not None
            and not (isinstance(keys, list) and simple and len(set(keys)) == len(keys) == len(children))
        )
    ):
        raise ValueError(f"the structure of params has {description!r:.80}")
    return sum(map(_count, children))


def _foreign(description: Any) -> Iterator[str]:
    if description == "*":
        return
    if description["node"] not in _BUILDERS:
        yield description["node"]
    for child in description["children"]:
        yield from _foreign(child)
