"""A model of a few blocks on two replicas, small enough to compile in a moment, and ways to
compare.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so
from support.problems import reduce
from support.reference import relative_difference

RULES = [("^blocks/up", P(None, "tensor")), ("^blocks/down", P("tensor")), ("^out", P("tensor"))]
STRATEGIES = {
    "ddp": so.ddp,
    "zero1": functools.partial(so.zero, stage=1, min_shard_elements=4),
    "zero2": functools.partial(so.zero, stage=2, min_shard_elements=4),
    "fsdp": functools.partial(so.fsdp, min_shard_elements=4),
    "hybrid": functools.partial(so.hybrid, micro_batches=2),
}


def _embed(outer, batch):
    return batch["x"] @ outer["in"]


def _block(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def _loss(outer, x, batch, *, weighted):
    return reduce(((x @ outer["out"] * outer["scale"] - batch["y"]) ** 2).mean(-1), batch, weighted)


MODELS = {
    weighted: so.BlockModel(_embed, _block, functools.partial(_loss, weighted=weighted))
    for weighted in (0, 1)
}


@pytest.fixture(scope="session")
def model_of():
    """Return a function from "is it weighted?" to the model.

    Always the same object, so that programs are shared.
    """
    return lambda weighted=False: MODELS[int(weighted)]


TINY = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w),
    loss=lambda outer, x, batch: jnp.mean((x[:, :2] - batch["y"]) ** 2),
)


@pytest.fixture(scope="session")
def tiny():
    """Two leaves, for grids of many programs: the model and a function that makes its parameters."""

    def make():
        draw = np.random.default_rng(6)
        dtype = jax.dtypes.canonicalize_dtype(float)
        params = {"blocks": draw.normal(size=(4, 4, 4)) * 0.3, "in": draw.normal(size=(3, 4))}
        return jax.tree.map(lambda x: x.astype(dtype), params)

    return TINY, make


@pytest.fixture(scope="session")
def new_params():
    """Return a function that makes the parameters, float64 where that is on."""

    def make(num_blocks=4):
        draw = np.random.default_rng(5)
        dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
        params = {
            "blocks": {
                "up": draw.normal(size=(num_blocks, 4, 8)) * 0.5,
                "down": draw.normal(size=(num_blocks, 8, 4)) * 0.4,
            },
            "in": draw.normal(size=(3, 4)),
            "out": draw.normal(size=(4, 2)),
            "scale": np.ones(()),
        }
        return jax.tree.map(lambda x: np.asarray(x, dtype), params)

    return make


@pytest.fixture(scope="session")
def new_batches():
    """Return a function that makes batches whose rows differ in scale and weight, so that replicas
    differ.
    """

    def make(count, rows=8, seed=0):
        draw = np.random.default_rng(seed)
        scale = np.linspace(0.3, 1.5, rows)[:, None]
        return [
            {
                "x": scale * draw.normal(size=(rows, 3)),
                "y": draw.normal(size=(rows, 2)),
                "weights": draw.uniform(0.1, 2.0, size=rows),
            }
            for _ in range(count)
        ]

    return make


@pytest.fixture(scope="session")
def strategy_of(mesh_of, model_of):
    """Return a function from a name and mesh sizes to a synchronous strategy."""

    def make(name="fsdp", tx=None, *, weighted=False, model=None, options=(), **sizes):
        sizes = {"replica": 2, "data": 2} | sizes
        rules = RULES if sizes.get("tensor", 1) > 1 else ()
        tx = optax.adamw(1e-2, eps=1e-4) if tx is None else tx
        options = {"rules": rules} | dict(options)
        return STRATEGIES[name](tx, mesh_of(**sizes), model or model_of(weighted), **options)

    return make


@pytest.fixture(scope="session")
def steps_on():
    """Return a function that takes a step on each batch."""

    def run(opt, state, batches):
        metrics = None
        for batch in batches:
            state, metrics = opt.step(state, batch)
        return state, metrics

    return run


@pytest.fixture(scope="session")
def rows_of():
    """Return a function from a state to each replica's parameters."""

    def split(state):
        value = jax.device_get(state.opt_state.params.value)
        return [
            jax.tree.map(lambda x, i=i: x[i], value)
            for i in range(jax.tree.leaves(value)[0].shape[0])
        ]

    return split


@pytest.fixture(scope="session")
def max_difference():
    """Return a function from (found, expected), trees or lists of them, to their largest relative
    difference.
    """

    def compare(actual, expected):
        if isinstance(expected, list):
            return max(relative_difference(a, b) for a, b in zip(actual, expected, strict=True))
        return relative_difference(actual, expected)

    return compare
