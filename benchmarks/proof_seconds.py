"""What the proof adds to the first step: the seconds in which the loss is traced and proved.

    python benchmarks/proof_seconds.py --rounds 3

The first call of `opt.step` traces, proves, compiles and takes one step, with all caches of jax
cleared. Seconds are of this process's CPU, so that other processes do not count. The proof is all
that `find_mixing` does: two traces and the walk over both. Claim: it takes at most 0.05 of the rest
of the first step, or 0.05 s.
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
from separability_cost import MODELS

import shardopt as so
from shardopt.losses import _global_view, _obstacle
from shardopt.losses._separable import find_mixing

CLAIM = 0.05
SECONDS = 0.05
spent: list[float] = []


def readme():
    """The loss of the README, with its parameters and its batch."""

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    batch = {"x": np.eye(64, dtype=np.float32), "y": np.ones((64, 32), np.float32)}
    return loss_fn, {"w": jnp.ones((64, 32))}, batch


LOSSES = {"readme": readme} | {name: MODELS[name] for name in ("gpt 64 x 2", "gpt 256 x 8")}


def timed(*arguments, **options):
    """Find what mixes rows, and note the seconds."""
    start = time.process_time()
    try:
        return find_mixing(*arguments, **options)
    finally:
        spent.append(time.process_time() - start)


def first_step(name):
    """Return the seconds of the proof, and of the rest of the first step."""
    jax.clear_caches()
    spent.clear()
    loss_fn, params, batch = LOSSES[name]()
    opt = so.fsdp(optax.adamw(1e-3), so.make_mesh(data=8), loss_fn)
    state = jax.block_until_ready(opt.init(params))
    start = time.process_time()
    jax.block_until_ready(opt.step(state, batch))
    seconds = time.process_time() - start
    assert spent, "nothing was proved"
    return sum(spent), seconds - sum(spent)


def main(rounds):
    for module in (_global_view, _obstacle):
        module.find_mixing = timed
    first_step("readme")  # what jax does once a process
    results = {
        "claim": f"at most {CLAIM} of the rest of the first step, or {SECONDS} s",
        "rounds": rounds,
        "losses": {},
    }
    for name in LOSSES:
        pairs = [first_step(name) for _ in range(rounds)]
        proof, others = (statistics.median(column) for column in zip(*pairs, strict=True))
        share = statistics.median(a / b for a, b in pairs)
        row = {"proof_seconds": round(proof, 4), "other_seconds": round(others, 3)}
        row |= {"share": round(share, 4), "holds": share <= CLAIM or proof <= SECONDS}
        results["losses"][name] = row
        print(f"{name:12} {proof:7.4f} s of {others:6.2f} s {share:7.4f}", flush=True)
    results["holds"] = all(row["holds"] for row in results["losses"].values())
    print(write_json(__file__, results))
    return 0 if results["holds"] else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    sys.exit(main(parser.parse_args().rounds))
