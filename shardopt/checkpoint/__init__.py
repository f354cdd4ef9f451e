"""State in and out: whole, checked checkpoints that restore onto any mesh and strategy, and one-blob copies."""

from shardopt.checkpoint.blob import from_bytes, to_bytes
from shardopt.checkpoint.checkpoints import Checkpoints
from shardopt.checkpoint.restore import restore
from shardopt.checkpoint.save import save

__all__ = ["Checkpoints", "from_bytes", "restore", "save", "to_bytes"]
