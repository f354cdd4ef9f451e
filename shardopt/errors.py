"""The errors that shardopt raises where Python has none that says enough."""

from shardopt.core._errors import (
    CheckpointError,
    CheckpointInUseError,
    DamagedCheckpointError,
    NonFiniteLossError,
    NotSeparableError,
    StepNotFoundError,
)

__all__ = [
    "CheckpointError",
    "CheckpointInUseError",
    "DamagedCheckpointError",
    "NonFiniteLossError",
    "NotSeparableError",
    "StepNotFoundError",
]
