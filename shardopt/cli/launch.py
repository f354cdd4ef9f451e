"""`shardopt launch`: several processes on this machine, as one job."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from shardopt.checkpoint.run_folder import committed
from shardopt.cli.options import TrainOptions
from shardopt.cli.run_folder import CHECKPOINTS
from shardopt.core.errors import format_error
from shardopt.runtime import launch as run

_EXAMPLE = "shardopt launch --processes 4 -- train --steps 100"


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Run a command as several processes of one job on this machine: launch --processes 4 -- train --steps 100.

    After -- comes a command of shardopt, a python script that calls so.initialize(), or a program. What process 0 says
    is shown. When a process fails the others are ended, and the failure is shown.
    """

    processes: int = 2
    """How many. The simulated devices of train are shared out among them."""

    max_restarts: int = 0
    """How often the job is started anew after a failure; train goes on from its last checkpoint."""

    min_processes: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """With how few processes it may be started anew: those that were killed are left out, and of train so many more \
that the rest can share its devices evenly. By itself, none is."""

    log_dir: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder for the log of each process. By itself logs in the run's folder for train, else runs/launch."""


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what is for launch, and the command after the first --."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def launch(options: LaunchOptions, command: Sequence[str], parse: Callable[[Sequence[str]], TrainOptions]) -> int:
    """Run the command as the options say, and return its exit code.

    Args:
      options: of launch.
      command: what came after --.
      parse: reads the words of train.

    Raises:
      ValueError: if there is no command, or a number is out of range.
      OSError: if the command cannot be started, or the logs cannot be written.
    """
    if not command:
        raise ValueError(format_error("launch", "there is no command to launch.", fix=f"say it after --: {_EXAMPLE}"))
    told = parse(command) if command[0] == "train" else None
    folder = told.run.run_dir if told else None
    default = Path("runs/launch") if folder is None else folder / "logs"
    return run(
        lambda attempt: _command(command, folder, attempt),
        processes=options.processes,
        log_dir=options.log_dir or default,
        max_restarts=options.max_restarts,
        min_processes=options.min_processes,
        can_share=lambda count: told is None or told.where.devices % count == 0,
    )


def _command(words: Sequence[str], run_dir: Path | None, attempt: int) -> list[str]:
    if words[0].endswith(".py"):
        return [sys.executable, *words]
    if run_dir is None:
        return list(words)
    again = attempt and "--resume" not in words and committed(run_dir / CHECKPOINTS)
    return [sys.executable, "-m", "shardopt.cli", *words, *(["--resume"] if again else [])]
