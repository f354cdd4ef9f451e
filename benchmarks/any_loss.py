"""How wrong the mean of per-device losses is for losses that mix rows, and what shardopt computes.

    python benchmarks/any_loss.py

Each loss is written as for one device. Eight simulated devices, 64 rows. The rows of the table are
the relative error of the gradient, next to one device:

- the mean of the devices' gradients: `jax.lax.pmean` in a `shard_map`, as in data-parallel loops;
- the mean over micro-batches of one device, as in gradient accumulation;
- `so.fsdp(..., view="auto")`.
"""

import warnings

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardopt as so

DRAW = np.random.default_rng(0)
SCALE = np.linspace(0.2, 2, 64, dtype=np.float32)
BATCH = {
    "x": (SCALE[:, None] * DRAW.normal(size=(64, 12))).astype(np.float32),
    "y": DRAW.normal(size=(64, 8)).astype(np.float32),
    "mask": (DRAW.random(64) < SCALE / 2).astype(np.float32),
}
PARAMS = {
    "up": (0.4 * DRAW.normal(size=(12, 16))).astype(np.float32),
    "down": (0.4 * DRAW.normal(size=(16, 8))).astype(np.float32),
}


def forward(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def mean_over_rows(params, batch):
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def contrastive(params, batch):
    x, y = (
        z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        for z in (forward(params, batch["x"]), batch["y"])
    )
    return jnp.mean(jax.nn.logsumexp(4 * x @ y.T, axis=1) - 4 * jnp.sum(x * y, axis=1))


def masked_mean(params, batch):
    errors = jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])


def batch_norm(params, batch):
    x = batch["x"] @ params["up"]
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
    return jnp.mean((jnp.tanh(x) @ params["down"] - batch["y"]) ** 2)


def load_balance(params, batch):
    gates = jax.nn.softmax(batch["x"] @ params["up"])
    chosen = jax.nn.one_hot(gates.argmax(-1), 16)
    return 16 * jnp.sum(chosen.mean(0) * gates.mean(0)) + mean_over_rows(params, batch)


def worst_half(params, batch):
    errors = jnp.sort(jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2, axis=-1))
    return jnp.mean(errors[errors.size // 2 :])


LOSSES = [mean_over_rows, masked_mean, contrastive, batch_norm, load_balance, worst_half]


def error(grads, expected) -> float:
    """Return the norm of the difference over the norm of the expected gradient."""
    difference = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), grads, expected)
    return float(optax.global_norm(difference) / optax.global_norm(expected))


def of_devices(loss_fn):
    """Return the mean of the gradients of eight devices, each of its own rows."""

    def local(params, batch):
        varying = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        return jax.lax.pmean(jax.grad(loss_fn)(varying, batch), "data")

    mapped = jax.shard_map(
        local, mesh=so.make_mesh(data=8), in_specs=(P(), P("data")), out_specs=P()
    )
    return jax.jit(mapped)(PARAMS, BATCH)


def of_micro_batches(loss_fn):
    """Return the mean of the gradients of eight micro-batches on one device."""
    parts = jax.tree.map(lambda x: x.reshape(8, 8, *x.shape[1:]), BATCH)
    return jax.tree.map(
        lambda g: g.mean(0), jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0)))(PARAMS, parts)
    )


def of_shardopt(loss_fn):
    """Return the gradient of a step, which is the change of the parameters under SGD with rate 1."""
    opt = so.fsdp(optax.sgd(1.0), so.make_mesh(data=8), loss_fn, min_shard_elements=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the loss runs on the whole batch
        state, _ = opt.step(opt.init(PARAMS), BATCH)
    return jax.tree.map(lambda old, new: old - np.asarray(new), PARAMS, state.params)


def run() -> dict:
    """Return the relative errors of each loss."""
    results = {}
    for loss_fn in LOSSES:
        expected = jax.jit(jax.grad(loss_fn))(PARAMS, BATCH)
        results[loss_fn.__name__] = {
            "mean of devices": error(of_devices(loss_fn), expected),
            "mean of micro-batches": error(of_micro_batches(loss_fn), expected),
            "shardopt": error(of_shardopt(loss_fn), expected),
        }
    return results


def table(results: dict) -> str:
    """Return the rows as docs/notes/any_loss.md has them."""
    columns = ["mean of devices", "mean of micro-batches", "shardopt"]
    lines = [f"| loss | {' | '.join(columns)} |", "|---|---:|---:|---:|"]
    for name, row in results.items():
        cells = [f"{row[column]:.0%}" if row[column] > 1e-3 else "exact" for column in columns]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    _results = run()
    print(table(_results))
    print("written to", write_json(__file__, _results))
