"""Synchronous strategies that equal single-device training, each with its own placement."""

from shardopt.strategies.ddp import ddp
from shardopt.strategies.fsdp import fsdp
from shardopt.strategies.hybrid import hybrid
from shardopt.strategies.zero import zero

__all__ = ["ddp", "fsdp", "hybrid", "zero"]
