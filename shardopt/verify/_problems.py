"""Small models with a loss and batches, and the same training in plain jax and optax on one device."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from shardopt import nn
from shardopt.core import BlockModel, Weighted
from shardopt.core._types import PyTree
from shardopt.models import gpt, moe
from shardopt.nn._attention import Method

STEPS = 4
LENGTH = 16
SET_BY_LOSS = ("router_load",)
"""Leaves that no optimizer trains."""

_VOCABULARY = 64
_GPT = gpt.GPTConfig(vocab_size=_VOCABULARY, dim=32, num_layers=4, num_heads=4, max_length=LENGTH)
_MOE = moe.MoEConfig(
    vocab_size=_VOCABULARY,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_experts=4,
    hidden=32,
    balance=None,
    max_length=LENGTH,
)

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


def make_problem(
    name: str, num_rows: int, dtype: str, axes: Mapping[str, int] | None = None
) -> Problem:
    """Return the problem of this name with `num_rows` rows per step.

    Its options are those for a mesh with these axes.
    """
    params, loss_fn, rules, draw_batch = MODELS[name]()
    draw = np.random.default_rng(7)

    def cast(x):
        return np.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    batches = tuple(jax.tree.map(cast, draw_batch(draw, num_rows)) for _ in range(STEPS))
    options: dict[str, Any] = {"rules": rules} if (axes or {}).get("tensor", 1) > 1 else {}
    if name == "moe":
        options["frozen"] = moe.frozen
        options |= {"expert_leaves": moe.expert_leaves} if (axes or {}).get("expert", 1) > 1 else {}
    return Problem(jax.tree.map(cast, params), loss_fn, batches, options)


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


def _gpt():
    params = jax.tree.map(lambda leaf: 2 * leaf, gpt.init(_GPT, jax.random.key(1)))
    return params, gpt.model(_GPT), gpt.rules, _draw_tokens


def _moe():
    params = jax.tree.map(lambda leaf: 2 * leaf, moe.init(_MOE, jax.random.key(1)))
    return params, moe.model(_MOE), moe.rules, _draw_tokens


def _odd_params() -> PyTree:
    draw = np.random.default_rng(3)
    return {
        "in": draw.normal(size=(7, 24)) * 0.4,
        "bias": np.zeros(24),
        "out": draw.normal(size=(24, 5)) * 0.3,
    }


_ODD_RULES = [("in", P(None, "tensor")), ("bias", P("tensor")), ("out", P("tensor"))]


def _network(params: PyTree, batch: PyTree) -> jax.Array:
    return jnp.tanh(batch["x"] @ params["in"] + params["bias"][None, :]) @ params["out"]


def _odd():
    def loss_fn(params, batch):
        errors = ((_network(params, batch) - batch["y"]) ** 2).mean(-1)
        return Weighted((errors * batch["weights"]).sum(), batch["weights"].sum())

    return _odd_params(), loss_fn, _ODD_RULES, _draw_points


def _mixing():
    def loss_fn(params, batch):
        scores = _network(params, batch) @ batch["y"].T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores, axis=1)))

    return _odd_params(), loss_fn, _ODD_RULES, _draw_points


def _attention(method: Method):
    def block(w, x):
        query, key, value = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, w["qkv"]), 2, 0)
        return x + jnp.einsum(
            "bthk,hkd->btd", nn.attention(query, key, value, method=method), w["out"]
        )

    def loss(outer, x, batch):
        errors = ((x @ outer["out"])[..., 0] - batch["weights"]) ** 2
        return Weighted((errors * batch["weights"]).sum(), batch["weights"].sum())

    draw = np.random.default_rng(5)
    blocks = {
        "qkv": draw.normal(size=(2, 16, 3, 2, 8)) / 4,
        "out": draw.normal(size=(2, 2, 8, 16)) / 4,
    }
    params = {
        "blocks": blocks,
        "in": draw.normal(size=(_VOCABULARY, 16)),
        "out": draw.normal(size=(16, 1)) / 4,
    }
    model = BlockModel(
        embed=lambda outer, batch: outer["in"][batch["tokens"]], block=block, loss=loss
    )
    return params, model, [], _draw_tokens


MODELS: dict[
    str, Callable[[], tuple[PyTree, Any, Any, Callable[[np.random.Generator, int], PyTree]]]
] = {
    "gpt": _gpt,
    "moe": _moe,
    "odd sizes": _odd,
    "loss that mixes rows": _mixing,
    "ring attention": functools.partial(_attention, "ring"),
    "all-to-all attention": functools.partial(_attention, "all_to_all"),
    "gathered attention": functools.partial(_attention, "all_gather"),
}


class Trained(NamedTuple):
    """The result of plain training: the loss of each step, and the final parameters."""

    losses: list[float]
    params: PyTree


@functools.cache
def train_on_one_device(
    model: str,
    optimizer: str,
    num_rows: int,
    dtype: str,
    replicas: int = 1,
    sync_every: int = STEPS + 1,
    outer: Callable[[], optax.GradientTransformation] | None = None,
) -> Trained:
    """Train in plain jax and optax on one device, on whole batches.

    With replicas, each trains on its own rows. After every `sync_every` steps the outer optimizer
    steps on their mean progress, and each replica continues from the result with its own optimizer
    state.
    """
    problem, tx = make_problem(model, num_rows, dtype), OPTIMIZERS[optimizer]()
    loss_fn = (
        problem.loss_fn.loss_fn if isinstance(problem.loss_fn, BlockModel) else problem.loss_fn
    )

    def scalar_loss(params, batch):
        loss = loss_fn(params, batch)
        loss = loss[0] if isinstance(loss, tuple) and not isinstance(loss, Weighted) else loss
        return loss.total / loss.weight if isinstance(loss, Weighted) else loss

    @jax.jit
    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(scalar_loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with jax.default_device(jax.local_devices()[0]):
        shared = jax.tree.map(jnp.asarray, problem.params)
        outer_tx = optax.identity() if outer is None else outer()
        outer_state, copies = outer_tx.init(shared), [(shared, jax.jit(tx.init)(shared))] * replicas
        losses = []
        for number, batch in enumerate(problem.batches, 1):
            rows = [
                jax.tree.map(lambda leaf, i=i: np.split(leaf, replicas)[i], batch)
                for i in range(replicas)
            ]
            results = [step(*copy, part) for copy, part in zip(copies, rows, strict=True)]
            copies = [(params, opt_state) for params, opt_state, _ in results]
            losses.append(float(np.mean([loss for _, _, loss in results])))
            if number % sync_every == 0:
                progress = jax.tree.map(
                    lambda old, *new: old - sum(new) / replicas, shared, *(p for p, _ in copies)
                )
                updates, outer_state = outer_tx.update(progress, outer_state, shared)
                shared = optax.apply_updates(shared, updates)
                copies = [(shared, opt_state) for _, opt_state in copies]
        return Trained(losses, jax.device_get(copies[0][0]))
