"""Does `so.plan` rank layouts as the TPU compiler's own estimates do? Twenty of them, predicted and
compiled.

    python benchmarks/plan_beside_compile.py [again] [--topology v5e:4x4] [--only WORDS] [--libtpu
    FOLDER]

A GPT of four blocks, 64 rows of 1024 tokens over 16 chips: predicted seconds
(`so.planning.predict`) beside those of the compiled schedule (`step_times.of_report`).
It needs libtpu (pip install 'shardopt[tpu]') and no TPU; half a minute a layout. `again` predicts
again what has been compiled before. Each result is kept in results/plan_beside_compile.json as soon
as it is there.
"""

import argparse
import json
import math
import os
import statistics
import sys
from pathlib import Path

from common import fake_devices, spearman, write_json

RESULTS = Path(__file__).parent / "results" / "plan_beside_compile.json"
ROWS = 64


def layouts():
    """Return the layouts of 16 chips."""
    import jax.numpy as jnp

    from shardopt.planning import ParallelLayout

    half = {"gather_dtype": jnp.bfloat16}
    return [
        ParallelLayout(data=16, placement="ddp"),
        ParallelLayout(data=16, placement="zero1"),
        ParallelLayout(data=16, placement="zero2", micro_batches=2),
        ParallelLayout(data=16, **half),
        ParallelLayout(data=16, remat=True, **half),
        ParallelLayout(data=16, micro_batches=4, **half),
        ParallelLayout(replica=2, data=8, **half),
        ParallelLayout(replica=4, data=4, remat=True, **half),
        ParallelLayout(data=8, tensor=2, **half),
        ParallelLayout(data=8, tensor=2, placement="ddp"),
        ParallelLayout(data=4, tensor=4, **half),
        ParallelLayout(data=4, tensor=4, remat=True, **half),
        ParallelLayout(data=4, tensor=4, placement="zero1", micro_batches=2),
        ParallelLayout(data=2, tensor=8, placement="ddp"),
        ParallelLayout(data=8, pipeline=2, schedule="eager_one_f_one_b", micro_batches=4, **half),
        ParallelLayout(data=8, pipeline=2, schedule="gpipe", micro_batches=4, placement="ddp"),
        ParallelLayout(
            data=8, pipeline=2, schedule="interleaved", chunks=2, micro_batches=4, placement="zero1"
        ),
        ParallelLayout(
            data=4, pipeline=4, schedule="one_f_one_b", micro_batches=4, remat=True, **half
        ),
        ParallelLayout(
            data=4, pipeline=4, schedule="eager_one_f_one_b", micro_batches=8, placement="zero1"
        ),
        ParallelLayout(
            data=4, pipeline=2, tensor=2, schedule="zero_bubble_lockstep", micro_batches=4, **half
        ),
    ]


def shape():
    """Return the model."""
    from shardopt.planning import Transformer

    return Transformer("gpt", 1024, 4, 8, 4096, 32000, 1024, gated=False, tied=True, positions=1024)


def compiled(layout, topology):
    """Return what the compiler says of a layout."""
    import optax
    import transformer
    from step_times import of_report

    import shardopt as so
    from shardopt.planning._models import RULES

    report = so.planning.aot(
        lambda mesh: so.hybrid(
            optax.adamw(1e-3), mesh, transformer.model(shape()), **layout.strategy(RULES)
        ),
        shape().abstract_params(),
        transformer.abstract_batch(shape(), ROWS),
        topology=topology,
        **layout.sizes,
    )
    step = of_report(report)
    return {
        "compiled_seconds": step.total,
        "compute": step.compute,
        "exposed": step.exposed,
        "hidden": step.hidden,
        "flops": report.flops,
        "peak_bytes": report.memory.peak,
        "wire_bytes": {
            " x ".join(axes or ("mixed",)): sent.wire_bytes
            for axes, sent in report.audit.by_axis().items()
        },
        "dearest": [one._asdict() for one in step.operations[:5]],
        "notes": step.notes,
    }


def predicted(layout, topology):
    """Return what the planner says of it."""
    from step_times import step_flops

    from shardopt.planning import predict
    from shardopt.planning._topologies import parse_topology

    told = predict(
        shape().workload(), layout, hardware=parse_topology(topology)[0], batch_size=ROWS
    )
    return {
        "predicted_seconds": told.time.total,
        "predicted": told.time._asdict(),
        "predicted_bytes": told.memory.total,
        "predicted_flops": step_flops(shape().workload(), layout, batch_size=ROWS),
        "predicted_wire_bytes": told.wire_bytes,
    }


def summary(rows):
    """Return the claim in a line."""
    told, seen = ([row[key] for row in rows] for key in ("predicted_seconds", "compiled_seconds"))
    ratios = [b / a for a, b in zip(told, seen, strict=True)]
    best = min(rows, key=lambda row: row["predicted_seconds"])
    place = sorted(seen).index(best["compiled_seconds"]) + 1
    return {
        "layouts": len(rows),
        "spearman": spearman(told, seen),
        "compiled_over_predicted": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "place_of_the_first": place,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "part", nargs="?", choices=["again"], help="predict again what has been compiled"
    )
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--only", default="", help="only layouts whose name contains this")
    parser.add_argument(
        "--libtpu", help="folder that holds the unpacked libtpu package, where it is not installed"
    )
    options = parser.parse_args()
    fake_devices(1)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.libtpu:
        sys.path.append(options.libtpu)
    from shardopt.planning._topologies import parse_topology

    assert math.prod(parse_topology(options.topology)[1]) == layouts()[0].num_chips, (
        "a topology of 16 chips"
    )
    kept = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    rows = {row["name"]: row for row in kept.get(options.topology, {}).get("rows", [])}
    for layout in layouts():
        name = str(layout)
        if options.only not in name or (options.part == "again" and name not in rows):
            continue
        before = rows[name] if options.part == "again" else compiled(layout, options.topology)
        rows[name] = {"name": name, **before, **predicted(layout, options.topology)}
        row = rows[name]
        print(
            f"{name}: predicted {row['predicted_seconds'] * 1e3:.2f} ms, compiled"
            f" {row['compiled_seconds'] * 1e3:.2f} ({row['compute'] * 1e3:.2f} compute,"
            f" {row['exposed'] * 1e3:.2f} exposed, {row['hidden'] * 1e3:.2f} hidden)",
            flush=True,
        )
        kept[options.topology] = {"rows": list(rows.values())}
        if len(rows) > 1:
            kept[options.topology] |= summary(list(rows.values()))
        write_json(__file__, kept)
    print({key: value for key, value in kept[options.topology].items() if key != "rows"})


if __name__ == "__main__":
    main()
