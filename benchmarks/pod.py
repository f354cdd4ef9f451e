"""Pods before they are rented: real TPU compiles, predictions against compilers and published runs.

    python benchmarks/pod.py [compiles] [memory] [flops] [ranking] [published] [diloco] [again]
    [--libtpu FOLDER] [--only gpt2]

Parts run one after another, all of them without arguments; `again` predicts again what has been
compiled before. `compiles` needs libtpu (pip install 'shardopt[tpu]'); one compile takes from half
a minute to some minutes. Each result is kept in results/pod.json as soon as it is there, and a part
that is run again replaces its own rows only.
"""

import argparse
import fcntl
import json
import os
import sys
from pathlib import Path

from common import fake_devices, write_json

PARTS = ("memory", "flops", "ranking", "published", "diloco", "compiles", "again")
RESULTS = Path(__file__).parent / "results" / "pod.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"among {', '.join(PARTS)}; all without")
    parser.add_argument(
        "--libtpu", help="folder that holds the unpacked libtpu package, where it is not installed"
    )
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    fake_devices(8)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.libtpu:
        sys.path.append(options.libtpu)
    import pod_compiles
    import pod_cpu
    import pod_published

    runs = {
        "memory": pod_cpu.memory_rows,
        "flops": pod_cpu.flops_rows,
        "ranking": pod_cpu.ranking_rows,
        "published": pod_published.published_rows,
        "diloco": pod_published.diloco_rows,
        "compiles": pod_compiles.compile_rows,
        "again": lambda only: pod_compiles.again_rows(
            [row for row in kept().get("compiles", []) if only in row["name"]]
        ),
    }
    for part in options.parts or PARTS:
        print(f"== {part}", flush=True)
        names = []
        for row in runs[part](options.only):
            names.append(row["name"])
            print("  ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)
            keep("compiles" if part == "again" else part, row)
        if part != "again" and not options.only:
            forget_others(part, names)
    print(summary(kept()))


def kept():
    """Return the results so far."""
    return json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}


def keep(part, row):
    """Put a row into the results, in place of the one of that name."""
    change(
        part, lambda rows: list(({one["name"]: one for one in rows} | {row["name"]: row}).values())
    )


def forget_others(part, names):
    """Drop the rows of a part that a whole run of it did not make."""
    change(part, lambda rows: [row for row in rows if row["name"] in names])


def change(part, how):
    """Write the results with the rows of a part changed."""
    with Path(__file__).open() as lock:  # parts may run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = kept()
        write_json(__file__, before | {part: how(before.get(part, []))})


def summary(results):
    """Return the claims in numbers: the worst and the typical error of each part."""
    import statistics

    lines = []
    rows = results.get("memory", [])
    groups = {
        "memory": [row for row in rows if not row.get("held_out")],
        "memory, held out": [row for row in rows if row.get("held_out")],
        "flops": [row for row in results.get("flops", []) if row["blocks"] == 1],
        "compiles": results.get("compiles", []),
    }
    for part, rows in groups.items():
        for of in ("memory", "arguments", "flops", "cost_analysis"):
            ratios = [row[f"{of}_ratio"] for row in rows if row.get(f"{of}_ratio")]
            if ratios:
                worst = max(ratios, key=lambda ratio: abs(ratio - 1))
                limit = {"memory": 0.1, "arguments": 0.01}.get(of, 0.05)
                within = sum(abs(ratio - 1) <= limit for ratio in ratios)
                lines.append(
                    f"{part}: predicted / real {of}: median {statistics.median(ratios):.3f}, worst"
                    f" {worst:.3f}, {within} of {len(ratios)} within {limit:.0%}"
                )
    rows = results.get("ranking")
    if rows:
        last = rows[-1]
        lines.append(
            f"ranking: Spearman {last['spearman']:.3f}, of cpu seconds"
            f" {last.get('spearman_of_cpu_seconds', float('nan')):.3f}, over {len(rows)} layouts"
        )
    for row in results.get("published", []):
        lines.append(
            f"published: {row['name']}: MFU predicted {row['predicted']:.1%}, published"
            f" {row['published']:.1%}"
        )
    rows = results.get("diloco")
    if rows:
        count = sum(len(row["ratios"]) for row in rows)
        within = sum(row["within_a_rung"] for row in rows)
        lines.append(f"diloco: {within} of {count} bandwidths within a rung (1.21) of the paper's")
    return "\n".join(lines)


def _short(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
