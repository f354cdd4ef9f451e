"""Pytrees as text: names of leaves escaped so that nothing collides, structures written as JSON and
rebuilt.
"""

import collections
import json
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.checkpoint._tree import (
    check_structure,
    describe_structure,
    escape,
    leaves_by_path,
    nest,
    rebuild,
    show,
    unescape,
    unnest,
)
from shardopt.core._errors import calling

pytestmark = pytest.mark.fast


@given(st.text())
def test_escaped_names_come_back_and_hold_no_separator(name):
    escaped = escape(name)
    assert unescape(escaped) == name
    assert escaped
    assert not set(escaped) & set("./ \0")


@given(
    st.lists(
        st.lists(st.text(max_size=3), min_size=1, max_size=3),
        min_size=2,
        max_size=2,
        unique_by=tuple,
    )
)
def test_different_paths_stay_different_when_joined(paths):
    joined = [".".join(map(escape, path)) for path in paths]
    assert joined[0] != joined[1]


def test_plain_names_are_stored_as_they_are():
    assert list(leaves_by_path({"blocks": {"qkv": [1]}})) == [("blocks", "qkv", "0")]
    assert escape("layer_norm-1~a") == "layer_norm-1~a"
    assert unquote(escape("a/b.c%")) == "a/b.c%"


def test_nested_dicts_give_every_leaf_back():
    tree = {"a.b": 1, "a": {"b": 2, "": 3}, "c": [4, (5, None, {})]}
    leaves = leaves_by_path(tree)
    assert list(leaves.values()) == jax.tree.leaves(tree)
    assert unnest(nest(leaves), list(leaves)) == jax.tree.leaves(tree)
    assert [show(path) for path in leaves] == ["a/", "a/b", "a.b", "c/0", "c/1/0"]


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node that gives its two children one name."""

    def __init__(self, first, second):
        self.children = first, second

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("same"), child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("second", [np.ones(2), {"x": np.ones(2)}])
def test_leaves_that_share_a_path_are_refused(second, complaint_of):
    message = complaint_of(lambda: leaves_by_path({"node": Twins(np.ones(2), second)}), ValueError)
    assert (
        message
        == "checkpoint: leaves can only be stored under key paths of their own; these belong to"
        " several leaves.\n  node/same\nFix: give the pytree node distinct keys"
        " (jax.tree_util.register_pytree_with_keys)."
    )


@pytest.mark.parametrize(
    "tree",
    [
        1,
        {"b": [1, (2, None, ())], "a": {}, "": {"x": 3}},
        {1: 4, 0: [5, []]},
        [None, None],
        ((((6,),),),),
    ],
)
def test_containers_of_json_come_back_exactly(tree):
    description = json.loads(json.dumps(describe_structure(jax.tree.structure(tree))))
    rebuilt_tree = rebuild(description, jax.tree.leaves(tree))
    assert rebuilt_tree == tree
    assert jax.tree.structure(rebuilt_tree) == jax.tree.structure(tree)


def test_types_that_cannot_be_rebuilt_are_named(complaint_of):
    odd = {
        "a": collections.OrderedDict(x=1),
        "b": optax.sgd(0.1, momentum=0.9).init(jnp.ones(2)),
        "c": {(1, 2): 0},
    }
    description = json.loads(json.dumps(describe_structure(jax.tree.structure(odd))))
    message = complaint_of(lambda: calling("restore")(rebuild)(description, jax.tree.leaves(odd)))
    assert (
        message == "restore: opt has not seen parameters yet, and theirs cannot be rebuilt from the"
        " checkpoint: it holds these types.\n  builtins.dict\n  collections.OrderedDict\n "
        " optax._src.base.EmptyState\n  optax.transforms._accumulation.TraceState\nFix: pass"
        " abstract_params= (jax.eval_shape(init_fn, rng) gives them), or call opt.init or"
        " opt.specs first."
    )


@pytest.mark.parametrize(
    "description",
    [
        None,
        "leaf",
        {"children": []},
        {"node": 3, "children": []},
        {"node": "list", "children": {}},
        {"node": "none", "children": ["*"]},
        {"node": "dict", "children": ["*"], "keys": []},
        {"node": "dict", "children": ["*", "*"], "keys": ["a", "a"]},
        {"node": "dict", "children": ["*"], "keys": [True]},
        {"node": "dict", "children": ["*", "*"], "keys": [0, "a"]},
        {"node": "dict", "children": ["*"], "keys": [[]]},
        {"node": "tuple", "children": [None]},
    ],
)
def test_what_describes_no_structure_is_refused(description):
    with pytest.raises(ValueError, match=r"^the structure of params has "):
        check_structure(description, 1)


def test_a_structure_of_another_number_of_leaves_is_refused():
    check_structure({"node": "list", "children": ["*", "*"]}, 2)
    with pytest.raises(ValueError, match=r"^the structure of params has 2 leaves, 3 are listed$"):
        check_structure({"node": "list", "children": ["*", "*"]}, 3)
