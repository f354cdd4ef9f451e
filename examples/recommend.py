"""Train a recommender that consists mostly of embedding tables.

Asynchronous workers push only the rows that they used.

Run: python examples/recommend.py [--items 200000] [--workers 4] [--updates 2000] [--max-staleness
4]

Clicks are drawn from hidden tastes of users and items. As in real data, a few items are shown often
and most hardly ever (a Zipf distribution), so a batch uses a small part of the table. The model is
logistic matrix factorisation: the logit of a click is the inner product of the vectors of user and
item, plus the popularity of the item.
"""

import argparse
import os
from typing import NamedTuple

# one simulated CPU device per worker; real accelerators are used instead if there are any
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
    )

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so

TASTES = 16


class World(NamedTuple):
    """The numbers of users and items, the length of their vectors, and the Zipf exponent of item
    frequencies.
    """

    users: int
    items: int
    dim: int
    exponent: float = 1.2


def init(world, seed=0):
    """Return small random vectors as parameters.

    With zeros, users and items would have no gradient.
    """
    rng = np.random.default_rng(seed)
    shapes = {
        name: (count, world.dim) for name, count in (("users", world.users), ("items", world.items))
    }
    tables = {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return tables | {"popularity": np.zeros(world.items, np.float32)}


def logits(params, batch):
    """Return the log odds of each click."""
    vectors = params["users"][batch["user"]], params["items"][batch["item"]]
    return jnp.sum(vectors[0] * vectors[1], axis=1) + params["popularity"][batch["item"]]


def loss_fn(params, batch):
    """Return the mean loss over the clicks of a batch."""
    return optax.sigmoid_binary_cross_entropy(logits(params, batch), batch["click"]).mean()


def clicks(world, seed, size=256):
    """Yield batches without end: users, the items that they were shown, and whether they clicked."""
    tastes = np.random.default_rng(99).standard_normal((2, TASTES, TASTES)) / TASTES**0.25
    rng = np.random.default_rng(seed)
    frequency_sums = np.cumsum(np.arange(1.0, world.items + 1) ** -world.exponent)
    while True:
        user = rng.integers(world.users, size=size)
        item = np.minimum(
            np.searchsorted(frequency_sums, frequency_sums[-1] * rng.random(size)), world.items - 1
        )
        likes = np.sum(tastes[0][user % TASTES] * tastes[1][item % TASTES], axis=1)
        click = rng.random(size) < 1 / (1 + np.exp(-3 * likes))
        yield {
            "user": user.astype(np.int32),
            "item": item.astype(np.int32),
            "click": click.astype(np.float32),
        }


def train(world, *, workers=4, num_updates=2000, max_staleness=4, progress=False):
    """Return the result, and the bytes pushed as a share of the bytes of dense gradients."""
    opt = so.async_sgd(
        # state of unused rows does not change: nothing decays
        optax.adagrad(0.1, initial_accumulator_value=0.0),
        loss_fn,
        workers=workers,
        max_staleness=max_staleness,
        sparse=["^users$", "^items$", "^popularity$"],
    )
    held_out = next(clicks(world, seed=[0, 0], size=8192))

    @jax.jit
    def evaluate(params):
        is_correct = (logits(params, held_out) > 0) == (held_out["click"] > 0.5)
        return {"val_loss": loss_fn(params, held_out), "accuracy": is_correct.mean()}

    params = init(world)
    result = opt.run(
        params,
        lambda worker: clicks(world, seed=[1, worker]),
        num_updates=num_updates,
        evaluate=evaluate,
        evaluate_every=max(1, num_updates // 10),
        progress=progress,
    )
    dense_bytes = result.metrics["pushes"] * sum(leaf.nbytes for leaf in params.values())
    return result, result.metrics["push_bytes"] / dense_bytes


def main():
    """Train, and print the losses and the share of bytes that was pushed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        print(
            f"update {row['step']:6}  held-out loss {row['val_loss']:.4f}  accuracy"
            f" {row['accuracy']:.3f}"
        )
    rate, max_lead = result.metrics["pushes_per_second"], max(result.metrics["staleness"])
    print(
        f"{rate:.0f} pushes/s, at most {max_lead} steps ahead; pushed {share:.2%} of the bytes of"
        " dense gradients"
    )


if __name__ == "__main__":
    main()
