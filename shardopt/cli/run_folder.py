"""The folder of a run: what is in it, and when it may be used."""

import json
from pathlib import Path
from typing import Any

from shardopt.checkpoint.steps import committed
from shardopt.cli.options import TrainOptions, from_json, to_json
from shardopt.core.errors import complaint
from shardopt.core.files import write_whole

CONFIG, CHECKPOINTS, METRICS = "config.json", "checkpoints", "metrics.jsonl"
CURVE, SCHEDULE = "loss.png", "schedule.png"

_FIXED = ("dim", "layers", "heads")
"""Options of the model that decide the shapes of its parameters."""


def check_run_folder(options: TrainOptions) -> None:
    """Refuse a folder that holds a run already, unless it is to be resumed, and a resume that cannot be one.

    Raises:
      ValueError: if a run is there and `resume` is not set, or a resumed run would have another model.
    """
    folder = options.run.run_dir
    if not options.run.resume:
        if steps := committed(folder / CHECKPOINTS):
            what = f"there is a run in {str(folder)!r} already, saved at step {steps[-1]}."
            fix = f"go on with --resume, choose another --run-dir, or delete {str(folder)!r}."
            raise ValueError(complaint("train", what, fix=fix))
        return
    before, now = read_options(folder).model, options.model
    changed = [
        f"--{name} was {getattr(before, name)}, is now {getattr(now, name)}"
        for name in _FIXED
        if getattr(before, name) != getattr(now, name)
    ]
    if changed:
        what = f"the run in {str(folder)!r} trains another model."
        raise ValueError(complaint("train", what, changed, "leave these out, or choose another --run-dir."))


def read_options(folder: Path) -> TrainOptions:
    """Return the options of the run in a folder.

    Raises:
      ValueError: if there is none, or its file is damaged.
    """
    return from_json(_read(folder))


def order_changes(options: TrainOptions, text_bytes: int) -> list[str]:
    """Return, for a run to be resumed, what makes the order of its batches another than before."""
    saved = _read(options.run.run_dir)
    before = from_json(saved)
    pairs = {
        "--length": (before.model.length, options.model.length),
        "--batch-size": (before.training.batch_size, options.training.batch_size),
        "--seed": (before.training.seed, options.training.seed),
        "--data": (before.training.data, options.training.data),
        "the size of the text": (saved.get("text_bytes", text_bytes), text_bytes),
    }
    return [f"{name} was {old}, is now {new}" for name, (old, new) in pairs.items() if old != new]


def write_options(options: TrainOptions, text_bytes: int) -> None:
    """Write the options of a run, and the size of its text, into its folder, which is made when needed."""
    options.run.run_dir.mkdir(parents=True, exist_ok=True)
    saved = to_json(options) | {"text_bytes": text_bytes}
    write_whole(options.run.run_dir / CONFIG, json.dumps(saved, indent=2) + "\n")


def keep_options(options: TrainOptions, text_bytes: int) -> None:
    """Write the options again if somebody deleted the folder meanwhile: without them the run could not be resumed."""
    if not (options.run.run_dir / CONFIG).exists():
        write_options(options, text_bytes)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return what the run logged so far, `{"step": n, "loss": ..., ...}` each."""
    path = folder / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _read(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        fix = "leave out --resume to start one, or name its folder with --run-dir."
        raise ValueError(complaint("train", f"there is no run in {str(folder)!r} to go on with.", fix=fix))
    try:
        saved = json.loads(path.read_text())
        from_json(saved)
    except (ValueError, AttributeError, TypeError) as error:
        what = f"{str(path)!r} is damaged: {error}."
        raise ValueError(complaint("train", what, fix="bring it back, or start anew in another --run-dir.")) from error
    return saved
