"""The position in packed data survives a change of hosts: train with four processes, continue with
two, then with three.

    python benchmarks/data_position.py

Documents of unequal length are packed into rows, from a mixture of two sources. Each run stops
after some steps, and the next has another number of processes. The script counts how often each
document was trained on: exactly once. It starts `shardopt launch`, with processes of this machine
in place of hosts.
"""

import json
import sys
import tempfile
from pathlib import Path

if __name__ != "__main__" or sys.argv[1:2] != ["job"]:
    from common import write_json

DOCUMENTS = 4000
LENGTH = 64
ROWS = 12
RUNS = ((4, 10), (2, 20), (3, 30))
"""(processes, steps in all) of each run."""


def packed():
    """Return an iterator of batches: two shuffled sources, mixed and packed.

    A document is its own number, repeated.
    """
    import grain
    import numpy as np

    from shardopt import data

    draw = np.random.default_rng(0)
    documents = [np.full(draw.integers(3, 40), number, np.int32) for number in range(1, DOCUMENTS)]
    sources = [grain.MapDataset.source(documents[start::2]).shuffle(seed=start) for start in (0, 1)]
    return iter(data.pack(grain.MapDataset.mix(sources, weights=[0.5, 0.5]), LENGTH).batch(ROWS))


def numbers_in(batch) -> list[int]:
    """Return the documents that end in the rows of a batch, once for each piece."""
    tokens = batch["tokens"]
    segments = batch["segment_ids"]
    return [
        int(row[ids == i][0])
        for row, ids in zip(tokens, segments, strict=True)
        for i in range(1, ids.max() + 1)
    ]


def job(folder: str, steps: int) -> None:
    """Train up to a number of steps; process 0 writes the documents of each step."""
    import jax
    import jax.numpy as jnp
    import optax

    import shardopt as so

    so.initialize()

    def loss_fn(params, batch):
        return jnp.mean((params["w"][batch["tokens"]] - 1.0) ** 2)

    seen = []

    class Recorded:
        """The batches, and the documents that each of them has."""

        def __init__(self):
            self.stream = packed()

        def __iter__(self):
            return self

        def __next__(self):
            batch = next(self.stream)
            seen.append(numbers_in(batch))
            return batch

        def get_state(self):
            return self.stream.get_state()

        def set_state(self, state):
            self.stream.set_state(state)

    opt = so.fsdp(optax.sgd(0.1), so.make_mesh(), loss_fn)
    start = so.training.DeferredInit(
        lambda rng: {"w": jax.random.normal(rng, (DOCUMENTS,))}, jax.random.key(0)
    )
    with so.Checkpoints(f"{folder}/checkpoints", every=5, keep=2) as checkpoints:
        so.fit(
            opt,
            start,
            so.GlobalRows(Recorded()),
            num_steps=steps,
            checkpoints=checkpoints,
            progress=False,
        )
    if jax.process_index() == 0:
        Path(folder, f"seen-{steps}.json").write_text(
            json.dumps({"processes": jax.process_count(), "steps": seen})
        )


def run() -> dict:
    """Return, for each run, its processes, steps and documents, and how many documents were seen
    twice or skipped.
    """
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        results = {"runs": []}
        seen: list[int] = []
        for processes, steps in RUNS:
            launch = [
                sys.executable,
                "-m",
                "shardopt.cli",
                "launch",
                "--processes",
                str(processes),
                "--log-dir",
                f"{folder}/logs",
            ]
            subprocess.run([*launch, "--", __file__, "job", folder, str(steps)], check=True)
            record = json.loads(Path(folder, f"seen-{steps}.json").read_text())
            documents = [number for step in record["steps"] for number in step]
            results["runs"].append(
                {
                    "processes": record["processes"],
                    "steps": len(record["steps"]),
                    "documents": len(documents),
                }
            )
            seen += documents
    stream = packed()
    expected = [number for _ in range(RUNS[-1][1]) for number in numbers_in(next(stream))]
    return results | {"same as one run": seen == expected, "twice": len(seen) - len(set(seen))}


def table(results: dict) -> str:
    """Return the rows as docs/notes/data_position.md has them."""
    lines = ["| run | processes | steps | documents |", "|---|---:|---:|---:|"]
    for number, row in enumerate(results["runs"], start=1):
        lines.append(f"| {number} | {row['processes']} | {row['steps']} | {row['documents']:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job(sys.argv[2], int(sys.argv[3]))
    else:
        _results = run()
        print(table(_results), _results, sep="\n")
        print("written to", write_json(__file__, _results))
