"""What a step with norms of each leaf and layer costs next to the same step without them:
`so.fit(norms_every=k)`.

    python benchmarks/norms_cost.py [--rounds 30]

A GPT with AdamW of two sizes, by ddp, zero1 and fsdp, on eight simulated devices. The claim: spread
over k steps, norms cost at most 1% of a step; `smallest k` is the first k for which that holds.

- Flops, bytes and collectives are those of the compiled programs. XLA counts the body of a loop
  once, so the bytes of a plain step are too few, and the share of the norms is too large. The flops
  of a plain step are those of its products, with loops.
- Seconds are those that the cores worked. Both steps take turns.
"""

import argparse
import functools
import math
import time
from collections import Counter

from common import fake_devices, interleave, median_ratio, write_json

fake_devices(8)

import jax
import numpy as np
import optax

import shardopt as so
from shardopt.hlo._program import inner_product_flops
from shardopt.models import gpt

SIZES = {
    "128 x 4, 16 x 128": (gpt.config(dim=128, num_layers=4, num_heads=4), 16, 128),
    "256 x 4, 16 x 128": (gpt.config(dim=256, num_layers=4, num_heads=4), 16, 128),
}
STRATEGIES = {"ddp": so.ddp, "zero1": functools.partial(so.zero, stage=1), "fsdp": so.fsdp}
MOST = 0.01  # of a step, in the claim


def counts(step, state, batch, mesh):
    """Return flops, bytes and collectives of a compiled step."""
    lowered = step.lower(state, batch)
    compiled = lowered.compile()
    cost = compiled.cost_analysis()
    report = so.hlo.audit(lowered, mesh=mesh)
    return {
        "flops of products": int(inner_product_flops(compiled) or 0),
        "flops, loops once": int(cost["flops"]),
        "bytes accessed": int(cost["bytes accessed"]),
        "bytes sent": int(report.total_wire_bytes or 0),
        "temporary bytes": int(compiled.memory_analysis().temp_size_in_bytes),
        "collectives": dict(Counter(collective.kind for collective in report.collectives)),
        "reduced arrays": sum(
            len(one.shapes) for one in report.collectives if one.kind == "all-reduce"
        ),
    }


def compare(strategy, config, rows, length, rounds):
    """Return the counts and the seconds of both steps, and the smallest k."""
    mesh = so.make_mesh(data=8)
    opt = strategy(optax.adamw(1e-3), mesh, gpt.model(config))
    state = opt.init(jax.device_get(gpt.init(config, jax.random.key(0))))
    draw = np.random.default_rng(0)
    batch = {"tokens": draw.integers(0, 256, size=(rows, length + 1), dtype=np.int32)}
    plain, with_norms = (
        counts(step, state, batch, mesh) for step in (opt.step, opt.step.with_norms)
    )
    holder = {"state": state}

    def take_plain_step():
        holder["state"], metrics = opt.step(holder["state"], batch)
        return metrics, holder["state"]

    def take_step_with_norms():
        holder["state"], metrics, norms = opt.step.with_norms(holder["state"], batch)
        return metrics, norms, holder["state"]

    contenders = {"plain": take_plain_step, "with norms": take_step_with_norms}
    times = interleave(contenders, rounds=rounds, clock=time.process_time)
    ratio = median_ratio(times["with norms"], times["plain"])
    shares = {name: with_norms[name] / plain[name] - 1 for name in ("bytes accessed", "bytes sent")}
    flops = with_norms["flops, loops once"] - plain["flops, loops once"]
    shares |= {"flops": flops / plain["flops of products"], "seconds": ratio - 1}
    return {
        "parameters": gpt.num_parameters(config),
        "plain": plain,
        "with norms": with_norms,
        "further all-reduces": (
            with_norms["collectives"]["all-reduce"] - plain["collectives"]["all-reduce"]
        ),
        "further reduced arrays": with_norms["reduced arrays"] - plain["reduced arrays"],
        "share of a step": {name: round(share, 5) for name, share in shares.items()},
        "smallest k": {
            name: max(1, math.ceil(round(share, 5) / MOST)) for name, share in shares.items()
        },
        "median seconds": {name: float(np.median(seconds)) for name, seconds in times.items()},
    }


def main():
    """Compare all strategies at both sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    results = {}
    for size, (config, batch_rows, length) in SIZES.items():
        for name, strategy in STRATEGIES.items():
            results[f"{name}, {size}"] = row = compare(strategy, config, batch_rows, length, rounds)
            print(
                f"{name}, {size}",
                {key: row[key] for key in row if key not in ("plain", "with norms")},
                flush=True,
            )
            print(row["plain"], row["with norms"], flush=True)
    print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
