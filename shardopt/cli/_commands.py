"""Parse the command line and run a command; `shardopt launch` runs several processes of one job."""

import dataclasses
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union, cast

import tyro

from shardopt.checkpoint._run_folder import committed
from shardopt.cli._conditions import saved_defaults
from shardopt.cli._options import (
    DiffOptions,
    ExportOptions,
    GenerateOptions,
    MergeOptions,
    Options,
    RunOptions,
    TrainOptions,
    TuneOptions,
    brief,
    check_words,
)
from shardopt.cli._plan import AuditOptions, PlanOptions, audit, plan
from shardopt.cli._remedies import error_of_command
from shardopt.cli._run_folder import CHECKPOINTS, read_options
from shardopt.cli._verify import VerifyOptions, verify
from shardopt.core import calling, check_number, value_error
from shardopt.runtime._devices import start_devices
from shardopt.runtime._doctor import doctor
from shardopt.runtime._hosts import ALONE, read_hosts
from shardopt.runtime._launch import GRACE
from shardopt.runtime._launch import launch as run_processes
from shardopt.runtime._processes import end_at_once, initialize
from shardopt.runtime._progress import listen_address
from shardopt.runtime._vault import TOKEN, keep_snapshots


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Run a command as several processes of one job, on this machine or on several: launch
    --processes 4 -- train --steps 100.

    After -- comes a command of shardopt, a python script that calls so.initialize(), or a program.
    The output of process 0 is shown. When a process fails, the others are ended, and the failure is
    shown.
    """

    processes: Annotated[str, tyro.conf.arg(metavar="INT|MIN:MAX|INT,INT,...")] = "2"
    """How many processes; train divides its simulated devices among them. 1:4 starts with four, and
    continues with all that are left when some are killed. 1,2,4 continues with the largest of these
    numbers that is possible. train leaves out more if the others could not share its devices evenly.
    By default every restart has all processes.
    """

    hosts: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT,HOST,...")] = None
    """The hosts of the job, such as node0:8476,node1. Give the same command on each; each starts
    --processes processes. The port is for process 0, on the first host. By default this machine
    alone.
    """

    max_restarts: int = 0
    """How often the job is started again after a failure; train continues from its last checkpoint.
    """

    hang_timeout: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Seconds without progress of a live process that count as a hang. Then the stacks of all are
    saved, the process that delays the others is named, and the job ends or starts again. An action
    that happens for the first time may compile, so it may take ten times as long. By default hangs
    are not detected.
    """

    grace: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = GRACE
    """Seconds that the processes have to save and to end after SIGTERM or Ctrl-C. Then the processes
    that still run are named and killed.
    """

    log_dir: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder for the log of each process. By default logs in the run's folder for train, else
    runs/launch.
    """


@dataclasses.dataclass(frozen=True)
class VaultOptions:
    """Hold snapshots of the train state in this host's memory, for a job of several hosts: run it
    once on each host.

    The job finds the vaults through SHARDOPT_VAULTS=host0:8477,host1:8477, in the order of its
    processes, and takes snapshots with so.Checkpoints(memory_every=20). Set the same
    SHARDOPT_VAULT_TOKEN for the vaults and for the job: every request needs it. Under shardopt
    launch none of this is needed.
    """

    port: int = 8477
    """Port on which it listens, at all addresses of the host, or at SHARDOPT_LISTEN_ADDRESS alone."""


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Print versions, devices, topology and flags, and the silent errors of jax and XLA that these
    versions have.

    so.runtime.doctor(opt, state, batch) also says which of them concern your step.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, like `shardopt.cli.main`.

    If one of several processes fails, this ends the process without returning. Otherwise it would
    wait for the others, and they for it.
    """
    words, command = split_words(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parse(words)
        chosen = _COMMANDS[type(options)]
        with calling(chosen.name):
            if isinstance(options, LaunchOptions):
                return launch(options, command)
            if isinstance(options, RunOptions):
                options = _resumed(words, options)
            _start(chosen, options)
            return chosen.run(options) or 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ArithmeticError, ModuleNotFoundError) as error:
        if "--debug" in words:
            raise
        _print_error(error_of_command(error, words[0]))
        end_at_once(2)
        return 2


def _start(command: "Command", options: Any) -> None:
    """Join the processes of the job and set the devices, before any other code of a command."""
    if command.devices is not None:
        start_devices(command.devices(options))
    elif command.joins:
        initialize()


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first --, and the words after it: the command of `launch`."""
    words = list(words)
    separator = words.index("--") if "--" in words else len(words)
    return words[:separator], words[separator + 1 :]


def parse(words: Sequence[str], defaults: RunOptions | None = None) -> Any:
    """Return the options of the command in the words.

    `defaults` replaces the default options of their command. `--help` leaves out the options that
    are `More`.
    """
    wants_help = not {"-h", "--help"}.isdisjoint(words)
    wants_all = "--help-all" in words
    if wants_help or wants_all:
        words = [*words[:1], "--help"]
    commands = []
    for options_type, known in _COMMANDS.items():
        command_type = brief(options_type) if wants_help and not wants_all else options_type
        default = defaults if options_type is type(defaults) else command_type()
        command = tyro.conf.subcommand(known.name, default=default, prefix_name=False)
        commands.append(Annotated[command_type, command])
    options, unknown_words = tyro.cli(
        cast(Any, Union[tuple(commands)]),  # noqa: UP007
        prog="shardopt",
        description="Train models sharded over devices.",
        args=words,
        config=(tyro.conf.HelptextFromCommentsOff, tyro.conf.OmitArgPrefixes),
        return_unknown_args=True,
    )
    with calling(words[0]):
        forgot_dashes = words[0] == "launch" and not _NAMES.isdisjoint(unknown_words)
        fix = _AFTER if forgot_dashes else "--help-all lists the options."
        check_words(options, unknown_words, fix)
    return options


def _late(name: str) -> Callable[[Any], int | None]:
    """Return the function of a command, which is imported when it runs, so that --help is fast."""

    def run_command(options: Any) -> int | None:
        return getattr(importlib.import_module(f"shardopt.cli._{name}"), name)(options)

    return run_command


def _resumed(words: Sequence[str], options: Options) -> Options:
    """Return the options of a run.

    A run that is resumed has the saved options where the words have none.
    """
    if not options.run.resume:
        return options
    stored_options = read_options(options.run.run_dir, type(options))
    saved_run = dataclasses.replace(
        stored_options.run, run_dir=options.run.run_dir, memory_every=None, debug=False
    )
    saved_options = dataclasses.replace(stored_options, run=saved_run)
    return parse(words, saved_defaults(saved_options, current=parse(words, saved_options)))


def launch(options: LaunchOptions, command: Sequence[str]) -> int:
    """Run the command after -- as several processes, and return its exit code."""
    if not command:
        raise value_error("there is no command to launch.", fix=_AFTER)
    if command[0] in _ALONE:
        fix = "start it by itself; the job finds vaults through SHARDOPT_VAULTS."
        raise value_error(f"{command[0]} cannot be a process of a job.", fix=fix)
    run_options: RunOptions | None = parse(command) if command[0] in ("train", "tune") else None
    folder = run_options.run.run_dir if run_options else None
    counts = parse_processes(options.processes)
    fewer = [count for count in counts if count < max(counts)]
    if options.hosts and fewer:
        problem = f"with --hosts every host starts all its processes, got {options.processes}."
        raise value_error(problem, fix=f"--processes {max(counts)}.")
    if run_options:  # each process has an equal share of the simulated devices
        fewer = [count for count in fewer if run_options.where.devices % max(count, 1) == 0]
    return run_processes(
        lambda attempt: child_command(command, folder, attempt),
        processes=max(counts),
        log_dir=options.log_dir or (folder / "logs" if folder else Path("runs/launch")),
        max_restarts=options.max_restarts,
        fewer=fewer,
        hang_timeout=options.hang_timeout,
        grace=options.grace,
        hosts=read_hosts(options.hosts) if options.hosts else ALONE,
    )


def keep(options: VaultOptions) -> None:
    """Run a vault until this process is ended."""
    check_number("--port", options.port, below=2**16)
    if not os.environ.get(TOKEN):
        problem = (
            f"{TOKEN} is not set: anybody could read the train state, or put another in its place."
        )
        fix = f"export {TOKEN}=$(openssl rand -hex 16), here and for the job."
        raise value_error(problem, fix=fix)
    keep_snapshots(options.port, os.environ[TOKEN], listen_address())


class Command(NamedTuple):
    """A command of `shardopt`.

    Attributes:
      name: its name.
      run: its function.
      devices: the number of CPU devices to simulate, by its options; None if it sets none.
      joins: whether its processes are one job, without devices of its own.
    """

    name: str
    run: Callable[[Any], int | None]
    devices: Callable[[Any], int] | None = None
    joins: bool = False


def _devices_of_run(options: RunOptions) -> int:
    return options.where.devices


_COMMANDS: dict[type, Command] = {
    TrainOptions: Command("train", _late("train"), _devices_of_run),
    TuneOptions: Command("tune", _late("tune"), _devices_of_run),
    MergeOptions: Command("merge", _late("merge"), joins=True),
    ExportOptions: Command("export", _late("export"), joins=True),
    GenerateOptions: Command("generate", _late("generate"), joins=True),
    DiffOptions: Command("diff", _late("diff"), joins=True),
    LaunchOptions: Command("launch", lambda options: launch(options, [])),
    VaultOptions: Command("vault", keep),
    PlanOptions: Command("plan", plan),
    AuditOptions: Command("audit", audit),
    DoctorOptions: Command("doctor", lambda _: print(doctor()), joins=True),
    VerifyOptions: Command("verify", verify, lambda options: options.devices),
}
"""By the type of its options each command."""
_NAMES = frozenset(command.name for command in _COMMANDS.values())
_AFTER = "say the command after --: shardopt launch --processes 4 -- train --steps 100"
_ALONE = ("launch", "vault")
"""The commands that are no process of a job."""


def parse_processes(text: str) -> Sequence[int]:
    """Return the numbers of processes that --processes allows.

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
        raise value_error(f"--processes {text} cannot be read.", fix=fix)
    return range(counts[0], counts[-1] + 1) if ":" in text else counts


def child_command(words: Sequence[str], run_dir: Path | None, attempt: int) -> list[str]:
    """Return the command of one process.

    A restart of train or tune gets --resume if there is a checkpoint.
    """
    if words[0].endswith(".py"):
        return [sys.executable, *words]
    if words[0] not in _NAMES:
        if shutil.which(words[0]) is None:
            fix = "check its name; a script begins with the word python, or ends with .py."
            raise value_error(f"{words[0]!r} is no command of shardopt, and no program.", fix=fix)
        return list(words)
    if run_dir is None:
        return [sys.executable, "-m", "shardopt.cli", *words]
    resumes = attempt and "--resume" not in words and committed(run_dir / CHECKPOINTS)
    return [sys.executable, "-m", "shardopt.cli", *words, *(["--resume"] if resumes else [])]


def _print_error(text: str) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print("[bold red]error:[/] ", end="")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
