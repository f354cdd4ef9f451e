"""Which mesh axes shard each leaf: tensor by rules, data by divisibility, and optimizer state like
its parameter.
"""

from shardopt.partition._owners import owned_by_blocks
from shardopt.partition._plan import (
    COLUMNS,
    LeafPlan,
    LeafPlanOptions,
    ShardAxes,
    plan_leaves,
    shard_axes,
    state_specs,
)
from shardopt.partition._report import Owned, Owners, Report, report
from shardopt.partition._rules import match_rules, rules_from_logical_axes

__all__ = [
    "COLUMNS",
    "LeafPlan",
    "LeafPlanOptions",
    "Owned",
    "Owners",
    "Report",
    "ShardAxes",
    "match_rules",
    "owned_by_blocks",
    "plan_leaves",
    "report",
    "rules_from_logical_axes",
    "shard_axes",
    "state_specs",
]
