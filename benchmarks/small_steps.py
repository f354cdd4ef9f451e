"""What a call of a step costs in Python beyond plain jit: three small steps, `fit`, and how it grows
with leaves, devices and kinds of batches.

Run: python benchmarks/small_steps.py [--rounds 7] [--leaves 10 100 1000]

Control: `jax.jit` of value_and_grad, optax and the norm of the gradient, with the placements of the
strategy. Seconds are those of the calling thread (`time.thread_time`). Contestants take turns, and
the smallest of the rounds counts. Claims: `opt.step` takes at most 0.1 ms more than plain jit, and
`fit` 0.2, with logging and all checks. A call grows with leaves and devices only as plain jit does,
also if a batch has the shape and dtype of leaves of the state and was just placed.
"""

import argparse
import time

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from growth import loss_fn as layers_loss
from growth import plain_step, smallest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so

CALLS = 300
WIDTH = 16


def readme_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def light_loss(params, batch):
    """Reads one number of each leaf, so that calling takes longer than computing."""
    return jnp.mean(batch["x"]) * sum(w[0, 0] for w in params.values())


def layers(count, width):
    return {f"w{i}": np.eye(width, dtype=np.float32) for i in range(count)}


README = {"x": np.eye(64, dtype=np.float32), "y": np.ones((64, 32), np.float32)}
SIZES = {
    "one layer of 64, one device": (so.ddp, 1, layers_loss, layers(1, 64)),
    "four layers of 128, one device": (so.ddp, 1, layers_loss, layers(4, 128)),
    "README, fsdp on 8 devices": (so.fsdp, 8, readme_loss, {"w": np.ones((64, 32), np.float32)}),
}


def batch_of(params):
    width = len(params.get("w", params.get("w0")))
    ones = np.ones((64, width), np.float32)
    return README if "w" in params else {"x": ones, "y": ones}


def contestants(strategy, devices, loss_fn, params, tx):
    """Return the optimizer, and steps and first states of it and of plain jit."""
    mesh = so.make_mesh(data=devices, devices=jax.devices()[:devices])
    options = {"min_shard_elements": 1} if strategy is so.fsdp else {}
    opt = strategy(tx, mesh, loss_fn, **options)
    state = opt.init(params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    plain_state = jax.device_put((params, tx.init(params)), (shardings.params, shardings.opt_state))
    return opt, {
        "plain": (plain_step(shardings, mesh, loss_fn, tx), plain_state),
        "shardopt": (opt.step, state),
    }


def loop(step, state, batch):
    """Return a function that takes steps, at most two at a time, as `opt.step` does on CPU."""
    kept = {"state": state}

    def run():
        waiting = None
        for _ in range(CALLS):
            kept["state"], metrics = step(kept["state"], batch)
            jax.block_until_ready(waiting)
            waiting = metrics["loss"]
        jax.block_until_ready(kept["state"])

    run()
    return run


def small(rounds):
    """Milliseconds of a call in a loop, with numpy batches, and of a step in `fit`."""
    results = {}
    for name, (strategy, devices, loss_fn, params) in SIZES.items():
        batch = batch_of(params)
        opt, steps = contestants(strategy, devices, loss_fn, params, optax.adamw(0.1))
        loops = {who: loop(step, state, batch) for who, (step, state) in steps.items()}
        kept = {"state": opt.init(params)}

        def fit(opt=opt, kept=kept, batch=batch):
            first = so.replace(kept["state"], step=0)
            options = {"num_steps": CALLS, "log": lambda *_: None, "progress": False}
            kept["state"] = so.fit(opt, first, [batch] * CALLS, **options).state

        fit()
        seconds = smallest(rounds, loops | {"fit": fit}, time.thread_time)
        row = {who: value / CALLS * 1e3 for who, value in seconds.items()}
        results[name] = row
        print(
            f"{name:32} plain {row['plain']:.3f} ms, opt.step {row['shardopt'] - row['plain']:.3f}"
            f" more, fit {row['fit'] - row['plain']:.3f} more",
            flush=True,
        )
    return results


def curves(rounds, leaves):
    """Milliseconds of a call while the devices are idle, by leaves, devices and kind of batch."""
    results = {}
    for strategy in (so.ddp, so.fsdp):
        for devices in (1, 8):
            for count in leaves:
                _, steps = contestants(
                    strategy, devices, light_loss, layers(count, WIDTH), optax.sgd(0.1)
                )
                rows = WIDTH * (1 if strategy is so.fsdp else devices)
                for kind, row in kinds(rounds, steps, rows, devices).items():
                    name = f"{strategy.__name__}, {devices} devices, {count} leaves, {kind}"
                    results[name] = row
                    print(
                        f"{name:50} plain {row['plain']:.3f} ms, {row['shardopt'] - row['plain']:.3f}"
                        f" more, ratio {row['shardopt'] / row['plain']:.2f}",
                        flush=True,
                    )
    return results


def kinds(rounds, steps, rows, devices):
    """Return milliseconds by kind of batch; a device has as many rows as a leaf of the state."""
    host = {"x": np.ones((rows, WIDTH), np.float32)}
    mesh = so.make_mesh(data=devices, devices=jax.devices()[:devices])
    placement = NamedSharding(mesh, P("data"))
    placed = jax.device_put(host, placement)
    batches = {
        "numpy": lambda: host,
        "placed once": lambda: placed,
        "placed anew": lambda: jax.device_put(host, placement),
    }
    states = {who: state for who, (_, state) in steps.items()}
    results = {}
    for kind, make in batches.items():
        seconds = {who: [] for who in steps}
        for turn in range(-2, 4 * rounds):
            for who, (step, _) in steps.items():
                batch = make()
                jax.block_until_ready((batch, states))
                start = time.thread_time()
                states[who], _ = step(states[who], batch)
                if turn >= 0:
                    seconds[who].append(time.thread_time() - start)
        results[kind] = {who: min(values) * 1e3 for who, values in seconds.items()}
    steps.update({who: (steps[who][0], states[who]) for who in steps})
    return results


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--leaves", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    results = {
        "small": small(arguments.rounds),
        "curves": curves(arguments.rounds, arguments.leaves),
    }
    print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
