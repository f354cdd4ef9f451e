"""Synchronous strategies, equal to single-device training: presets of one placement table."""

from shardopt.strategies.ddp import ddp
from shardopt.strategies.fsdp import fsdp
from shardopt.strategies.hybrid import hybrid
from shardopt.strategies.zero import zero

__all__ = ["ddp", "fsdp", "hybrid", "zero"]
