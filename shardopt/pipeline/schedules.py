"""Pipeline schedules: pure functions from sizes to tables, which need no devices."""

from shardopt.pipeline.construct import from_order, from_ticks
from shardopt.pipeline.one_f_one_b import eager_one_f_one_b, gpipe, interleaved, one_f_one_b
from shardopt.pipeline.schedule import Schedule
from shardopt.pipeline.zero_bubble import zero_bubble, zero_bubble_lockstep

__all__ = [
    "Schedule",
    "eager_one_f_one_b",
    "from_order",
    "from_ticks",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zero_bubble",
    "zero_bubble_lockstep",
]
