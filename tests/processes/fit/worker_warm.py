"""A run with a folder, which prints the XLA programs that it compiled: `python worker_warm.py KIND
FOLDER NUM_DEVICES`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src import compiler

import shardopt as so

COMPILED = []
"""The names of the programs that XLA compiled; one from jax's cache is none of them."""
MODEL = so.BlockModel(
    lambda params, batch: batch["x"] @ params["v"],
    lambda params, x: x + jax.nn.relu(x @ params["w"]),
    lambda params, x, batch: jnp.mean((x.sum(-1) - batch["y"]) ** 2),
)
_compile = compiler.backend_compile_and_load


def compile_and_note(backend, module, *args, **options):
    COMPILED.append(str(module.operation.attributes["sym_name"]).strip('"'))
    return _compile(backend, module, *args, **options)


compiler.backend_compile_and_load = compile_and_note


def loss_fn(params, batch, rng=None):
    x = jax.nn.relu(batch["x"] @ params["w"])
    if rng is not None:
        x = x * jax.random.bernoulli(rng, 0.9, x.shape)
    return jnp.mean((x.sum(-1) - batch["y"]) ** 2), {"size": jnp.abs(x).mean()}


def init(key):
    return {"w": jax.random.uniform(key, (16, 16)) / 16}


def init_model(key):
    return {
        "v": jax.random.uniform(key, (16, 16)) / 16,
        "blocks": {"w": jnp.zeros((4, 16, 16))},
    }


def strategy(kind):
    """Return a strategy, how it begins, and arguments of `fit`."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    if kind == "hybrid":
        opt = so.hybrid(tx, so.make_mesh(pipeline=2), MODEL, micro_batches=2)
        return opt, init_model, {}
    if kind == "diloco":
        inner = so.ddp(tx, so.make_mesh(replica=2), loss_fn)
        return so.diloco(inner, sync_every=2), init, {}
    if kind == "verified":
        tx = so.transforms.skip_anomalies(tx)
        opt = so.zero(tx, so.make_mesh(), loss_fn, min_shard_elements=1)
        return opt, init, {"cross_check_every": 2}
    check = so.hlo.check_proved if kind == "proved" else None
    opt = so.fsdp(tx, so.make_mesh(), loss_fn, min_shard_elements=1, check=check)
    return opt, init, {"norms_every": 2}


def batches():
    draw = np.random.default_rng(0)
    while True:
        x = draw.normal(size=(16, 16))
        y = draw.normal(size=16)
        yield {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def main(kind, folder, num_devices):
    jax.config.update("jax_num_cpu_devices", int(num_devices))
    with so.Checkpoints(folder, every=2, keep=2) as checkpoints:
        opt, start, options = strategy(kind)
        first = checkpoints.latest() or 0
        if kind == "by hand":
            state = opt.init(start, jax.random.key(0))
            if first:
                state, _ = checkpoints.restore(opt)
            stream = batches()
            for step in range(first + 1, first + 5):
                state, _ = opt.step(state, next(stream))
                if checkpoints.due(step):
                    checkpoints.save(state, step=step)
        else:
            held_out = [next(batches())]
            result = so.fit(
                opt,
                so.training.DeferredInit(start, jax.random.key(0)),
                batches(),
                num_steps=first + 4,
                checkpoints=checkpoints,
                evaluate=so.training.evaluation(opt, held_out),
                log_every=2,
                progress=False,
                **options,
            )
            state = result.state
        report = str(opt.config.report())
        if kind == "proved":
            report += so.hlo.audit(opt.step, state, held_out[0]).prove().verdict
    print(json.dumps({"compiled": COMPILED, "step": int(state.step), "report": report}))


if __name__ == "__main__":
    main(*sys.argv[1:])
