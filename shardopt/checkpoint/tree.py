"""A pytree's structure as JSON, so that a checkpoint can be restored where the parameters were never seen."""

from collections.abc import Iterator
from typing import Any

from shardopt.core.errors import CheckpointError, complaint

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
        raise CheckpointError(complaint(who, what, foreign, fix=fix))
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
