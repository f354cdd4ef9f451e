"""One of several processes with two devices each: `python worker_start.py RANK PORT COUNT`.

The last process begins with something else. Prints the error of each case as one JSON line.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.rows import first_params, loss_fn, whole

rank = int(sys.argv[1])
port = sys.argv[2]
count = int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
so.initialize(f"127.0.0.1:{port}", count, rank)
is_last = rank == count - 1


def own(step):
    return jax.tree.map(lambda leaf: leaf[rank::count], whole(step))


def fsdp(tx=None, loss=loss_fn, **options):
    options = {"min_shard_elements": 1} | options
    return so.fsdp(tx or optax.adam(0.05), so.make_mesh(), loss, **options)


def step(**options):
    opt = fsdp(**options)
    return float(opt.step(opt.init(first_params()), own(0))[1]["loss"])


def train(**options):
    opt = fsdp()
    options = {"num_steps": 3, "progress": False} | options
    return so.fit(opt, opt.init(first_params()), map(own, range(9)), **options).step


def scaled(factor):
    return lambda params, batch: factor * loss_fn(params, batch)


def evaluate(state):
    return {"score": 1.0}


drawn = np.random.default_rng(rank).normal(size=4).astype(np.float32)
vector = np.ones(4, np.float32)
nested = {
    "blocks": [{"w": vector, "b": vector}, {"w": vector, "b": vector + is_last}],
    "head": vector,
}
begun = fsdp()
state = begun.init(first_params())
CASES = {
    # parameters
    "same": step,
    "same numbers and arrays": lambda: str(
        fsdp().init({"w": jnp.ones(4), "s": 1.0}).params["s"].dtype
    ),
    "one draw a process": lambda: fsdp().init({"w": drawn}),
    "one nested leaf": lambda: fsdp().init(nested),
    "one bit": lambda: fsdp().init({"w": np.nextafter(vector, 2) if is_last else vector}),
    "a jax array": lambda: fsdp().init({"w": jnp.asarray(drawn), "v": vector}),
    "a number": lambda: fsdp().init({"w": vector, "s": 1.0 + is_last}),
    "another shape": lambda: fsdp().init({"w": np.ones(4 + 4 * is_last, np.float32)}),
    "another dtype": lambda: fsdp().init(
        {"w": vector.astype(np.float16 if is_last else np.float32)}
    ),
    "a leaf more": lambda: fsdp().init({"w": vector} | ({"bias": vector} if is_last else {})),
    "text": lambda: fsdp().init({"w": np.arange(2) if is_last else np.array(["a", 1], object)}),
    # seeds
    "another seed": lambda: fsdp().init(first_params(), jax.random.key(int(is_last))),
    "a seed for each process": lambda: fsdp().init(first_params(), jax.random.key(rank)),
    "a split key": lambda: fsdp().init(
        first_params(), jax.random.split(jax.random.key(0))[rank % 2]
    ),
    "another seed of init_fn": lambda: fsdp().init(
        lambda key: {"w": jax.random.normal(key, 4)}, jax.random.key(int(is_last))
    ),
    # options
    "micro_batches": lambda: step(micro_batches=1 + is_last),
    "min_shard_elements": lambda: step(min_shard_elements=1 + is_last),
    "gather_dtype": lambda: step(gather_dtype=jnp.bfloat16 if is_last else None),
    "rules": lambda: step(rules=[("w", "frozen")] if is_last else []),
    "num_steps": lambda: train(num_steps=3 + is_last),
    "log_every": lambda: train(log_every=3 + is_last),
    "evaluate": lambda: train(evaluate=(evaluate, 2) if is_last else None),
    "early_stopping": lambda: train(
        early_stopping=so.training.EarlyStopping("loss", patience=1 + is_last)
    ),
    # code
    "learning rate": lambda: step(tx=optax.adam(0.05 + 0.05 * is_last)),
    "schedule": lambda: step(tx=optax.adam(optax.cosine_decay_schedule(0.1, 10 + is_last))),
    "optimizer": lambda: step(tx=optax.sgd(0.1) if is_last else optax.adam(0.1)),
    "loss": lambda: step(loss=scaled(1.0 + is_last)),
    "init_fn": lambda: fsdp().init(
        lambda key: {"w": jax.random.normal(key, 4) * (1.0 + is_last)}, jax.random.key(0)
    ),
    "checkpoints on one": lambda: (
        so.Checkpoints(".", 1, 1) if is_last else fsdp().init(first_params())
    ),
    "a step on one": lambda: begun.step(state, own(0)) if is_last else fsdp().init(first_params()),
    "another call": lambda: (
        train(num_steps=1)
        if is_last
        else so.training.evaluation(fsdp(), [own(0)])(fsdp().init(first_params()))
    ),
}


def outcome(case):
    try:
        return str(case())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


print(json.dumps({name: outcome(case) for name, case in CASES.items()}), flush=True)
