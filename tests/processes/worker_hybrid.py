"""One of four processes with a device each: `python worker_hybrid.py RANK PORT FOLDER`.

See test_hybrid_processes.py.

It prints its results as one line of JSON.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so

MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["kernel"]),
    loss=lambda outer, x, batch: so.losses.Weighted(
        (((x @ outer["in"].T - batch["x"]) ** 2).mean(-1) * batch["weight"]).sum(),
        batch["weight"].sum(),
    ),
)
SCHEDULES = {
    "eager_one_f_one_b": so.schedules.eager_one_f_one_b,
    "interleaved": functools.partial(so.schedules.interleaved, num_chunks=2),
    "zero_bubble": so.schedules.zero_bubble,
}
PLACEMENTS = {"eager_one_f_one_b": "ddp", "interleaved": "fsdp", "zero_bubble": "zero1"}


def make_params():
    draw = np.random.default_rng(1)
    return {
        "blocks": {"kernel": draw.normal(size=(4, 8, 8)) / 4},
        "in": draw.normal(size=(4, 8)) / 2,
    }


def batch_of(step):
    draw = np.random.default_rng(step)
    x = draw.normal(size=(16, 4)) * np.linspace(0.2, 2.0, 16)[:, None]
    return {"x": x, "weight": draw.uniform(size=16)}


def make_opt(schedule):
    mesh = so.make_mesh(data=2, pipeline=2, devices=jax.devices()[:4])
    tx = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))
    options = {"micro_batches": 4, "placement": PLACEMENTS[schedule], "min_shard_elements": 8}
    return so.hybrid(tx, mesh, MODEL, schedule=SCHEDULES[schedule], **options)


def run(opt, state, begin, end):
    losses = []
    for step in range(begin, end):
        losses.append(float(opt.evaluate(state, so.GlobalRows(batch_of(step)))["loss"]))
        state, metrics = opt.step(state, so.GlobalRows(batch_of(step)))
        losses += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return state, losses


def whole(opt, tree):
    everywhere = jax.sharding.NamedSharding(opt.mesh, jax.sharding.PartitionSpec())
    return [
        np.asarray(x).tolist()
        for x in jax.tree.leaves(jax.jit(lambda x: x, out_shardings=everywhere)(tree))
    ]


def main(folder):
    outcome = {}
    for schedule in SCHEDULES:
        opt = make_opt(schedule)
        state, losses = run(opt, opt.init(make_params()), 0, 2)
        so.save(folder / schedule, state)
        state, later_losses = run(opt, state, 2, 4)
        resumed_state, _ = run(opt, so.restore(folder / schedule, opt), 2, 4)
        held = sum(
            leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params["blocks"])
        )
        outcome[schedule] = {
            "losses": losses + later_losses,
            "params": whole(opt, state.params),
            "again": whole(opt, resumed_state) == whole(opt, state),
            "held": held,
        }
    print(json.dumps(outcome))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 1)
    so.initialize(f"127.0.0.1:{sys.argv[2]}", 4, int(sys.argv[1]))
    main(Path(sys.argv[3]))
