"""Whether meshes, placements, optimizers and models have the same bits, in the code that users run.

Run: python benchmarks/same_bits_of_meshes.py [--rows 'gpt.*soap'] [--out results.json]

Control: `so.ddp` with `so.reducers.exact(tile_rows=2)` on one device. Test: the same problem on
another mesh, up to 16 fake devices. Claim: each leaf of parameters, optimizer state and metrics is
equal bit for bit after each of 50 steps, and so are evaluations.

- AdamW: all of 12 meshes x 5 placements x 3 models.
- 8 optimizers: rows that contain each pair of values of meshes, placements, models and options.
- Runs that are saved, and restored on another mesh and placement, five times.
- `--threads`: some rows in processes with 1, 2 and 4 threads of the host.

Each row is written to a file of lines as it ends. The same command continues with the others.
"""

import argparse
import collections
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import fake_devices, write_json

DEVICES = int(os.environ.get("DEVICES", "16"))
fake_devices(DEVICES)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from support.pairwise import all_pairs

import shardopt as so
from shardopt.core import is_key
from shardopt.models import gpt

STEPS = 50
ROWS, SHORT, ODD = 64, 32, 48
"""The rows of a batch, and of a smaller one: 24 tiles of 2 rows are three for each of 8 devices."""

MESHES = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (1, 16)]
MESHES += [(2, 8), (4, 4)]
"""(replica, data)"""

PLACEMENTS = ["ddp", "zero1", "zero2", "fsdp", "hybrid"]
SWITCHES = [
    ((1, 4), "fsdp"),
    ((1, 16), "zero2"),
    ((2, 2), "hybrid"),
    ((1, 1), "ddp"),
    ((4, 2), "zero1"),
    ((1, 8), "fsdp"),
]
"""The mesh and placement of each part of a run that changes them."""

GPT = gpt.config(vocab_size=64, dim=16, num_layers=2, num_heads=2, tied=True)


def plain_loss(params, batch):
    """What a user writes: a weighted loss of an MLP, and metrics."""
    hidden = jax.nn.gelu(batch["x"] @ params["in"]) * params["scale"]
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], batch["y"])
    total = so.losses.Weighted((losses * batch["weight"]).sum(), batch["weight"].sum())
    return total, {"largest": so.losses.Max(losses.max()), "count": so.losses.Sum(losses.size)}


def long_loss(params, batch):
    """A tile of it has sums over 2 x 2048 positions, which XLA:CPU divides between threads."""
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"]) @ params["out"]) ** 2)


class Classifier(nnx.Module):
    """The flax module of docs/models.md, which drops units."""

    def __init__(self, rngs):
        self.up = nnx.Linear(12, 32, rngs=rngs, use_bias=False)
        self.dropout, self.norm = nnx.Dropout(0.2, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs, use_bias=False)

    def __call__(self, x):
        """Return the output of each row."""
        return self.down(self.dropout(jax.nn.relu(self.norm(self.up(x)))))


def classifier_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["target"]) ** 2)


def batch_of(rows, seed):
    draw = np.random.default_rng(seed)
    return {
        "x": draw.normal(size=(rows, 12)).astype("f"),
        "y": draw.integers(0, 8, rows).astype("i"),
        "weight": draw.uniform(0.1, 2, rows).astype("f"),
        "target": draw.normal(size=(rows, 8)).astype("f"),
    }


def tokens_of(rows, seed):
    return {"tokens": np.random.default_rng(seed).integers(0, 64, (rows, 9), "i")}


def long_batch_of(rows, seed):
    return {"x": np.random.default_rng(seed).normal(size=(rows, 2048, 64)).astype("f")}


@functools.cache
def problem(model):
    """Return the loss, the first parameters, options and a function that draws a batch."""
    if model == "gpt":
        params = jax.device_get(gpt.init(GPT, jax.random.key(0)))
        return gpt.model(GPT), params, {}, tokens_of
    if model == "flax":
        params, loss, rules = so.interop.nnx(Classifier(nnx.Rngs(0)), classifier_loss)
        return loss, jax.device_get(params), {"rules": rules}, batch_of
    draw = np.random.default_rng(0)
    if model == "long":
        params = {name: draw.normal(size=(64, 64)).astype("f") / 8 for name in ("in", "out")}
        return long_loss, params, {}, long_batch_of
    shapes = {"in": (12, 24), "out": (24, 8), "scale": (24,)}
    params = {name: draw.normal(size=shape).astype("f") / 3 for name, shape in shapes.items()}
    return plain_loss, params, {}, batch_of


def optimizer(name, model):
    """Return the transformation; SOAP and Muon take the leaves of a GPT as matrices."""
    matrices = gpt.matrices if model == "gpt" else None
    schedule = optax.warmup_cosine_decay_schedule(0, 0.01, 5, STEPS)
    numbers = so.optimizers.muon_dimension_numbers(matrices)
    return {
        "sgd": optax.sgd(0.05, momentum=0.9),
        "adamw": optax.adamw(0.01),
        "muon": optax.contrib.muon(0.01, muon_weight_dimension_numbers=numbers),
        "soap": so.optimizers.soap(0.01, matrices=matrices),
        "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=8),
        "clipping": optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(schedule)),
        "MultiSteps": optax.MultiSteps(optax.adamw(0.01), 3).gradient_transformation(),
        "skip_anomalies": so.transforms.skip_anomalies(optax.adamw(0.01)),
    }[name]


OPTIMIZERS = ["sgd", "adafactor", "clipping", "MultiSteps", "skip_anomalies"]
OPTIMIZERS += ["adamw", "muon", "soap"]
MODELS = ["plain", "flax", "gpt"]
CONTROL = {"mesh": (1, 1), "placement": "ddp", "micro_batches": 1, "least": 1}
FACTORS = {
    "optimizer": OPTIMIZERS,
    "mesh": MESHES,
    "placement": PLACEMENTS,
    "model": MODELS,
    "evaluates": [False, True],
    "micro_batches": [1, 4],
    "least": [1, 300],
}
"""`least`: the elements of a leaf that is sharded."""
KEYS = [*FACTORS, "ragged"]
"""What makes a row. `ragged`: the rows of each seventh batch; 0 for as many as in the others."""


def ragged_of(row):
    """Return the rows of a smaller batch, of which each device has whole tiles; 0 for none."""
    return ODD if row["model"] == "flax" and np.prod(row["mesh"]) <= 8 else 0


def all_rows():
    """Return the rows of AdamW, those of all optimizers, and those that change their mesh."""
    product = [
        {"optimizer": "adamw", "mesh": mesh, "placement": placement, "model": model}
        | {"ragged": SHORT if i % 12 == 0 else 0, "evaluates": i % 12 == 6}
        | {"micro_batches": (1, 4)[i % 2], "least": (1, 300)[i // 2 % 2]}
        for i, (model, mesh, placement) in enumerate(itertools.product(MODELS, MESHES, PLACEMENTS))
    ]
    pairs = [row | {"ragged": ragged_of(row)} for row in all_pairs(FACTORS)]
    common = {"mesh": "switches", "placement": "switches", "micro_batches": 1, "least": 1}
    several = [*itertools.product(["adamw"], MODELS), ("muon", "gpt"), ("soap", "plain")]
    switching = [
        common
        | {"optimizer": name, "model": model, "evaluates": True}
        | {"ragged": SHORT if model == "plain" else 0}
        for name, model in several
    ]
    pairs = [row for row in pairs if row not in product]
    rows = [{name: row[name] for name in KEYS} for row in [*product, *pairs, *switching]]
    # rows of one control are neighbours; those that compile quickly come first
    columns = {"model": MODELS, "ragged": [0, SHORT, ODD]}

    def place(row):
        return [OPTIMIZERS.index(row["optimizer"]), *[columns[x].index(row[x]) for x in columns]]

    return sorted(rows, key=lambda row: [row["model"] == "gpt", *place(row)])


def strategy_of(row, mesh, placement):
    loss, _, options, _ = problem(row["model"])
    tx = optimizer(row["optimizer"], row["model"])
    replicas, data = mesh
    devices = jax.devices()[: replicas * data]
    exact = so.reducers.exact(tile_rows=2)
    options = options | {"reducer": exact, "micro_batches": row["micro_batches"]}
    sharded = options | {"min_shard_elements": row["least"]}
    if placement == "hybrid" and row["model"] != "gpt":
        # hybrid sharding on a mesh of the user
        users = Mesh(np.array(devices).reshape(mesh), ("copies", "shards"))
        return so.fsdp(tx, so.Axes(users, replica="copies", data="shards"), loss, **sharded)
    mesh = so.make_mesh(replica=replicas, data=data, devices=devices)
    if placement == "ddp":
        return so.ddp(tx, mesh, loss, **options)
    if placement in ("zero1", "zero2"):
        return so.zero(tx, mesh, loss, stage=int(placement[-1]), **sharded)
    return {"fsdp": so.fsdp, "hybrid": so.hybrid}[placement](tx, mesh, loss, **sharded)


def digests(tree):
    """Return path -> digest of the bits of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    values = jax.device_get([jax.random.key_data(x) if is_key(x) else x for _, x in leaves])
    return {
        jax.tree_util.keystr(path): hashlib.blake2b(
            np.asarray(x).tobytes(), digest_size=8
        ).hexdigest()
        for (path, _), x in zip(leaves, values, strict=True)
    }


def history(row, steps, folder):
    """Return the digests of the leaves after each step, and of evaluations at the end."""
    _, params, _, draw = problem(row["model"])
    switches = row["mesh"] == "switches"
    places = SWITCHES if switches else [(row["mesh"], row["placement"])]
    rounds = []
    for part, place in enumerate(places):
        opt = strategy_of(row, *place)
        if part:
            state = so.restore(folder, opt, abstract_params=jax.eval_shape(lambda: params))
        else:
            state = opt.init(params, rng=jax.random.key(1))
        for step in range(part * steps // len(places), (part + 1) * steps // len(places)):
            is_last = row["ragged"] and step % 7 == 6
            batch = draw(row["ragged"] if is_last else ROWS, step)
            state, metrics = opt.step(state, batch)
            leaves = {"params": state.params, "opt_state": state.opt_state, "metrics": metrics}
            rounds.append(digests(leaves))
        if switches:
            so.save(folder, state)
    if row["evaluates"]:
        evaluate = so.training.evaluation(opt, [draw(ROWS, 100), draw(11, 101)])
        rounds.append(digests({"evaluation": evaluate(state)}))
    return rounds


@functools.lru_cache(maxsize=2)
def control(model, optimizer, ragged):
    """Return the history of one device."""
    row = {"model": model, "optimizer": optimizer, "ragged": ragged, "evaluates": True}
    return history(row | CONTROL, STEPS, None)


def hash_of(rounds):
    return hashlib.sha256(json.dumps(rounds).encode()).hexdigest()[:16]


def compared(row):
    """Return the row with its hash, and with the first step and leaves that differ, if any."""
    with tempfile.TemporaryDirectory() as folder:
        rounds = history(row, STEPS, Path(folder) / "checkpoint")
    expected = control(row["model"], row["optimizer"], row["ragged"])
    differences = [
        {"step": step + 1, "leaves": [path for path in actual if actual[path] != right.get(path)]}
        for step, (actual, right) in enumerate(zip(rounds, expected, strict=False))
        if actual != right
    ]
    first = differences[0] if differences else None
    return row | {"hash": hash_of(rounds), "leaves": len(rounds[0]), "first difference": first}


def name_of(row):
    return json.dumps({name: row[name] for name in KEYS})


def run(rows, lines, minutes):
    """Return the results of rows, of which a file has some lines already, after so many minutes."""
    end = time.monotonic() + 60 * minutes
    done = {}
    if lines.exists():
        done = {name_of(row): row for row in map(json.loads, lines.read_text().splitlines())}
    for number, row in enumerate(rows):
        name = name_of(row)
        if name in done or time.monotonic() > end:
            continue
        done[name] = json.loads(json.dumps(compared(row)))
        with lines.open("a") as file:
            file.write(json.dumps(done[name]) + "\n")
        print(number + 1, len(rows), name, done[name]["first difference"], flush=True)
        gc.collect()  # its programs
    return [done[name] for name in map(name_of, rows) if name in done]


POOLS = [(1, 1), (2, 2), (4, 4), (1, 4), (2, 4)]
"""The devices of a process, and `PJRT_NPROC`: XLA:CPU has as many threads as the larger one."""


def rows_of_threads():
    """Return rows that run on all devices of a process; the last has products that threads share."""
    shared = {"mesh": (1, DEVICES), "placement": "fsdp", "ragged": 0, "evaluates": False}
    models = {"clipping": "flax", "soap": "plain", "adamw": "long"}
    return [
        shared | {"optimizer": name, "model": model, "micro_batches": 1, "least": 1}
        for name, model in models.items()
    ]


def of_threads():
    """Return model -> devices and threads of a process -> the hash of five steps."""
    hashes = {}
    for devices, threads in POOLS:
        environment = os.environ | {"DEVICES": str(devices), "PJRT_NPROC": str(threads)}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "threads.json"
            command = [sys.executable, __file__, "--of-threads", "--out", out]
            subprocess.run(command, env=environment, check=True)
            for row in json.loads(out.read_text()):
                place = f"devices {devices}, threads {max(devices, threads)}"
                hashes.setdefault(row["model"], {})[place] = row["hash"]
    return hashes


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="a regular expression of the rows to run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no row after these")
    parser.add_argument("--threads", action="store_true", help="vary the threads of processes too")
    parser.add_argument("--of-threads", action="store_true", help="be one of these processes")
    parser.add_argument("--out", type=Path, help="the JSON file of the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.of_threads:
        hashes = [row | {"hash": hash_of(history(row, 5, None))} for row in rows_of_threads()]
        options.out.write_text(json.dumps(hashes))
        return
    out = options.out or Path(__file__).parent / "results" / "same_bits_of_meshes.json"
    rows = [row for row in all_rows() if re.search(options.rows, name_of(row))]
    results = run(rows, out.with_suffix(".jsonl"), options.minutes)
    differing = [row for row in results if row["first difference"]]
    counts = collections.Counter(f"{row['optimizer']}, {row['model']}" for row in results)
    summary = {"rows": len(results), "of": len(all_rows()), "equal": len(results) - len(differing)}
    summary |= {"differing": differing, "by optimizer and model": counts}
    if options.threads:
        summary |= {"threads": of_threads()}
    print(write_json(__file__, summary, out))
    assert not differing, "meshes differ"


if __name__ == "__main__":
    main()
