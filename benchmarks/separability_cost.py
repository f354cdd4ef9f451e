"""What it costs to check that a loss is a mean over rows: its seconds over those to the end of the first step.

    python separability_cost.py --rounds 3

The check is timed inside the first call of `opt.step`, with every cache of jax cleared before; the rest of that call is
tracing, compiling and one step. Claim: the check takes at most a tenth.
"""

import argparse
import statistics
import sys
import time

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.engine import build
from shardopt.models import gpt

CLAIM = 0.1
ROWS = 16


def mlp():
    """Vectors through six square layers."""
    draw = np.random.default_rng(0)
    params = [(draw.normal(size=(256, 256)) / 16).astype(np.float32) for _ in range(6)]

    def loss_fn(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss_fn, params, {name: draw.normal(size=(ROWS, 256)).astype(np.float32) for name in "xy"}


def of_gpt(dim, num_layers, length):
    """The GPT of `shardopt.models`, a scan over its blocks."""
    config = gpt.GPTConfig(dim=dim, num_layers=num_layers, max_length=length)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, length + 1), np.int32)
    return gpt.model(config), jax.device_get(gpt.init(config, jax.random.key(0))), {"tokens": tokens}


MODELS = {
    "mlp": mlp,
    "gpt 64 x 2": lambda: of_gpt(64, 2, 32),
    "gpt 256 x 8": lambda: of_gpt(256, 8, 128),
}


def first_step(name):
    """Return the seconds of the check, and those of the whole first step."""
    jax.clear_caches()
    loss_fn, params, batch = MODELS[name]()
    opt = so.fsdp(optax.adamw(1e-3), so.make_mesh(data=8), loss_fn)
    state, spent, check = jax.block_until_ready(opt.init(params)), [], build.check_separable

    def timed(*args, **options):
        start = time.perf_counter()
        found = check(*args, **options)
        spent.append(time.perf_counter() - start)
        return found

    build.check_separable = timed
    try:
        start = time.perf_counter()
        jax.block_until_ready(opt.step(state, batch))
        whole = time.perf_counter() - start
    finally:
        build.check_separable = check
    (checked,) = spent
    return checked, whole


def main(rounds):
    first_step("mlp")  # what jax does once a process
    times = {name: [] for name in MODELS}
    for _ in range(rounds):
        for name in MODELS:
            times[name].append(first_step(name))
    results = {"claim": f"at most {CLAIM}", "rounds": rounds, "models": {}}
    print(f"{'model':12} {'check':>8} {'first step':>11} {'ratio':>6}")
    for name, found in times.items():
        check, whole, ratio = (
            statistics.median(values) for values in zip(*((a, b, a / b) for a, b in found), strict=True)
        )
        results["models"][name] = {
            "check seconds": round(check, 4),
            "first step seconds": round(whole, 4),
            "median_ratio": round(ratio, 4),
        }
        print(f"{name:12} {check:6.3f} s {whole:9.2f} s {ratio:6.3f}")
    results["holds"] = all(row["median_ratio"] <= CLAIM for row in results["models"].values())
    print(write_json(__file__, results))
    return 0 if results["holds"] else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    sys.exit(main(parser.parse_args().rounds))
