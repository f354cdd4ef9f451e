"""What the same bits on every mesh cost: bytes on the wire, memory and CPU seconds of a step of a GPT.

Run: python benchmarks/same_bits.py [--rounds 5]

Control: `so.ddp` and `so.fsdp` with as many micro-batches as a device has tiles. Test: the same with
`so.reducers.exact`, 8 tiles of 4 or 16 rows, on 1, 2, 4 and 8 fake devices. Same model, batch and
optimizer (AdamW with clipping), interleaved in one run; seconds are those of the CPU. Claims: all
meshes and both placements end at one hash; a step takes at most 1.10 times as long with 16 rows.
"""

import argparse
import hashlib
import time

from common import fake_devices, interleave, median_ratio, one_core, write_json

one_core()
fake_devices(8)

import jax
import numpy as np
import optax

import shardopt as so
from shardopt.models import gpt

CONFIG = gpt.config(dim=128, num_layers=4, num_heads=4)
TILES, LENGTH = 8, 64
TILE_ROWS = (4, 16)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
STRATEGIES = {"ddp": so.ddp, "fsdp": so.fsdp}


def make(name, devices, **options):
    """Return a strategy on some devices, and its first state."""
    mesh = so.make_mesh(data=devices, devices=jax.devices()[:devices])
    opt = STRATEGIES[name](TX, mesh, gpt.model(CONFIG), **options)
    return opt, opt.init(jax.device_get(gpt.init(CONFIG, jax.random.key(0))))


def cost(opt, state, batch):
    """Return bytes that a device sends in a step, and bytes that it needs besides its arguments."""
    compiled = opt.step.lower(state, batch).compile()
    sent = sum(x.wire_bytes * x.calls for x in so.hlo.audit(compiled).collectives)
    return {"bytes_sent": sent, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


def digest(tree):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def compare(name, devices, tile_rows, batch, rounds):
    """Return what a step costs with and without tiles, and the hash of the last state with tiles."""
    options = {
        "plain": {"micro_batches": TILES // devices},
        "same bits": {"reducer": so.reducers.exact(tile_rows=tile_rows)},
    }
    contenders = {}
    states = {}
    costs = {}
    for kind, kind_options in options.items():
        opt, states[kind] = make(name, devices, **kind_options)
        costs[kind] = cost(opt, states[kind], batch)

        def run(kind=kind, opt=opt):
            states[kind], metrics = opt.step(states[kind], batch)
            return metrics, states[kind]

        contenders[kind] = run
    times = interleave(contenders, rounds=rounds, clock=time.process_time)
    ratio = median_ratio(times["same bits"], times["plain"])
    result = {
        "seconds_ratio": ratio,
        **{kind: costs[kind] | {"seconds": float(np.median(times[kind]))} for kind in options},
    }
    state_hash = digest(states["same bits"])
    print(name, devices, tile_rows, state_hash[:8], result, flush=True)
    return result, state_hash


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    results = {}
    hashes = set()
    for tile_rows in TILE_ROWS:
        shape = TILES * tile_rows, LENGTH + 1
        batch = {"tokens": np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)}
        for name in STRATEGIES:
            for devices in (1, 2, 4, 8):
                result, state_hash = compare(name, devices, tile_rows, batch, rounds)
                results[f"{name} on {devices}, tiles of {tile_rows} rows"] = result
                hashes.add((tile_rows, state_hash))
    print(write_json(__file__, {"hashes": sorted(hashes)} | results))
    assert len(hashes) == len(TILE_ROWS), "meshes differ"


if __name__ == "__main__":
    main()
