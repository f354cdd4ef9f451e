"""Small models with a loss and batches, and the same training in plain jax and optax on one device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from shardopt.core import BlockModel, PyTree, Weighted, is_floating
from shardopt.models import gpt, moe

STEPS = 4
LENGTH = 16
SET_BY_LOSS = ("router_load",)
"""Leaves that no optimizer trains."""

_VOCABULARY = 64
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "dim": 32,
    "num_heads": 4,
    "max_length": LENGTH,
}

# eps is far above the rounding of gradients: with 1e-8 Adam turns the rounding of a zero gradient
# into a whole step.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, eps=1e-4, weight_decay=1e-2),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-4),
    "muon": lambda: optax.contrib.muon(1e-2),
}


class Problem(NamedTuple):
    """A model and its training data.

    Attributes:
      params: initial parameters, as numpy arrays.
      loss_fn: the loss, or the `BlockModel`, for a strategy.
      batches: global batches, as numpy arrays; rows differ in scale and weight, so that equal
        treatment shows.
      options: arguments of strategies that describe the leaves.
    """

    params: PyTree
    loss_fn: Any
    batches: tuple[PyTree, ...]
    options: dict[str, Any]


def make_problem(name: str, num_rows: int) -> Problem:
    """Return the problem of this name with `num_rows` rows per step."""
    params, loss_fn, rules, draw_batch = MODELS[name]()
    draw = np.random.default_rng(7)

    def cast(x):
        return np.asarray(x, np.float32 if is_floating(x) else x.dtype)

    batches = tuple(jax.tree.map(cast, draw_batch(draw, num_rows)) for _ in range(STEPS))
    return Problem(jax.tree.map(cast, params), loss_fn, batches, {"rules": rules})


def _draw_tokens(draw: np.random.Generator, rows: int) -> PyTree:
    tokens = draw.integers(0, _VOCABULARY, size=(2, rows, LENGTH), dtype=np.int32)
    weights = (
        np.maximum(0.0, draw.uniform(-0.5, 2.0, size=(rows, LENGTH)))
        * np.linspace(0.2, 2.0, rows)[:, None]
    )
    return {"tokens": tokens[0], "targets": tokens[1], "weights": weights}


def _draw_points(draw: np.random.Generator, rows: int) -> PyTree:
    scale = np.linspace(0.2, 2.0, rows)[:, None]
    weights = np.maximum(0.0, draw.uniform(-0.5, 2.0, size=rows))
    return {
        "x": scale * draw.normal(size=(rows, 7)),
        "y": draw.normal(size=(rows, 5)),
        "weights": weights,
    }


def _transformer(module: Any, config: Any) -> tuple[Any, ...]:
    params = jax.tree.map(lambda leaf: 2 * leaf, module.init(config, jax.random.key(1)))
    return params, module.model(config), module.rules, _draw_tokens


def _gpt():
    return _transformer(gpt, gpt.config(num_layers=4, **_SHAPE))


def _moe():
    config = moe.config(num_layers=2, num_experts=4, hidden=32, balance=None, **_SHAPE)
    return _transformer(moe, config)


def _network(params: PyTree, batch: PyTree) -> jax.Array:
    return jnp.tanh(batch["x"] @ params["in"] + params["bias"][None, :]) @ params["out"]


def _weighted_loss(params: PyTree, batch: PyTree) -> Weighted:
    errors = ((_network(params, batch) - batch["y"]) ** 2).mean(-1)
    return Weighted((errors * batch["weights"]).sum(), batch["weights"].sum())


def _mixing_loss(params: PyTree, batch: PyTree) -> jax.Array:
    scores = _network(params, batch) @ batch["y"].T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores, axis=1)))


def _odd(loss_fn: Any):
    draw = np.random.default_rng(3)
    params = {
        "in": draw.normal(size=(7, 24)) * 0.4,
        "bias": np.zeros(24),
        "out": draw.normal(size=(24, 5)) * 0.3,
    }
    rules = [("in", P(None, "tensor")), ("bias|out", P("tensor"))]
    return params, loss_fn, rules, _draw_points


MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gpt": _gpt,
    "moe": _moe,
    "odd sizes": functools.partial(_odd, _weighted_loss),
    "loss that mixes rows": functools.partial(_odd, _mixing_loss),
}


@functools.cache
def train_on_one_device(model: str, optimizer: str, num_rows: int) -> tuple[PyTree, list[float]]:
    """Train in plain jax and optax on one device, on whole batches.

    Return the final parameters and the loss of each step.
    """
    problem = make_problem(model, num_rows)
    tx = OPTIMIZERS[optimizer]()
    loss_fn = problem.loss_fn
    if isinstance(loss_fn, BlockModel):
        loss_fn = loss_fn.loss_fn

    def scalar_loss(params, batch):
        loss = loss_fn(params, batch)
        if isinstance(loss, tuple) and not isinstance(loss, Weighted):
            loss = loss[0]
        return loss.total / loss.weight if isinstance(loss, Weighted) else loss

    @jax.jit
    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(scalar_loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with jax.default_device(jax.local_devices()[0]):
        params = jax.tree.map(jnp.asarray, problem.params)
        opt_state = jax.jit(tx.init)(params)
        losses = []
        for batch in problem.batches:
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(float(loss))
        return jax.device_get(params), losses
