"""A model with awkward names, and ways to compare and to damage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so

RULES = [("up/w", P(None, "tensor")), ("down", P("tensor"))]


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["layer.0"]["up/w"] + params["layer.0"]["b"][None])
    return jnp.mean((hidden @ params["down"][0]) ** 2) + 0 * params["layer"]["0"].sum()


def make_params():
    """Odd sizes, a None, an empty array, and keys that would collide if '.' and '/' were not escaped."""
    draw = np.random.default_rng(1)
    return {
        "layer.0": {"up/w": draw.normal(size=(16, 32)).astype(np.float32), "b": np.zeros(32, np.float32)},
        "layer": {"0": np.ones((3, 5), np.float32)},
        "down": [draw.normal(size=(32, 8)).astype(np.float32), None],
    }


def make_batch(step):
    return np.random.default_rng(100 + step).normal(size=(16, 16)).astype(np.float32)


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
    """Return a function that takes steps `begin` to `end` with an optimizer, on batches told apart by their step."""

    def run(opt, state, begin, end):
        for step in range(begin, end):
            state, _ = opt.step(state, make_batch(step))
        return state

    return run


@pytest.fixture(scope="session")
def trained(make_opt, steps_on):
    """Three steps of adamw under fsdp on eight devices: the optimizer and a fresh state, never donated twice."""
    opt = make_opt()
    return opt, lambda: steps_on(opt, opt.init(make_params()), 0, 3)


@pytest.fixture(scope="session")
def same():
    """Return a function that says whether two states are equal in structure, and bit for bit in values."""

    def compare(a, b):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)

    return compare


@pytest.fixture(scope="session")
def complaint_of():
    """Return a function that calls what must fail, and returns the whole message."""

    def call(action, kind=so.errors.CheckpointError):
        with pytest.raises(kind) as caught:
            action()
        assert type(caught.value) is kind
        return str(caught.value)

    return call
