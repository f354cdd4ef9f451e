"""Types, errors and argument checks that every other package uses."""

from shardopt.core._block_model import BlockModel
from shardopt.core._errors import (
    CheckpointError,
    CheckpointInUseError,
    DamagedCheckpointError,
    NonFiniteLossError,
    NotSeparableError,
    StepNotFoundError,
)
from shardopt.core._types import Max, Min, Sum, TrainState, Updated, Weighted

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
