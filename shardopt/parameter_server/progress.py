"""What a person sees of an asynchronous run: a live table of workers on a terminal, a line now and then elsewhere."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardopt.parameter_server.views import Status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Show = Callable[..., None]
"""`show(status, last=False)`, as often as one likes: `status()` is called only when something is to be shown."""

_TABLE_SECONDS, _LINE_SECONDS = 0.25, 10.0
_MOST = 32
_STYLES = {"computes": "green", "waits": "yellow", "loads": "blue", "gone": "dim"}


@contextmanager
def show_workers(who: str, *, shown: bool, console: "Console | None" = None) -> Iterator[Show]:
    """Show a run for as long as the context lasts.

    Args:
      who: the function that the user called.
      shown: False for nothing at all.
      console: a rich console; by default standard error.
    """
    if not shown:
        yield lambda status, last=False: None
        return
    from rich.console import Console

    out = console or Console(stderr=True)
    if not (out.is_terminal or out.is_jupyter):
        yield _now_and_then(_LINE_SECONDS, lambda status: out.print(line(who, status), markup=False, highlight=False))
        return
    from rich.live import Live

    with Live(console=out, auto_refresh=False) as live:
        yield _now_and_then(_TABLE_SECONDS, lambda status: live.update(table(who, status), refresh=True))


def line(who: str, status: Status) -> str:
    """Return a run as one line."""
    doing = Counter(one.doing for one in status.workers)
    workers = ", ".join(f"{count} {what.removesuffix('s') if count > 1 else what}" for what, count in doing.items())
    return f"{who}: update {status.updates}/{status.num_updates}  {_rate(status):.4g} pushes/s  workers: {workers}"


def table(who: str, status: Status) -> "Table":
    """Return a run as a table, one row a worker; of more than 32 those that pushed least."""
    from rich.table import Table

    seconds = max(status.seconds, 1e-9)
    title = f"{who}: update {status.updates} of {status.num_updates}, {_rate(status):.4g} pushes/s, {seconds:.0f} s"
    found = Table(title=title, title_justify="left")
    for name in ("worker", "doing", "for s", "step", "ahead", "pushes", "pushes/s", "waited"):
        found.add_column(name, justify="left" if name == "doing" else "right")
    slowest = sorted(status.workers, key=lambda one: one.pushes)[:_MOST]
    for one in sorted(slowest):
        numbers = (one.clock, one.staleness, one.pushes, f"{one.pushes / seconds:.3g}", f"{one.waited / seconds:.0%}")
        doing = f"[{_STYLES[one.doing]}]{one.doing}[/]"
        found.add_row(str(one.worker), doing, f"{one.seconds:.1f}", *map(str, numbers))
    if len(status.workers) > _MOST:
        found.caption = f"and {len(status.workers) - _MOST} more"
    return found


def _rate(status: Status) -> float:
    return sum(one.pushes for one in status.workers) / max(status.seconds, 1e-9)


def _now_and_then(seconds: float, show: Callable[[Status], None]) -> Show:
    shown = [-float("inf")]

    def maybe(status: Callable[[], Status], last: bool = False) -> None:
        now = time.monotonic()
        if last or now - shown[0] >= seconds:
            shown[0] = now
            show(status())

    return maybe
