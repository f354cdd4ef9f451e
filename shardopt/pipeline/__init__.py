"""Pipelines: a schedule is a table of ticks that says which pass each stage runs when, and in which slot it stores results."""

from shardopt.pipeline import schedules
from shardopt.pipeline.schedule import Schedule

__all__ = ["Schedule", "schedules"]
