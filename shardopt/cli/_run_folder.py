"""The folder of a run: its files, and when it may be used."""

import json
from pathlib import Path
from typing import Any

from shardopt.checkpoint._run_folder import committed
from shardopt.cli._options import (
    FolderOptions,
    Options,
    RunOptions,
    TrainOptions,
    TuneOptions,
    flag,
    from_json,
    to_json,
)
from shardopt.core import value_error
from shardopt.runtime._files import write_atomic

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"


def check_run_folder(options: RunOptions) -> None:
    """Refuse a folder that already holds a run, unless it is resumed.

    Refuse to resume a run with another model.
    """
    folder = options.run.run_dir
    if not options.run.resume:
        steps = committed(folder / CHECKPOINTS)
        if steps:
            problem = f"there is a run in {str(folder)!r} already, saved at step {steps[-1]}."
            fix = f"go on with --resume, choose another --run-dir, or delete {str(folder)!r}."
            raise value_error(problem, fix=fix)
        return
    saved = read_options(folder, type(options)).model
    current = options.model
    changes = [
        f"{flag(name)} was {getattr(saved, name)}, is now {getattr(current, name)}"
        for name in current.FIXED
        if getattr(saved, name) != getattr(current, name)
    ]
    if changes:
        problem = f"the run in {str(folder)!r} trains another model."
        raise value_error(problem, changes, "leave these out, or choose another --run-dir.")


def checkpoint_settings(run: FolderOptions) -> dict[str, Any]:
    """Return the arguments of `so.Checkpoints` for a run: the last two and the best are kept."""
    return {
        "directory": run.run_dir / CHECKPOINTS,
        "every": run.checkpoint_every,
        "keep": 2,
        "best": "val_loss",
        "resume": run.resume,
        "memory_every": run.memory_every,
    }


def read_options(folder: Path, options_type: type[Options] = TrainOptions) -> Options:
    """Return the options of the run of a command in a folder."""
    options, _ = read_run(folder)
    if not isinstance(options, options_type):
        problem = f"the run in {str(folder)!r} is one of another command."
        raise value_error(problem, fix="go on with that command, or choose another --run-dir.")
    return options


def order_changes(options: RunOptions, text_bytes: int) -> list[str]:
    """Return, for a resumed run, the changes that give its batches another order than before."""
    saved_options, saved_bytes = read_run(options.run.run_dir)
    before = _order_of(saved_options, saved_bytes or text_bytes)
    now = _order_of(options, text_bytes)
    return [
        f"{name} was {before[name]}, is now {now[name]}"
        for name in now
        if before[name] != now[name]
    ]


def _order_of(options: RunOptions, text_bytes: int) -> dict[str, object]:
    """Return the options that the order of the batches depends on."""
    return {
        "--length": options.model.length,
        "--batch-size": options.training.batch_size,
        "--seed": options.training.seed,
        "--data": options.training.data,
        "the size of the text": text_bytes,
    }


def write_options(options: RunOptions, text_bytes: int) -> None:
    """Write the options of a run and the size of its text into its folder.

    Make the folder if needed.
    """
    options.run.run_dir.mkdir(parents=True, exist_ok=True)
    saved = to_json(options) | {"text_bytes": text_bytes}
    write_atomic(options.run.run_dir / CONFIG, json.dumps(saved, indent=2) + "\n")


def read_run(folder: Path) -> tuple[RunOptions, int | None]:
    """Return the options of a run of train or tune, and the size of its text if that is known."""
    path = folder / CONFIG
    if not path.is_file():
        fix = "leave out --resume to start one, or name its folder with --run-dir."
        raise value_error(f"there is no run in {str(folder)!r} to go on with.", fix=fix)
    try:
        config = json.loads(path.read_text())
        is_tuned = "epochs" in config.get("training", {})
        options = from_json(config, TuneOptions if is_tuned else TrainOptions)
    except (ValueError, AttributeError, TypeError) as error:
        fix = "bring it back, or start again in another --run-dir."
        raise value_error(f"{str(path)!r} is damaged: {error}.", fix=fix) from error
    return options, config.get("text_bytes")
