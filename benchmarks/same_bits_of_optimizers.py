"""Which optimizers have the same bits on every mesh, in the code that users run.

Run: python benchmarks/same_bits_of_optimizers.py [--only adamw lion]

Control: `so.ddp` with `so.reducers.exact(tile_rows=2)` on one device. Test: `so.fsdp` with the same
on 4 and 8 fake devices, three steps each. Leaves have shapes whose shards XLA compiles to other
loops: 1 to 8,192 numbers, odd sizes, one to five dims. Claim: parameters, state and metrics are equal
bit for bit. The tests of the contract compile without optimisation, so they do not see it all.
"""

import argparse
import warnings

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import shardopt as so
from shardopt.core import is_key

SHAPES = [(4, 8), (4, 32), (8, 8), (8,), (4, 7), (8, 5), (4, 8, 3, 4, 8), (24, 3), (7,), (8, 13)]
DRAW = np.random.default_rng(0)
PARAMS = {f"leaf {i}": DRAW.normal(size=shape).astype("f") for i, shape in enumerate(SHAPES)}
SIZE = sum(leaf.size for leaf in PARAMS.values())
WEIGHTS = DRAW.normal(size=(SIZE, 4)).astype("f")
STEPS = 3
MESHES = [(so.ddp, 1), (so.fsdp, 4), (so.fsdp, 8)]


def of_each(f):
    """Return a transformation that applies a function to each update."""
    return optax.stateless(lambda updates, params: jax.tree.map(f, updates))


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.01),
    "adam, moments in bfloat16": optax.adam(0.01, mu_dtype=jnp.bfloat16),
    "adam, clipping, schedule": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adam(optax.warmup_cosine_decay_schedule(0, 0.1, 2, 10)),
    ),
    "MultiSteps": optax.MultiSteps(optax.adamw(0.01), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adamw(0.01), 2),
    "skip_anomalies": so.transforms.skip_anomalies(optax.adamw(0.01)),
    "average_params": optax.chain(optax.adamw(0.01), so.transforms.average_params(0.9)),
    "soap": so.optimizers.soap(0.01),
    "muon": contrib.muon(0.01),
    "prodigy": contrib.prodigy(0.1),
    "cocob": contrib.cocob(),
    "dadapt_adamw": contrib.dadapt_adamw(),
    "dog": contrib.dog(),
    "schedule_free_adamw": contrib.schedule_free_adamw(0.01),
    "ademamix": contrib.ademamix(0.01),
    "noisy_sgd": optax.noisy_sgd(0.01, key=0),
    "centralize": optax.chain(optax.centralize(), optax.adam(0.01)),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "polynomials": optax.chain(
        of_each(lambda x: jnp.tanh(x) * 0.1 + jnp.exp(-x * x) * 0.3 * x + jnp.log1p(jnp.abs(x))),
        optax.adam(0.01),
    ),
}
NAMES = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adamaxw", "adan", "amsgrad", "fromage"),
    *("lamb", "lars", "lion", "nadamw", "novograd", "radam", "rmsprop", "rprop", "sign_sgd"),
    *("sm3", "yogi"),
)
OPTIMIZERS |= {name: getattr(optax, name)(0.01) for name in NAMES}


def loss_fn(params, batch):
    numbers = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])
    waves = jnp.sin(batch["x"] @ (numbers[:, None] * WEIGHTS)).sum(-1)
    return jnp.mean(waves + (numbers * numbers * batch["z"]).mean(-1))


def batch_of(seed):
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=(16, SIZE)).astype("f") / 10 for name in ("x", "z")}


def trained(tx, strategy, devices):
    """Return the bits of each leaf after the last step."""
    mesh = so.make_mesh(devices=jax.devices()[:devices])
    options = {} if strategy is so.ddp else {"min_shard_elements": 1}
    opt = strategy(tx, mesh, loss_fn, reducer=so.reducers.exact(tile_rows=2), **options)
    state = opt.init(PARAMS)
    for step in range(STEPS):
        state, metrics = opt.step(state, batch_of(step))
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state, metrics))
    values = [jax.random.key_data(leaf) if is_key(leaf) else leaf for _, leaf in leaves]
    return {
        jax.tree_util.keystr(path): np.asarray(value).tobytes()
        for (path, _), value in zip(leaves, values, strict=True)
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    names = parser.parse_args().only
    warnings.simplefilter("ignore")
    results = {}
    for name in names:
        expected, *others = [trained(OPTIMIZERS[name], *where) for where in MESHES]
        differing = [[path for path in bits if bits[path] != expected[path]] for bits in others]
        results[name] = {
            f"{devices} devices": paths
            for (_, devices), paths in zip(MESHES[1:], differing, strict=True)
        }
        print(name, *(len(paths) for paths in differing), flush=True)
    equal = sum(not any(result.values()) for result in results.values())
    print(write_json(__file__, {"optimizers": len(results), "equal": equal, "differing": results}))


if __name__ == "__main__":
    main()
