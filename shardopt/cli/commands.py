"""From the words on the command line to an exit code, and `shardopt launch`: several processes of one job."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from shardopt.checkpoint.run_folder import committed
from shardopt.cli.communication import with_meaning
from shardopt.cli.options import Pipeline, TrainOptions
from shardopt.cli.plan import AuditOptions, PlanOptions, ScheduleOptions, audit, plan, schedule
from shardopt.cli.run_folder import CHECKPOINTS, read_options
from shardopt.core.errors import format_error
from shardopt.runtime.launch import launch as run_processes
from shardopt.runtime.processes import end_at_once
from shardopt.runtime.vault import TOKEN, keep_snapshots


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Run a command as several processes of one job on this machine: launch --processes 4 -- train --steps 100.

    After -- comes a command of shardopt, a python script that calls so.initialize(), or a program. The output of
    process 0 is shown. When a process fails the others are ended, and the failure is shown.
    """

    processes: Annotated[str, tyro.conf.arg(metavar="INT|MIN:MAX|INT,INT,...")] = "2"
    """How many. The simulated devices of train are shared out among them. 1:4 begins with four, and goes on with as many as are \
left when some are killed; 1,2,4 with as many of these as are left."""

    max_restarts: int = 0
    """How often the job is started again after a failure; train goes on from its last checkpoint."""

    min_processes: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """With how few processes it may be started again: those that were killed are left out, and of train so many more \
that the rest can share its devices evenly. By default, none is. --processes 1:4 is --processes 4 --min-processes 1."""

    discovery_script: Annotated[str | None, tyro.conf.arg(metavar="COMMAND")] = None
    """A shell command that prints how many processes can run now. While fewer train than could at first it is asked every few \
seconds; when there are more again, all are sent SIGTERM, write a checkpoint and start again with more."""

    hang_timeout: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Seconds without progress of a process that is alive, after which the stacks of all are kept, the one that makes the \
others wait is named, and the job ends or starts again. What is done the first time, and may compile, may take ten times as \
long. By default hangs are not looked for."""

    spares: int = 0
    """How many processes stand by, with jax imported, for the next start: as many as there are, and it need not wait for \
imports. Each takes the memory of an interpreter with jax."""

    log_dir: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder for the log of each process. By default logs in the run's folder for train, else runs/launch."""


@dataclasses.dataclass(frozen=True)
class VaultOptions:
    """Keep snapshots of the train state in this host's memory, for a job of several hosts: once on each, beside the job.

    The job finds them by SHARDOPT_VAULTS=host0:8477,host1:8477, in the order of its processes, and so.Checkpoints(memory_every=20).
    Whoever asks has to know SHARDOPT_VAULT_TOKEN, which must be set here and there. Under shardopt launch none of it is needed.
    """

    port: int = 8477
    """Where it listens, over the network of the job."""


Options = TrainOptions | LaunchOptions | VaultOptions | PlanOptions | AuditOptions | ScheduleOptions

_COMMANDS: dict[str, type[Options]] = {
    "train": TrainOptions,
    "launch": LaunchOptions,
    "vault": VaultOptions,
    "plan": PlanOptions,
    "audit": AuditOptions,
    "schedule": ScheduleOptions,
}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, as `shardopt.cli.main`.

    One of several processes that fails ends here, without returning: it would wait for the others, and they for it.
    """
    words, command = split_words(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    try:
        match options:
            case TrainOptions():
                _train(words, options)
            case LaunchOptions():
                return launch(options, command)
            case VaultOptions():
                keep(options)
            case PlanOptions():
                plan(options)
            case AuditOptions():
                audit(options)
            case ScheduleOptions():
                schedule(options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        if isinstance(options, TrainOptions) and options.run.debug:
            raise
        _print_error(error)
        end_at_once(2)
        return 2
    return 0


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first --, and those after it: the command of `launch`."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def parse(words: Sequence[str], train_defaults: TrainOptions | None = None) -> Options:
    """Return the options of the command that the words name; those of train where they say nothing may be given."""
    app = tyro.extras.SubcommandApp()
    for name, kind in _COMMANDS.items():
        default = train_defaults if train_defaults is not None and kind is TrainOptions else kind()
        app.command(name=name)(_returns_options(kind, default))
    style = (tyro.conf.HelptextFromCommentsOff,)
    return app.cli(prog="shardopt", description="Train models sharded over devices.", args=words, config=style)


def _returns_options(kind: type[Options], default: Options) -> Callable[..., Options]:
    """Return a function of the options of one command, which tyro reads off its signature."""

    def command(options=default):
        return options

    command.__annotations__ = {"options": Annotated[kind, tyro.conf.arg(name="")]}
    command.__doc__ = kind.__doc__
    return command


def _train(words: Sequence[str], options: TrainOptions) -> None:
    if options.run.resume:
        saved = read_options(options.run.run_dir)
        here = dataclasses.replace(saved.run, run_dir=options.run.run_dir, memory_every=None, debug=False)
        before = dataclasses.replace(saved, run=here)
        options = _parse_train(words, saved_defaults(before, now=_parse_train(words, before)))
    from shardopt.cli.train import train  # no sooner: asking for help need not wait for it

    train(options)


def _parse_train(words: Sequence[str], defaults: TrainOptions | None = None) -> TrainOptions:
    options = parse(words, defaults)
    assert isinstance(options, TrainOptions)
    return options


def saved_defaults(before: TrainOptions, now: TrainOptions) -> TrainOptions:
    """Return the saved options without those that have no meaning under the strategy or schedule asked for now."""
    before = dataclasses.replace(before, communication=with_meaning(before.communication, now))
    if not now.is_hybrid:
        return dataclasses.replace(before, pipeline=Pipeline())
    if now.pipeline.schedule != before.pipeline.schedule:
        return dataclasses.replace(before, pipeline=dataclasses.replace(before.pipeline, chunks=None))
    return before


def launch(options: LaunchOptions, command: Sequence[str]) -> int:
    """Run the command that came after -- as the options say, and return its exit code."""
    if not command:
        example = "shardopt launch --processes 4 -- train --steps 100"
        raise ValueError(format_error("launch", "there is no command to launch.", fix=f"say it after --: {example}"))
    training = _parse_train(command) if command[0] == "train" else None
    folder = training.run.run_dir if training else None
    counts = parse_processes(options.processes, options.min_processes)
    return run_processes(
        lambda attempt: child_command(command, folder, attempt),
        processes=max(counts),
        log_dir=options.log_dir or (Path("runs/launch") if folder is None else folder / "logs"),
        max_restarts=options.max_restarts,
        min_processes=min(counts) if len(counts) > 1 else options.min_processes,
        discovery_script=options.discovery_script,
        hang_timeout=options.hang_timeout,
        spares=options.spares,
        can_share=lambda count: count in counts and (training is None or training.where.devices % count == 0),
    )


def keep(options: VaultOptions) -> None:
    """Keep snapshots until this process is ended."""
    if not os.environ.get(TOKEN):
        what = f"{TOKEN} is not set: anybody could read the train state, or put another in its place."
        raise ValueError(
            format_error("vault", what, fix=f"export {TOKEN}=$(openssl rand -hex 16), here and for the job.")
        )
    keep_snapshots(options.port, os.environ[TOKEN])


def parse_processes(text: str, least: int | None = None) -> Sequence[int]:
    """Return the numbers of processes that --processes allows, with --min-processes where that is given.

    Example:
      >>> list(parse_processes("4")), list(parse_processes("2:4")), list(parse_processes("1,2,4"))
      ([4], [2, 3, 4], [1, 2, 4])
    """
    words = text.split(":") if ":" in text else text.split(",")
    try:
        counts = [int(word) for word in words]
    except ValueError:
        counts = []
    if not counts or (":" in text and (len(counts) > 2 or counts[0] > counts[-1])):
        fix = "write 4, 1:4 for as many as are left down to one, or 1,2,4 for as many of these."
        raise ValueError(format_error("launch", f"--processes {text} cannot be read.", fix=fix))
    if least is not None and len(counts) > 1:
        what = f"--processes {text} and --min-processes {least} both say how few are enough."
        raise ValueError(format_error("launch", what, fix="leave --min-processes out."))
    if ":" in text or least is not None:
        return range(min(counts[0], least or counts[0]), counts[-1] + 1)
    return counts


def child_command(words: Sequence[str], run_dir: Path | None, attempt: int) -> list[str]:
    """Return what one process runs: of train, which has a run folder, with --resume after a failure."""
    if words[0].endswith(".py"):
        return [sys.executable, *words]
    if run_dir is None:
        return list(words)
    again = attempt and "--resume" not in words and committed(run_dir / CHECKPOINTS)
    return [sys.executable, "-m", "shardopt.cli", *words, *(["--resume"] if again else [])]


def _print_error(error: BaseException) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print("[bold red]error:[/] ", end="")
    console.print(str(error) or type(error).__name__, markup=False, highlight=False, soft_wrap=True)
