"""A model with awkward names, and its training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.checkpoints import complaint_of, same

import shardopt as so
from shardopt.runtime import _vault as vault

__all__ = ["complaint_of", "make_opt", "new_params", "same", "steps_on", "trained", "vaults"]

RULES = [("up/w", P(None, "tensor")), ("down", P("tensor"))]


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["layer.0"]["up/w"] + params["layer.0"]["b"][None])
    return jnp.mean((hidden @ params["down"][0]) ** 2) + 0 * params["layer"]["0"].sum()


def make_params():
    """Odd sizes, a None, an empty array, and keys that would collide if '.' and '/' were not
    escaped.
    """
    draw = np.random.default_rng(1)
    return {
        "layer.0": {
            "up/w": draw.normal(size=(16, 32)).astype(np.float32),
            "b": np.zeros(32, np.float32),
        },
        "layer": {"0": np.ones((3, 5), np.float32)},
        "down": [draw.normal(size=(32, 8)).astype(np.float32), None],
    }


def make_batch(step):
    return np.random.default_rng(100 + step).normal(size=(16, 16)).astype(np.float32)


@pytest.fixture
def vaults(monkeypatch):
    """Two vaults, and their addresses in the environment."""
    both = vault.Vaults(2)
    for name, value in both.environment().items():
        monkeypatch.setenv(name, value)
    yield both
    both.close()


@pytest.fixture(scope="session")
def make_opt():
    """Return a function that makes an optimizer for the model."""

    def make(strategy=so.fsdp, tx=None, *, loss=loss_fn, rules=RULES, **sizes):
        count = int(np.prod(list(sizes.values()))) if sizes else 8
        mesh = so.make_mesh(**sizes, devices=jax.devices()[:count])
        options = {} if strategy is so.ddp else {"min_shard_elements": 16}
        rules = rules if mesh.shape["tensor"] > 1 else ()
        return strategy(tx or optax.adamw(1e-2), mesh, loss, rules=rules, **options)

    return make


@pytest.fixture(scope="session")
def new_params():
    return make_params


@pytest.fixture(scope="session")
def steps_on():
    """Return a function that takes steps `begin` to `end` with an optimizer, on batches told apart
    by their step.
    """

    def run(opt, state, begin, end):
        for step in range(begin, end):
            state, _ = opt.step(state, make_batch(step))
        return state

    return run


@pytest.fixture(scope="session")
def trained(make_opt, steps_on):
    """Three steps of adamw under fsdp on eight devices: the optimizer and a fresh state, never
    donated twice.
    """
    opt = make_opt()
    return opt, lambda: steps_on(opt, opt.init(make_params()), 0, 3)
