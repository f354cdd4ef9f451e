"""`shardopt diff`: find the first step, and the leaves, in which two runs differ."""

import json
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from shardopt.checkpoint._record import read_meta
from shardopt.checkpoint._run_folder import committed, step_folder
from shardopt.checkpoint._store import Leaf, dtype_of, read_arrays
from shardopt.checkpoint._tree import LeafPath, nest, show
from shardopt.cli._options import DiffOptions
from shardopt.cli._run_folder import CHECKPOINTS, METRICS
from shardopt.core import MAX_LISTED, PyTree, calling, plural, value_error
from shardopt.diagnose._difference import as_numbers, compare

_LOGGED = ("loss", "grad_norm")
"""Metrics of the log in which equal runs are equal; seconds are not."""


@calling("diff")
def diff(options: DiffOptions) -> int:
    """Print where two runs differ; return 1 if they do, else 0."""
    runs = options.first, options.second
    logs = [_logged(run / METRICS) for run in runs]
    folders = [run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run for run in runs]
    logged_steps = [step for step in logs[0] if step in logs[1]]
    saved_steps = [step for step in committed(folders[0]) if step in committed(folders[1])]
    if not logged_steps and not saved_steps:
        fix = "name two folders of runs or of so.Checkpoints, which log or keep the same steps."
        raise value_error(
            "no step was logged or saved by both runs.", [str(run) for run in runs], fix
        )
    different_metrics = [step for step in logged_steps if logs[0][step] != logs[1][step]]
    if different_metrics:
        step = different_metrics[0]
        print(f"the first logged step that differs: {step}, {logs[0][step]} and {logs[1][step]}")
    for step in saved_steps:
        leaves = _differences(*(step_folder(folder, step) for folder in folders))
        if leaves:
            count = plural(len(leaves), "leaf")
            print(
                f"the first checkpoint that differs: {step}, in {count}",
                *leaves[:MAX_LISTED],
                sep="\n  ",
            )
            return 1
    if different_metrics:
        return 1
    print(
        f"equal in {plural(len(logged_steps), 'logged step')} and {plural(len(saved_steps), 'checkpoint')}"
    )
    return 0


def _logged(file: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each logged step."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line["step"]: {name: line[name] for name in _LOGGED if name in line} for line in lines}


def _differences(first: Path, second: Path) -> list[str]:
    """Return a line for each leaf that two checkpoints do not share bit for bit."""
    records, other_records = (read_meta(folder).leaves for folder in (first, second))
    lines = [
        f"{show(path)}: {records.get(path, 'none')} and {other_records.get(path, 'none')}"
        for path in records | other_records
        if records.get(path) != other_records.get(path)
    ]
    for path, record in records.items():
        if other_records.get(path) == record:
            # one leaf at a time: two states may be larger than the memory
            leaf, other = (as_numbers(_read(folder, path, record)) for folder in (first, second))
            if leaf.tobytes() != other.tobytes():
                difference = compare("", leaf, other, tolerance=0.0).relative
                lines.append(f"{show(path)}: {record}, by {difference:.1e} of the largest entry")
    return lines


def _read(folder: Path, path: LeafPath, record: Leaf) -> PyTree:
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    shape = jax.ShapeDtypeStruct(record.shape, dtype_of(record), sharding=sharding)
    (leaf,) = jax.tree.leaves(read_arrays(folder, nest({path: shape})))
    return leaf
