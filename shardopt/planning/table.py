"""Predictions as tables for people."""

from typing import TYPE_CHECKING

from shardopt.core.errors import plural

if TYPE_CHECKING:
    from shardopt.planning.prediction import Prediction
    from shardopt.planning.search import Plans


def plans_table(plans: "Plans", count: int) -> str:
    """Return the fastest layouts, one a line, and how many were dropped."""
    head = ["layout", "memory", "step", "MFU", "compute", "tensor", "data", "pipeline", "bubble"]
    rows = [head, *(_row(one) for one in plans.ranked[:count])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    title = (
        f"{plans.workload.name} ({_count(plans.workload.num_parameters)} parameters) on "
        f"{plural(plans.chips, 'chip')} of {plans.hardware.name}, {plural(plans.batch_size, 'row')} a batch"
    )
    rest = len(plans.ranked) - count
    more = [f"... and {rest} more that fit"] if rest > 0 else []
    tight = sum(one.missing_bytes > 0 for one in plans.dropped)
    other = len(plans.dropped) - tight
    more += [f"{plural(tight, 'layout')} dropped for memory ({plans.limit / 1e9:.1f} GB a chip may be used)"]
    more += [f"{plural(other, 'layout')} dropped for sizes that do not divide"] if other else []
    return "\n".join([title, *lines, *more])


def _row(one: "Prediction") -> list[str]:
    time = one.time
    parts = (time.compute, time.tensor, time.data, time.pipeline, time.bubble)
    return [
        str(one.layout),
        _bytes(one.memory.total),
        _duration(time.total),
        f"{one.mfu:.1%}",
        *(f"{part / time.total:.0%}" for part in parts),
    ]


def _count(number: int) -> str:
    """Return `8.03 billion`, `124 million` or the number itself."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def _bytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"
