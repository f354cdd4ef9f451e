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
        f"{plans.workload.name} ({plans.workload.num_parameters / 1e9:.2f} billion parameters) on "
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
        f"{one.memory.total / 1e9:.1f} GB",
        f"{time.total * 1e3:,.0f} ms",
        f"{one.mfu:.1%}",
        *(f"{part / time.total:.0%}" for part in parts),
    ]
