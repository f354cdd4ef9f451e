"""`shardopt diff`: find the first step and the leaves that differ between two runs."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from shardopt.checkpoint._record import read_meta
from shardopt.checkpoint._run_folder import committed, run_folder, step_folder
from shardopt.checkpoint._store import Leaf, dtype_of, read_arrays
from shardopt.checkpoint._tree import LeafPath, nest, show
from shardopt.cli._options import DiffOptions
from shardopt.cli._run_folder import CHECKPOINTS, METRICS
from shardopt.core import MAX_LISTED, PyTree, calling, plural, value_error
from shardopt.diagnose._difference import as_numbers, compare

Log = dict[int, dict[str, float]]
"""The metrics of each logged step."""

_LOGGED = ("loss", "grad_norm")
"""Metrics of the log in which equal runs are equal; seconds are not."""


@calling("diff")
def diff(options: DiffOptions) -> int:
    """Print where two runs differ; return 1 if they do, else 0."""
    runs = run_folder(options.first), run_folder(options.second)
    logs = [_logged(run / METRICS) for run in runs]
    folders = [run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run for run in runs]
    logged_steps = [step for step in logs[0] if step in logs[1]]
    saved_steps = sorted({*committed(folders[0])} & {*committed(folders[1])})
    if not logged_steps and not saved_steps:
        fix = "name two folders of runs or of so.Checkpoints, which log or keep the same steps."
        raise value_error("no step was logged or saved by both runs.", list(map(str, runs)), fix)
    counts = (
        f"{plural(len(logged_steps), 'logged step')} and {plural(len(saved_steps), 'checkpoint')}"
    )
    lines = _first_in_logs(logs, logged_steps) + _first_in_folders(folders, saved_steps)
    print(*(lines or [f"equal in {counts}"]), sep="\n")
    return int(bool(lines))


def _first_in_logs(logs: Sequence[Log], steps: Sequence[int]) -> list[str]:
    """Return a line for the first step with other metrics."""
    for step in steps:
        metrics, other_metrics = (log[step] for log in logs)
        if metrics != other_metrics:
            return [f"the first logged step that differs: {step}, {metrics} and {other_metrics}"]
    return []


def _first_in_folders(folders: Sequence[Path], steps: Sequence[int]) -> list[str]:
    """Return lines for the first step with other arrays."""
    for step in steps:
        leaves = _differences(*(step_folder(folder, step) for folder in folders))
        if leaves:
            count = plural(len(leaves), "leaf")
            lines = [f"  {leaf}" for leaf in leaves[:MAX_LISTED]]
            return [f"the first checkpoint that differs: {step}, in {count}", *lines]
    return []


def _logged(file: Path) -> Log:
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
