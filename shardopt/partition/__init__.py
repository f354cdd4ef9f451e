"""Where every leaf lives: rules for the tensor axis, divisibility for the data axis, optimizer state by likeness."""

from shardopt.partition.logical_axes import rules_from_logical_axes
from shardopt.partition.plan import LeafPlan, plan_leaves
from shardopt.partition.report import Report, report
from shardopt.partition.rules import match_rules
from shardopt.partition.state import state_specs

__all__ = ["LeafPlan", "Report", "match_rules", "plan_leaves", "report", "rules_from_logical_axes", "state_specs"]
