"""Types, errors and argument checks that every other package uses."""

from shardopt.core.block_model import BlockModel
from shardopt.core.errors import (
    CheckpointError,
    CheckpointInUseError,
    DamagedCheckpointError,
    NonFiniteLossError,
    NotSeparableError,
    StepNotFoundError,
)
from shardopt.core.types import Max, Min, Sum, TrainState, Updated, Weighted

__all__ = [
    "BlockModel",
    "CheckpointError",
    "CheckpointInUseError",
    "DamagedCheckpointError",
    "Max",
    "Min",
    "NonFiniteLossError",
    "NotSeparableError",
    "StepNotFoundError",
    "Sum",
    "TrainState",
    "Updated",
    "Weighted",
]
