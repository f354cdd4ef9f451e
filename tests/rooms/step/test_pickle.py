"""A strategy belongs to its process: it is not pickled, and its copies are the strategy itself."""

import copy
import re

import cloudpickle
import jax.numpy as jnp
import optax
import pytest

import shardopt as so

pytestmark = pytest.mark.fast


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def test_copies_are_the_strategy_itself(mesh_of):
    opt = so.fsdp(optax.adam(0.1), mesh_of(data=2), loss_fn)
    assert copy.copy(opt) is opt
    assert copy.deepcopy(opt) is opt
    assert copy.deepcopy({"runs": [opt]})["runs"][0] is opt


@pytest.mark.parametrize("name", ["fsdp", "diloco"])
@pytest.mark.parametrize("function", ["", "init", "step", "step.with_norms", "evaluate", "specs"])
def test_a_strategy_and_its_functions_are_not_pickled(mesh_of, name, function):
    opt = so.fsdp(optax.adam(0.1), mesh_of(replica=2, data=2), loss_fn)
    if name == "diloco":
        opt = so.diloco(opt)
        function = function.partition(".")[0]
    value = opt
    for part in filter(None, function.split(".")):
        value = getattr(value, part)
    message = (
        "a strategy, or a function of it such as opt.step, cannot be pickled: it has programs and"
        " devices of this process.\n"
        "Fix: send a function that makes the strategy, and call it in the other process."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        cloudpickle.dumps(value)
