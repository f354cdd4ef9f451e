"""What benchmarks of optimizers share: a small GPT on one device, batches drawn once a seed, curves
of held-out loss.
"""

import itertools
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt import data
from shardopt.models import gpt

BATCH = 16
LENGTH = 32
HELD_OUT = 64  # batches
TUNING_SEED = 1000


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Warm up over a tenth of the steps, then fall as a cosine."""
    return optax.warmup_cosine_decay_schedule(0.1 * peak, peak, steps // 10, steps, 0.01 * peak)


class Task:
    """The text, and the model that learns it."""

    def __init__(self, config: gpt.config):
        self.config = config
        self.loss_fn = gpt.model(config).loss_fn
        self.windows, held_out = data.split(data.open_corpus(), LENGTH)
        drawn = [batch["tokens"] for batch in data.spread_batches(held_out, BATCH, HELD_OUT)]
        held_out = {"tokens": jnp.asarray(np.concatenate(drawn))}
        self.evaluate = jax.jit(lambda params: self.loss_fn(params, held_out))

    def train(
        self, tx: optax.GradientTransformation, steps: int, seeds: Iterable[int], every: int
    ) -> list[dict[str, Any]]:
        """Return of each seed the held-out loss every so many steps and at the end, and the bytes
        of the state.
        """

        def step(carry, tokens):
            params, state = carry
            grads = jax.grad(self.loss_fn)(params, {"tokens": tokens})
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        run = jax.jit(lambda carry, tokens: jax.lax.scan(step, carry, tokens)[0], donate_argnums=0)
        runs = []
        for seed in seeds:
            drawn = itertools.islice(data.batches(self.windows, BATCH, seed=seed), steps)
            tokens = np.stack([batch["tokens"] for batch in drawn]).reshape(
                steps // every, every, BATCH, -1
            )
            params = gpt.init(self.config, jax.random.key(seed))
            carry = (params, tx.init(params))
            curve = []
            start = time.perf_counter()
            for i, chunk in enumerate(tokens, 1):
                carry = run(carry, chunk)
                curve.append([i * every, float(self.evaluate(carry[0]))])
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(carry[1]))
            seconds = time.perf_counter() - start
            runs.append(
                {"loss": curve[-1][1], "curve": curve, "state_bytes": nbytes, "seconds": seconds}
            )
        return runs
