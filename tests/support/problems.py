"""Models with a loss and batches: a GPT, flax nnx, flax linen, a plain pytree of odd sizes, a loss
of one row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.models import gpt
from support.host import host_params
from support.mean_of import mean_of

BATCH = 32


class Problem(NamedTuple):
    """A strategy gets `loss_fn`; `reference` is the same loss for one device, a scalar."""

    params: Any
    loss_fn: Any
    reference: Any
    rules: Any
    batches: list[Any]


def problem(name: str, *, weighted: bool, steps: int = 10, dtype=jnp.float64) -> Problem:
    """Build a problem whose rows differ in scale and weight, so that equal treatment of devices
    shows.
    """
    params, loss_fn, rules, make_batch = MODELS[name](weighted)
    draw = np.random.default_rng(7)
    dtype = jax.dtypes.canonicalize_dtype(dtype)

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    # on the host, where a cast and a slice are no programs
    params = jax.tree.map(cast, jax.device_get(params))
    batches = [jax.tree.map(cast, make_batch(draw)) for _ in range(steps)]
    as_function = loss_fn.loss_fn if isinstance(loss_fn, so.BlockModel) else loss_fn

    def reference(params, batch):
        loss = as_function(params, batch)
        return mean_of(loss)

    return Problem(params, loss_fn, reference, rules, batches)


def reduce(per_row, batch, weighted: bool):
    """Mean, or `Weighted` by the batch's weights."""
    if weighted:
        return so.losses.Weighted((per_row * batch["weights"]).sum(), batch["weights"].sum())
    return per_row.mean()


def regression_batch(inputs: int, outputs: int):
    """Rows of growing scale, weights between 0 and 2 with whole rows of zero."""

    def make(draw: np.random.Generator):
        scale = np.linspace(0.2, 2.0, BATCH)[:, None]
        return {
            "x": scale * draw.normal(size=(BATCH, inputs)),
            "y": draw.normal(size=(BATCH, outputs)),
            "weights": np.maximum(0.0, draw.uniform(-0.5, 2.0, size=BATCH)),
        }

    return make


def _gpt(weighted: bool):
    config = gpt.config(vocab_size=32, dim=16, num_layers=2, num_heads=4, max_length=16)
    params = jax.tree.map(lambda x: x * 2, host_params(gpt.init, config, seed=1))

    def make(draw):
        batch = {"tokens": draw.integers(0, 32, size=(BATCH, 9))}
        if weighted:
            batch["weights"] = np.maximum(0.0, draw.uniform(-0.5, 2.0, size=(BATCH, 8)))
        return batch

    return params, gpt.model(config), gpt.rules, make


def _nnx(weighted: bool):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(12, 32, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.down = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(self.norm(jnp.tanh(self.up(x))))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, batch):
        out = nnx.merge(graph, params)(batch["x"])
        return reduce(((out - batch["y"]) ** 2).mean(-1), batch, weighted)

    return (
        params,
        loss_fn,
        [("up/kernel", P(None, "tensor")), ("down/kernel", P("tensor"))],
        regression_batch(12, 8),
    )


def _linen(weighted: bool):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            hidden = jnp.tanh(linen.Dense(24, name="up", param_dtype=jnp.float32)(x))
            return linen.Dense(8, name="down")(linen.RMSNorm(name="norm")(hidden))

    net = Net()
    params = jax.jit(net.init)(jax.random.key(0), np.zeros((1, 12), np.float32))

    def loss_fn(params, batch):
        return reduce(((net.apply(params, batch["x"]) - batch["y"]) ** 2).mean(-1), batch, weighted)

    return (
        params,
        loss_fn,
        [("up/kernel", P(None, "tensor")), ("down/kernel", P("tensor"))],
        regression_batch(12, 8),
    )


def _odd(weighted: bool):
    draw = np.random.default_rng(3)
    params = {
        "layers": [
            {"w": draw.normal(size=(7, 13)) * 0.4, "b": np.zeros(13)},
            {"w": draw.normal(size=(13, 24)) * 0.3, "b": np.zeros((24,))},
        ],
        "out": (draw.normal(size=(24, 5)) * 0.3, np.ones(())),
        "count": np.int32(3),
    }
    params = jax.tree.map(np.asarray, params)

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"][None, :])
        out = (x @ params["out"][0]) * params["out"][1] + params["count"]
        return reduce(((out - batch["y"]) ** 2).mean(-1), batch, weighted)

    rules = [
        (r"layers/1/w", P(None, "tensor")),
        (r"layers/1/b", P("tensor")),
        (r"out/0", P("tensor")),
    ]
    return params, loss_fn, rules, regression_batch(7, 5)


def _row(weighted: bool):
    draw = np.random.default_rng(5)
    params = {
        "up": draw.normal(size=(6, 24)) * 0.3,
        "square": np.eye(5) + 0.1 * draw.normal(size=(5, 5)),
        "down": draw.normal(size=(24, 5)) * 0.3,
    }

    @so.per_row
    def loss_fn(params, row):
        hidden = jnp.tanh(row["x"] @ params["up"])
        # a triangular solve, which no rule of the proof knows
        out = jnp.linalg.solve(params["square"], hidden @ params["down"])
        loss = ((out - row["y"]) ** 2).mean()
        if weighted:
            return so.losses.Weighted(loss * row["weights"], row["weights"])
        return loss

    rules = [(r"up", P(None, "tensor")), (r"down", P("tensor"))]
    return params, loss_fn, rules, regression_batch(6, 5)


MODELS = {"gpt": _gpt, "nnx": _nnx, "linen": _linen, "odd": _odd, "row": _row}
