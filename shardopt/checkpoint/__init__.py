"""State in and out: checked checkpoints that restore onto any mesh and strategy, and copies as one string of bytes."""

from shardopt.checkpoint.blob import from_bytes, to_bytes
from shardopt.checkpoint.checkpoints import Checkpoints
from shardopt.checkpoint.read import restore
from shardopt.checkpoint.write import save
from shardopt.core.errors import CheckpointError, CheckpointInUseError, DamagedCheckpointError, StepNotFoundError

__all__ = [
    "CheckpointError",
    "CheckpointInUseError",
    "Checkpoints",
    "DamagedCheckpointError",
    "StepNotFoundError",
    "from_bytes",
    "restore",
    "save",
    "to_bytes",
]
