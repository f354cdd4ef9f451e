"""Sums between two processes on CPU, each storing its half: gloo's reduce-scatter next to the
exchange of shardopt.

    shardopt launch --processes 2 -- benchmarks/process_sums.py --rounds 120 --output
    results/process_sums.json

Both run turn by turn on 24 MB of numbers that float32 adds exactly. Wrong sums are counted (jax
40830), and seconds compared.
"""

import argparse
import os
import statistics
from pathlib import Path

os.environ.pop("XLA_FLAGS", None)  # one device a process

import jax
import jax.numpy as jnp
import numpy as np
from common import interleave, median_ratio, write_json
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.collectives._shards import _sum_by_exchange

SIZE = 6_000_000


def rank():
    return jax.lax.axis_index("data")


def reduce_scatter(x):
    return jax.lax.psum_scatter(x + rank(), "data", scatter_dimension=0, tiled=True)


def exchange(x):
    return _sum_by_exchange(x + rank(), "data", 0, x.dtype)


def wrong(shard, x):
    half = x.size // 2
    expected = 2 * jax.lax.dynamic_slice(x, (rank() * half,), (half,)) + 1
    return jax.lax.psum(jnp.any(shard != expected).astype(jnp.int32), "data") > 0


def main(rounds, output):
    so.initialize()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_processes = lambda f, inputs, outputs: jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    )
    is_wrong = over_processes(wrong, (P("data"), P()), P())
    x = jax.device_put(np.arange(SIZE, dtype=np.float32) % 97, NamedSharding(mesh, P()))
    sums = {f.__name__: over_processes(f, P(), P("data")) for f in (reduce_scatter, exchange)}
    times = interleave({name: lambda f=f: f(x) for name, f in sums.items()}, rounds=rounds)
    # wrong sums are counted apart, so that seconds are those of the sums alone
    counts = {name: sum(int(is_wrong(f(x), x)) for _ in range(rounds)) for name, f in sums.items()}
    ratios = [a / b for a, b in zip(times["reduce_scatter"], times["exchange"], strict=True)]
    results = {
        "rounds": rounds,
        "bytes": 4 * SIZE,
        "wrong": counts,
        "seconds, median": {
            name: round(statistics.median(seconds), 4) for name, seconds in times.items()
        },
        "reduce_scatter / exchange": {
            "median": round(median_ratio(times["reduce_scatter"], times["exchange"]), 3),
            "quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)[::2]],
        },
    }
    if jax.process_index() == 0:
        print(results, write_json(__file__, results, output))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    main(options.rounds, options.output)
