"""Synchronous strategies that equal single-device training, each with its own placement."""

from shardopt.strategies._ddp import ddp
from shardopt.strategies._fsdp import fsdp
from shardopt.strategies._hybrid import hybrid
from shardopt.strategies._zero import zero

__all__ = ["ddp", "fsdp", "hybrid", "zero"]
