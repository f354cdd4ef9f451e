"""What a person sees of a run: a bar on a terminal, lines elsewhere, nothing on other processes."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import jax

from shardopt.core.extras import is_installed

if TYPE_CHECKING:
    from rich.console import Console


class Display(NamedTuple):
    """Three ways to tell a person something.

    Attributes:
      say: `say(text)` prints a message, also where the bar is off.
      advance: `advance(step)`, at the start and after each step.
      report: `report(step, metrics)`, where metrics have arrived.
    """

    say: Callable[[str], None]
    advance: Callable[[int], None]
    report: Callable[[int, Mapping[str, float]], None]


@contextmanager
def show_progress(num_steps: int, *, shown: bool, console: "Console | None" = None) -> Iterator[Display]:
    """Show a run of `num_steps` steps on the first process.

    Args:
      num_steps: the step count at the end.
      shown: False for messages only.
      console: a rich console; by default standard error. Without rich there are lines only.
    """
    if jax.process_index() != 0:
        yield Display(_nothing, _nothing, _nothing)
        return
    out = console
    if out is None and is_installed("rich"):
        from rich.console import Console

        out = Console(stderr=True)

    def say(text: str) -> None:
        if out is None:
            print(text, file=sys.stderr, flush=True)
        else:
            out.print(text, markup=False, highlight=False, soft_wrap=True)

    def line(step: int, metrics: Mapping[str, float]) -> None:
        say(f"step {step}/{num_steps}  {describe(metrics)}")

    if not shown:
        yield Display(say, _nothing, _nothing)
    elif out is not None and (out.is_terminal or out.is_jupyter):
        with _live(num_steps, out) as (advance, report):
            yield Display(say, advance, report)
    else:
        yield Display(say, _nothing, line)


def describe(metrics: Mapping[str, float]) -> str:
    """Return metrics on one line, four significant digits each."""
    rate = "_per_second"
    return "  ".join(
        f"{value:.4g} {name.removesuffix(rate)}/s" if name.endswith(rate) else f"{name} {value:.4g}"
        for name, value in metrics.items()
    )


@contextmanager
def _live(num_steps: int, console: "Console") -> Iterator[tuple[Callable, Callable]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    shown: dict[str, float] = {}

    # Expanded, so that on a narrow terminal the metrics are cut, not the counts before them.
    with Progress(*columns, console=console, refresh_per_second=4, expand=True) as progress:
        task = progress.add_task("starting", total=num_steps)

        def advance(step: int) -> None:
            progress.update(task, completed=step)

        def report(step: int, metrics: Mapping[str, float]) -> None:
            shown.update(metrics)
            progress.update(task, description=describe(shown))

        yield advance, report


def _nothing(*_) -> None:
    pass
