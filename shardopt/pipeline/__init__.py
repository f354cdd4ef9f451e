"""Pipelines: schedules as tables of ticks, which say what each stage does when, and where it keeps what."""

from shardopt.pipeline import schedules
from shardopt.pipeline.schedule import Schedule

__all__ = ["Schedule", "schedules"]
