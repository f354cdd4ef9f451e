"""Structures written as JSON and rebuilt."""

import collections
import json

import jax
import jax.numpy as jnp
import optax
import pytest

from shardopt.checkpoint.tree import describe_structure, rebuild


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
    again = rebuild("restore", description, jax.tree.leaves(tree))
    assert again == tree
    assert jax.tree.structure(again) == jax.tree.structure(tree)


def test_types_that_cannot_be_rebuilt_are_named(complaint_of):
    odd = {
        "a": collections.OrderedDict(x=1),
        "b": optax.sgd(0.1, momentum=0.9).init(jnp.ones(2)),
        "c": {(1, 2): 0},
    }
    description = json.loads(json.dumps(describe_structure(jax.tree.structure(odd))))
    message = complaint_of(lambda: rebuild("restore", description, jax.tree.leaves(odd)))
    assert message == (
        "restore: opt has not seen parameters yet, and theirs cannot be rebuilt from the checkpoint: it holds these "
        "types.\n"
        "  builtins.dict\n"
        "  collections.OrderedDict\n"
        "  optax._src.base.EmptyState\n"
        "  optax.transforms._accumulation.TraceState\n"
        "Fix: pass abstract_params= (jax.eval_shape(init_fn, rng) gives them), or call opt.init or opt.specs first."
    )
