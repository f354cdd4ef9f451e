"""The real wandb, mlflow and trackio, offline: a killed run that is resumed continues its tracker
run. Needs their extras.
"""

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("worker_tracked.py")


def environment(folder):
    """Return variables that leave everything in a folder, and send nothing."""
    return os.environ | {
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
    }


def run(name, folder, *arguments):
    """Run the worker, and return its exit code and what it printed."""
    words = [sys.executable, str(WORKER), name, str(folder), *arguments]
    done = subprocess.run(
        words, env=environment(folder), capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def wandb_runs(folder):
    """Return the rows of each start: run id -> rows.

    `wandb sync` joins the starts of an id in order.
    """
    from wandb.proto import wandb_internal_pb2

    runs = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, position, run_id = path.read_bytes(), 7, None
        while position + 7 <= len(data):
            # The file is a log of records with a head of seven bytes: 4 of a checksum, 2 of the
            # length, 1 of the kind.
            length = int.from_bytes(data[position + 4 : position + 6], "little")
            record = wandb_internal_pb2.Record.FromString(
                data[position + 7 : position + 7 + length]
            )
            position += 7 + length
            run_id = record.run.run_id or run_id
            if record.history.item:
                values = {
                    item.key or "/".join(item.nested_key): item.value_json
                    for item in record.history.item
                }
                runs.setdefault(run_id, []).append(
                    {key: json.loads(value) for key, value in values.items()}
                )
    return runs


def mlflow_runs(folder):
    """Return run id -> rows."""
    with sqlite3.connect(folder / "mlflow.db") as database:
        names = dict(database.execute("select run_uuid, name from runs"))
        metrics = list(
            database.execute(
                "select run_uuid, step, key, value from metrics order by timestamp, step"
            )
        )
    runs = {run_id: {} for run_id in names}
    for run_id, step, key, value in metrics:
        runs[run_id].setdefault(step, {"step": step})[key] = value
    assert set(names.values()) == {"run-1"}
    return {run_id: list(rows.values()) for run_id, rows in runs.items()}


def trackio_runs(folder):
    """Return run id -> rows."""
    (path,) = folder.glob("trackio/*.db")
    with sqlite3.connect(path) as database:
        columns = [row[1] for row in database.execute("pragma table_info(metrics)")]
        stored = list(database.execute(f"select {', '.join(columns)} from metrics order by id"))
    rows = [dict(zip(columns, values, strict=True)) for values in stored]

    def run_of(row):
        return row.get("run_id") or row["run_name"]

    return {
        run_id: [{"step": row["step"], **json.loads(row["metrics"])} for row in group]
        for run_id, group in itertools.groupby(sorted(rows, key=run_of), run_of)
    }


READERS = {"wandb": wandb_runs, "mlflow": mlflow_runs, "trackio": trackio_runs}


@pytest.mark.parametrize("name", READERS)
def test_a_killed_run_continues_its_tracker_run(name, tmp_path):
    """It is killed at step 5 and resumes from step 4: no step is missing, and there is one run."""
    pytest.importorskip(name)
    code, output = run(name, tmp_path, "5")
    assert code == -signal.SIGKILL, output
    code, output = run(name, tmp_path)
    assert code == 0, output
    runs = READERS[name](tmp_path)
    assert len(runs) == 1
    (rows,) = runs.values()
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert all(losses[step + 1] < losses[step] for step in range(1, 6))
    norms = {row["step"] for row in rows if "gradient_norm/w" in row}
    assert norms == {3, 6}
