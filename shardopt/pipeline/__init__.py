"""Pipelines: a schedule is a table of ticks that says when each stage runs which pass, and which
slot stores the result.
"""

from shardopt.pipeline import schedules
from shardopt.pipeline._schedule import Schedule

__all__ = ["Schedule", "schedules"]
