"""Pipeline schedules: pure functions from sizes to tables, which need no devices."""

from shardopt.pipeline.from_order import from_order
from shardopt.pipeline.from_ticks import from_ticks
from shardopt.pipeline.gpipe import gpipe
from shardopt.pipeline.interleaved import interleaved
from shardopt.pipeline.one_f_one_b import one_f_one_b
from shardopt.pipeline.schedule import Schedule
from shardopt.pipeline.zero_bubble import zero_bubble
from shardopt.pipeline.zero_bubble_lockstep import zero_bubble_lockstep

__all__ = [
    "Schedule",
    "from_order",
    "from_ticks",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zero_bubble",
    "zero_bubble_lockstep",
]
