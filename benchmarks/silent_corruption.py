"""Silent corruption: faults that `fit(cross_check_every=k)` finds and names, false alarms, and the cost
of each k.

    python benchmarks/silent_corruption.py --part cost
    python benchmarks/silent_corruption.py --part faults --draws 10000
    python benchmarks/silent_corruption.py --part further --draws 110
    python benchmarks/silent_corruption.py --part windows --draws 400
    python benchmarks/silent_corruption.py --part clean --steps 100000

Four fake devices. Each part replaces its part of results/silent_corruption.json.
"""

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path

from common import fake_devices, write_json

fake_devices(4)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import faults
from support.seams import break_function

import shardopt as so
from shardopt.diagnose._verified import move_program, verified_step
from shardopt.training._verify import Verification

OUTPUT = Path(__file__).parent / "results" / "silent_corruption.json"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
KS = (1, 2, 5, 10, 100, 1000)


def save(part, results, output):
    old = json.loads(output.read_text())["results"] if output.exists() else {}
    write_json(__file__, old | {part: results}, output)


def is_stuck(fault):
    return fault.kind == "stuck"


def counted(rig, every, draws, seed):
    """Return how many faults change the state, are found, and are named.

    And the first ones that are not.
    """
    rng = np.random.default_rng(seed)
    counts = collections.Counter()
    missed = []
    for number in range(draws):
        fault = faults.draw(rng, 4)
        at = int(rng.integers(every))
        window = rig.window(every, number, fault, at, stuck=is_stuck(fault))
        device = rig.mesh.devices.flat[fault.device]
        named = window.names(device)
        kinds = ["all", fault.site, fault.kind]
        if every > 1:
            kinds = [
                (
                    "a stored shard"
                    if fault.site == "shard"
                    else "stuck"
                    if is_stuck(fault)
                    else "transient"
                )
            ]
        for kind in kinds:
            counts[kind, "draws"] += 1
            counts[kind, "change the state"] += window.changed
            counts[kind, "found"] += window.changed and window.error is not None
            counts[kind, "named"] += window.changed and named
            counts[kind, "suspected"] += window.changed and window.suspects(device)
        if window.changed and not named and len(missed) < 10:
            missed.append(
                [
                    *fault,
                    None if window.error is None else [window.error.phase, window.error.devices],
                ]
            )
    table = {
        kind: {count: int(counts[kind, count]) for k, count in counts if k == kind}
        for kind, _ in counts
    }
    return table | {"not named, the first ten": missed}


def faults_part(draws, output):
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        now = faults.install(patch, break_function)
        for seed, name in enumerate(STRATEGIES):
            start = time.process_time()
            rig = faults.Rig(name, now, jax.devices())
            results[name] = counted(rig, 1, draws // len(STRATEGIES), seed)
            print(name, results[name], round(time.process_time() - start), flush=True)
            save("faults, k = 1", results, output)


def further_part(draws, output):
    """Inject faults into whole matrices and experts, `draws` into each."""
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        now = faults.install(patch, break_function)
        for seed, name in enumerate(faults.further_strategies(jax.devices())):
            results[name] = counted(faults.Rig(name, now, jax.devices()), 1, draws, seed)
            print(name, results[name], flush=True)
            save("faults in matrices and experts", results, output)


def windows_part(draws, output):
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        now = faults.install(patch, break_function)
        for name in ("ddp", "fsdp"):
            rig = faults.Rig(name, now, jax.devices())
            for every in (2, 5, 10):
                results[f"{name}, k = {every}"] = counted(rig, every, draws, every)
                print(name, every, results[f"{name}, k = {every}"], flush=True)
                save("faults, k > 1", results, output)


def clean_part(steps, output):
    """Train without faults, every step verified: any error is a false alarm."""
    done = {}
    alarms = 0
    for name in STRATEGIES:
        opt = faults.strategies(jax.devices())[name]()
        verification = Verification(opt, 1, None, num_steps=10**9)
        state = opt.init(faults.first_params())
        rows = [batch for batch, _ in zip(faults.batches(4), range(16), strict=False)]
        for step in range(steps // len(STRATEGIES)):
            try:
                state, _ = verification.take_step(state, rows[step % 16], step, step)
            except so.errors.SilentCorruptionError as error:
                alarms += 1
                print(error, flush=True)
                verification.go_back(step, {})
                state, _ = opt.step(state, rows[step % 16])
            done[name] = step + 1
            if step % 1000 == 999:
                save("clean steps", {"steps": done, "false alarms": alarms}, output)
        print(name, done, alarms, flush=True)
        save("clean steps", {"steps": done, "false alarms": alarms}, output)


def cost_part(output):
    """Flops and bytes of a verified step next to a plain one, from the compiled programs, for a
    transformer of 3.7 M parameters and 4,096 tokens a step.
    """
    results = {}
    mesh = so.make_mesh(data=4)
    width = 256
    blocks = 4
    vocab = 2048
    rows = 32
    length = 128

    def embed(outer, batch):
        return outer["table"][batch[:, :-1]]

    def block(weights, x):
        q, k, v = (x @ weights[name] for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / width**0.5)
        x = x + jnp.einsum("bqk,bkd->bqd", scores, v) @ weights["o"]
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    def loss(outer, x, batch):
        logits = x @ outer["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    shapes = {
        **dict.fromkeys("qkvo", (blocks, width, width)),
        "up": (blocks, width, 4 * width),
        "down": (blocks, 4 * width, width),
    }
    abstract = lambda shape: jnp.zeros(shape, jnp.float32)
    params = {
        "blocks": {name: abstract(shape) for name, shape in shapes.items()},
        "table": abstract((vocab, width)),
    }
    batch = np.zeros((rows, length + 1), np.int32)
    for name, make in (
        ("ddp", so.ddp),
        ("zero1", lambda *a: so.zero(*a, stage=1)),
        ("fsdp", so.fsdp),
    ):
        opt = make(optax.adam(1e-3), mesh, so.BlockModel(embed, block, loss))
        state = opt.init(params)
        verified, placed = verified_step(opt, state, batch)
        plain = opt.step.lower(state, batch)
        sums = verified.program(0).lower(state, placed)
        leaves = jax.tree.leaves((state, placed))
        specs = tuple(leaf.sharding.spec for leaf in leaves)
        with jax.set_mesh(None):
            move = move_program(verified.config.home.auto, specs, 1).lower(*leaves)
        rows_of = {}
        for kind, lowered in (("plain step", plain), ("step with sums", sums), ("move", move)):
            compiled = lowered.compile()
            rows_of[kind] = {
                "flops": int(compiled.cost_analysis().get("flops", 0)),
                "bytes sent": int(so.hlo.audit(lowered, mesh=mesh).total_wire_bytes),
                "temporary bytes": int(compiled.memory_analysis().temp_size_in_bytes),
            }
        state_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        once = rows_of["plain step"]
        twice = rows_of["step with sums"]
        move_row = rows_of["move"]
        by_k = {
            k: {
                count: round(
                    1 + (2 * twice[count] + move_row[count] - once[count]) / k / once[count], 4
                )
                for count in ("flops", "bytes sent")
            }
            for k in KS
        }
        results[name] = rows_of | {
            "state bytes of a device": state_bytes,
            "times a plain step, by k": by_k,
        }
        print(name, results[name], flush=True)
        save("cost", results, output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", choices=["cost", "faults", "further", "windows", "clean"], required=True
    )
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    os.nice(5)
    if options.part == "cost":
        cost_part(options.output)
    elif options.part == "clean":
        clean_part(options.steps, options.output)
    else:
        {"faults": faults_part, "further": further_part, "windows": windows_part}[options.part](
            options.draws, options.output
        )
