"""On CPU, where a collective between processes is a round trip, a step of many leaves makes few."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so

PARAMS = {
    "a": jnp.ones((8, 6)),
    "b": jnp.ones((6, 12)),
    "c": {"d": jnp.ones(16), "e": jnp.ones((3, 4))},
    "f": jnp.ones(()),
}


def loss_fn(params, batch):
    x = jnp.sin(batch @ params["a"]) @ params["b"] * params["c"]["d"].sum()
    return jnp.mean((x[:, :3] @ params["c"]["e"] * params["f"]) ** 2)


ZERO = functools.partial(so.zero, min_shard_elements=1)
STRATEGIES = {
    # the loss and its weight; the leaves
    "ddp": (so.ddp, {"all-reduce": 2}),
    # the loss and its weight; the leaf that stays whole; the norm of the others; one exchange, of a
    # part for each device
    "zero1": (
        functools.partial(ZERO, stage=1),
        {"all-reduce": 3, "all-to-all": 4, "all-gather": 1},
    ),
    "zero2": (
        functools.partial(ZERO, stage=2),
        {"all-reduce": 3, "all-to-all": 4, "all-gather": 1},
    ),
}


@pytest.mark.parametrize("strategy", tiered(STRATEGIES, lambda name: name != "zero1"))
def test_leaves_and_their_norms_travel_together(strategy, mesh_of, monkeypatch):
    # leaves are joined for all-reduces between processes only
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    make, expected = STRATEGIES[strategy]
    opt = make(optax.adam(0.1), mesh_of(data=4), loss_fn)
    collectives = so.hlo.audit(opt.step, opt.init(PARAMS), np.ones((8, 8), np.float32)).collectives
    arrays = collections.Counter()  # each of a tuple is a round trip
    for collective in collectives:
        arrays[collective.kind] += len(collective.shapes)
    assert arrays == expected
