"""A tiny text, and `shardopt train` in a process of its own."""

from support.commands import shardopt, start, tiny

__all__ = ["shardopt", "start", "tiny"]
