"""Who takes part in `convergence.py`: the model, each way to train it, and the optimizer that all
of them have.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax

import shardopt as so
from shardopt.models import gpt

CONFIG = gpt.config(dim=32, num_layers=1, num_heads=2, max_length=32)
DEVICES = 4
H = 50
CONTROL = "ddp, exact"
WARM_UP = 0.1  # of the steps
RATE = 1.6e-2
RATES = dict.fromkeys(("DiLoCo", "DiLoCo (momentum 0.9)", "Streaming DiLoCo", "Local SGD"), 0.008)
"""Peaks of the learning rate other than RATE, as --tune found them."""
OUTER = optax.sgd(0.7, momentum=0.6, nesterov=True)
Make = Callable[[optax.GradientTransformation], so.ShardedOptimizer]


class Contender(NamedTuple):
    """A way to train.

    `limit` is what it may lose, None where nothing is claimed; `seeds` is how many at most.
    """

    make: Make
    limit: float | None = None
    seeds: int | None = None


def contenders(steps: int) -> dict[str, Contender]:
    """Return all ways to train for so many steps.

    For 0, as they are when no reducer warms up any more.
    """
    model = gpt.model(CONFIG)
    plain = so.make_mesh(data=DEVICES)
    apart = so.make_mesh(replica=DEVICES, data=1)
    feedback = so.reducers.error_feedback

    def compressed(reducer):
        return lambda tx: so.ddp(tx, plain, model, reducer=reducer)

    def replicas(combine, **how):
        return lambda tx: combine(so.ddp(tx, apart, model), sync_every=H, **how)

    found = {CONTROL: Contender(lambda tx: so.ddp(tx, plain, model))}
    for name, reducer in {
        "bf16": so.reducers.exact(jnp.bfloat16),
        "int8": so.reducers.int8(),
    }.items():
        found[f"{name}, error feedback"] = Contender(compressed(feedback(reducer)), 1.02)
        found[f"{name}, none"] = Contender(compressed(reducer), seeds=1)
    warmed = {
        "sign(128)": so.reducers.sign(128),
        "top_k(0.01)": so.reducers.top_k(0.01),
        "power_sgd(4)": so.reducers.power_sgd(4),
    }
    for name, reducer in warmed.items():
        late = so.reducers.warm_up(reducer, int(WARM_UP * steps)) if steps else reducer
        found[f"{name}, error feedback"] = Contender(compressed(feedback(late)), 1.02)
        found[f"{name}, none"] = Contender(compressed(late), seeds=1)
        found[f"{name}, no warm-up"] = Contender(compressed(feedback(reducer)), seeds=1)
    found["DiLoCo"] = Contender(replicas(so.diloco, outer=OUTER), 1.03)
    found["DiLoCo (momentum 0.9)"] = Contender(replicas(so.diloco), seeds=1)
    found["Streaming DiLoCo"] = Contender(
        replicas(so.diloco, outer=OUTER, fragments=2, delay=5, mix=0.5)
    )
    found["Local SGD"] = Contender(replicas(so.local_sgd))
    return found


def optimizer(peak: float, steps: int) -> optax.GradientTransformation:
    """Return AdamW, the same for all but its peak."""
    return optax.adamw(
        optax.warmup_cosine_decay_schedule(0.1 * peak, peak, steps // 10, steps, 0.01 * peak)
    )
