"""The output of `shardopt train` for people: the run, the placement of every leaf, and the result."""

import math
import os
import shlex
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

import shardopt as so
from shardopt.cli._options import RunOptions, TrainOptions, TuneOptions
from shardopt.cli._run_folder import CHECKPOINTS, CONFIG, METRICS
from shardopt.core import plural
from shardopt.data import Windows
from shardopt.pipeline import Schedule
from shardopt.training._fit import FitResult


def open_screen() -> Console:
    """Return a console on standard output; it prints only on the first process."""
    return Console(quiet=jax.process_index() != 0, highlight=False)


def show_run(
    screen: Console,
    options: TrainOptions,
    opt: so.ShardedOptimizer,
    windows: Windows,
    held_out: Windows,
) -> None:
    """Show the options of the run before it starts."""
    text = options.training.data or "Python's standard library"
    model = options.model
    num_parameters = sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(opt.abstract_state().params)
    )
    model_size = (
        f"{num_parameters / 1e6:.2f} million parameters: {plural(model.layers or 0, 'block')} of"
        f" width {model.dim}, {plural(model.heads, 'head')}"
    )
    rows = [
        ("model", model_size),
        ("text", f"{size(windows.end)} of {text}, {size(held_out.end - held_out.begin)} held out"),
    ]
    show_options(screen, options, opt, rows, "bytes", options.training.learning_rate)


def show_options(
    screen: Console,
    options: RunOptions,
    opt: so.ShardedOptimizer,
    first_rows: Sequence[tuple[str, str]],
    unit: str,
    learning_rate: float,
) -> None:
    """Show a table of options: the rows of the command, then step, optimizer, devices, mesh and
    schedule.
    """
    training = options.training
    config = opt.config
    step = f"{training.batch_size} x {options.model.length} {unit}"
    if config.loss.micro_batches > 1:
        step += f" in {config.loss.micro_batches} micro-batches"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for label, line in [
        *first_rows,
        ("step", step),
        ("optimizer", f"{training.optimizer}, learning rate up to {learning_rate:g}"),
        ("devices", describe_devices(opt.mesh.devices.size)),
        ("mesh", _mesh_text(config.mesh_shape)),
        *schedule_lines(options, config.schedule),
    ]:
        table.add_row(label, line)
    screen.print()
    screen.print(table)


def describe_devices(count: int) -> str:
    """Return a text such as "8 CPU devices, simulated on 2 cores" or "8 NVIDIA H200, which are
    there; ...".
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"{plural(count, 'CPU device')}, simulated on {plural(_cores(), 'core')}"
    return f"{count} {device.device_kind}, which are there; --devices counts simulated ones only"


def schedule_lines(options: RunOptions, schedule: Schedule | None) -> list[tuple[str, str]]:
    """Return (label, line) pairs that describe the schedule of a hybrid run."""
    if not options.is_hybrid:
        return []
    if schedule is None:
        return [("schedule", "none, as pipeline=1: micro-batches run one after another")]
    return [("schedule", f"{schedule.sizes}, {schedule.program_bubble_fraction:.1%} bubble")]


def show_placement(screen: Console, options: RunOptions, opt: so.ShardedOptimizer) -> None:
    """Show how each leaf is sharded, and the bytes per device."""
    screen.print(f"\n{options.strategy_text}: what each device holds\n", style="bold")
    say(screen, str(opt.config.report()))
    screen.print()


def show_order_changes(screen: Console, changes: list[str]) -> None:
    """Show why a resumed run does not continue at the same place in its text, if there are such
    reasons.
    """
    if changes:
        say(screen, f"The batches come in a new order: {'; '.join(changes)}.\n")


def show_stopped(screen: Console, options: RunOptions, result: FitResult, steps: int) -> None:
    """Show that a signal ended the run, and the command that continues it."""
    say(screen, f"\n{result.goodput}")
    screen.print(f"Stopped at step {result.step} of {steps}; everything is saved. Go on with")
    screen.print(f"  {resume_command(options)}", style="bold", soft_wrap=True, markup=False)


def resume_command(options: RunOptions) -> str:
    """Return the command that continues this run."""
    command = "tune" if isinstance(options, TuneOptions) else "train"
    return f"shardopt {command} --resume --run-dir {shlex.quote(str(options.run.run_dir))}"


def say(screen: Console, line: str) -> None:
    """Print a line without markup."""
    screen.print(line, markup=False, soft_wrap=True)


def show_result(
    screen: Console, options: TrainOptions, result: FitResult, prompt: str, text: str
) -> None:
    """Show the validation loss, a sample of text, and the files of the run."""
    show_loss(screen, result, "byte")
    screen.print("\nWhat it writes (given the dimmed beginning):\n")
    screen.print(Text.assemble("  ", (indented(prompt), "dim"), indented(text)), soft_wrap=True)
    show_files(screen, options, result)


def show_loss(screen: Console, result: FitResult, unit: str) -> None:
    """Show the last validation loss, in nats per `unit`."""
    losses = [line["val_loss"] for line in result.history if "val_loss" in line]
    if not losses:
        say(
            screen,
            f"\nThe run had reached step {result.step} already; --steps above that trains it"
            " further.",
        )
        return
    bits = f" ({losses[-1] / math.log(2):.2f} bits)" if unit == "byte" else ""
    after = f" nats a {unit}{bits} after {plural(result.step, 'step')}"
    screen.print(
        Text.assemble("\nvalidation loss ", (f"{losses[-1]:.3f}", "bold green"), after),
        soft_wrap=True,
    )


def show_files(screen: Console, options: RunOptions, result: FitResult, *names: str) -> None:
    """Show the goodput and the files of the run, `names` first."""
    say(screen, f"\n{result.goodput}")
    files = ", ".join([*names, CHECKPOINTS, METRICS, CONFIG])
    say(screen, f"\nin {options.run.run_dir}: {files}")


def size(count: int) -> str:
    """Return a number of bytes with three digits: 950 bytes, 12.3 kB, 9.87 MB.

    Example:
      >>> size(950), size(12_340), size(9_870_000)
      ('950 bytes', '12.3 kB', '9.87 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"


def indented(text: str) -> str:
    r"""Return the printable text with indented lines.

    Example:
      >>> indented("def f():\n    pass\x1b")
      'def f():\n      pass·'
    """
    return printable(text).replace("\n", "\n  ")


def printable(text: str) -> str:
    """Return the text with a dot for each character that would disturb a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "·" for char in text)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # some systems do not have it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _mesh_text(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"
