"""A recommender whose embedding tables are most of it: asynchronous workers push only the rows that they touched.

Run: python examples/recommend.py [--items 200000] [--workers 4] [--updates 2000] [--max-staleness 4]

Who likes what is drawn from hidden tastes. Items are met as real ones are, a few often and most hardly ever (Zipf), so
that a batch touches a small part of the table. The model is logistic matrix factorisation: the logit of a click is the
inner product of the user's and the item's vector, plus the item's popularity.
"""

import argparse
import os
from typing import NamedTuple

if __name__ == "__main__":  # simulated devices, one per worker; where there are real ones they are used
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so

TASTES = 16


class World(NamedTuple):
    """How many users and items there are, how long their vectors are, and how often items are met."""

    users: int
    items: int
    dim: int
    exponent: float = 1.2


def init(world, seed=0):
    """Small random vectors: at zero, users and items would have no gradient."""
    draw = np.random.default_rng(seed)
    vectors = {name: (count, world.dim) for name, count in (("users", world.users), ("items", world.items))}
    tables = {name: 0.1 * draw.standard_normal(shape, np.float32) for name, shape in vectors.items()}
    return tables | {"popularity": np.zeros(world.items, np.float32)}


def logits(params, batch):
    """The log odds of each click."""
    vectors = params["users"][batch["user"]], params["items"][batch["item"]]
    return jnp.sum(vectors[0] * vectors[1], axis=1) + params["popularity"][batch["item"]]


def loss_fn(params, batch):
    """The mean over the clicks of a batch."""
    return optax.sigmoid_binary_cross_entropy(logits(params, batch), batch["click"]).mean()


def clicks(world, seed, size=256):
    """Batches without end: who was shown what, and whether they liked it."""
    tastes = np.random.default_rng(99).standard_normal((2, TASTES, TASTES)) / TASTES**0.25
    draw, often = np.random.default_rng(seed), np.cumsum(np.arange(1.0, world.items + 1) ** -world.exponent)
    while True:
        user = draw.integers(world.users, size=size)
        item = np.minimum(np.searchsorted(often, often[-1] * draw.random(size)), world.items - 1)
        likes = np.sum(tastes[0][user % TASTES] * tastes[1][item % TASTES], axis=1)
        click = draw.random(size) < 1 / (1 + np.exp(-3 * likes))
        yield {"user": user.astype(np.int32), "item": item.astype(np.int32), "click": click.astype(np.float32)}


def train(world, *, workers=4, num_updates=2000, max_staleness=4, progress=False):
    """Return the result, and what part of the bytes of dense gradients was pushed."""
    opt = so.async_sgd(
        optax.adagrad(0.1, initial_accumulator_value=0.0),  # its sums of squares wait with their rows: nothing decays
        loss_fn,
        workers=workers,
        max_staleness=max_staleness,
        sparse=["^users$", "^items$", "^popularity$"],
    )
    held_out = next(clicks(world, seed=[0, 0], size=8192))

    @jax.jit
    def evaluate(params):
        right = (logits(params, held_out) > 0) == (held_out["click"] > 0.5)
        return {"val_loss": loss_fn(params, held_out), "accuracy": right.mean()}

    params = init(world)
    result = opt.run(
        params,
        lambda worker: clicks(world, seed=[1, worker]),
        num_updates=num_updates,
        evaluate=evaluate,
        evaluate_every=max(1, num_updates // 10),
        progress=progress,
    )
    dense = result.metrics["pushes"] * sum(leaf.nbytes for leaf in params.values())
    return result, result.metrics["push_bytes"] / dense


def main():
    """Train, and say how well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--max-staleness", type=int, default=4)
    options = parser.parse_args()
    world = World(options.users, options.items, options.dim)
    result, share = train(
        world,
        workers=options.workers,
        num_updates=options.updates,
        max_staleness=options.max_staleness,
        progress=True,
    )
    for row in result.metrics["evaluations"]:
        print(f"update {row['step']:6}  held-out loss {row['val_loss']:.4f}  accuracy {row['accuracy']:.3f}")
    rate, behind = result.metrics["pushes_per_second"], max(result.metrics["staleness"])
    print(f"{rate:.0f} pushes/s, at most {behind} steps ahead; pushed {share:.2%} of the bytes of dense gradients")


if __name__ == "__main__":
    main()
