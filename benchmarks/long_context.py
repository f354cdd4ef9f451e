"""Do long sequences fit? Llama 3 8B over a context axis, compiled by the real TPU compiler.

No TPU is needed.

    python benchmarks/long_context.py [--only LENGTH] [plot]

Each row: tokens of a sequence, devices that share it, bytes on a chip, bytes that attention sends,
estimated step. Blocks are recomputed, weights gathered in bfloat16 (fsdp over data and context),
the loss taken in chunks of 1024 positions. It needs libtpu (pip install 'shardopt[tpu]'); two to
ten minutes a row. Each result is kept in results/long_context.json as soon as it is there.
"""

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path

from common import fake_devices, write_json

RESULTS = Path(__file__).parent / "results" / "long_context.json"
PICTURE = RESULTS.with_suffix(".png")
CASES = [  # topology, tokens a row, context, rows of the global batch
    ("v5p:4x4x4", 32_768, 8, 8),
    ("v5p:4x4x4", 65_536, 8, 8),
    ("v5p:4x4x4", 131_072, 8, 8),
    ("v5p:4x4x4", 131_072, 16, 4),
    ("v5p:4x4x4", 262_144, 8, 8),
    ("v5p:8x8x8", 1_048_576, 64, 8),
]


def compiled(topology: str, length: int, context: int, rows: int) -> dict:
    """Compile a step, and return what the compiler says of it."""
    import jax.numpy as jnp
    import optax
    from step_times import of_report
    from transformer import abstract_batch, model

    import shardopt as so
    from shardopt.planning._models import find_model

    shape = dataclasses.replace(find_model("llama3-8b"), length=length)

    def make(mesh):
        blocks = model(shape, remat="full", chunk=1024)
        return so.fsdp(optax.adamw(1e-3), mesh, blocks, gather_dtype=jnp.bfloat16)

    batch = abstract_batch(shape, rows, form="targets")
    start = time.perf_counter()
    report = so.planning.aot(
        make, shape.abstract_params(), batch, topology=topology, context=context
    )
    step = of_report(report)
    of_attention = [one for one in report.audit.collectives if one.axes == ("context",)]
    return {
        "topology": topology,
        "length": length,
        "context": context,
        "rows": rows,
        "peak_bytes": report.memory.peak,
        "argument_bytes": report.memory.arguments,
        "temp_bytes": report.memory.temporary,
        "hbm_bytes": report.hbm_bytes,
        "attention_kinds": sorted({one.kind for one in of_attention}),
        "attention_wire_bytes": sum(one.wire_bytes * (one.calls or 0) for one in of_attention),
        "step_milliseconds": 1e3 * step.total,
        "exposed_milliseconds": 1e3 * step.exposed,
        "compile_seconds": time.perf_counter() - start,
    }


def table(rows: list[dict]):
    """Return the rows as docs/notes/long_rows.md has them."""
    lines = [
        "| slice | tokens of a row | context | rows | GB a chip | sent by attention | step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["length"], row["context"])):
        cells = [
            row["topology"],
            f"{row['length']:,}",
            str(row["context"]),
            str(row["rows"]),
            f"{row['peak_bytes'] / 1e9:.1f} of {row['hbm_bytes'] / 1e9:.0f}",
            f"{row['attention_wire_bytes'] / 1e9:.0f} GB, {', '.join(row['attention_kinds'])}",
            f"{row['step_milliseconds'] / 1e3:.2f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict]):
    """Draw temporary bytes against positions on a device."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    points = {
        (row["length"], row["context"]): (row["length"] / row["context"], row["temp_bytes"] / 1e9)
        for row in rows
    }
    for (length, context), (positions, temp) in points.items():
        is_top = temp == max(y for x, y in points.values() if x == positions)
        axes.plot(positions, temp, "o", color="#33608c")
        axes.annotate(
            f"{length // 1024}k / {context}",
            (positions, temp),
            textcoords="offset points",
            xytext=(6, 5 if is_top else -14),
        )
    axes.set_xlabel("positions on a device: tokens of a row / context")
    axes.set_ylabel("temporary memory, GB a chip")
    axes.set_title(
        "Llama 3 8B, fsdp over data x context, every block recomputed (v5p, compiled)", fontsize=9
    )
    axes.set_xlim(0, 38_000), axes.set_ylim(0, 1.1 * max(temp for _, temp in points.values()))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["compile", "plot"], default="compile")
    parser.add_argument("--only", type=int, help="tokens of a row")
    asked = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else []
    for case in CASES if asked.what == "compile" else []:
        if asked.only not in (None, case[1]):
            continue
        print(f"compiling {case} ...", flush=True)
        row = compiled(*case)
        same = lambda one, case=case: (
            (one["topology"], one["length"], one["context"], one["rows"]) == case
        )
        rows = [one for one in rows if not same(one)] + [row]
        write_json(__file__, rows)
    print(table(rows))
    plot(rows)


if __name__ == "__main__":
    fake_devices(1)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
