"""The errors that shardopt raises where Python has none that says enough."""

from shardopt.core import (
    CheckpointError,
    CheckpointInUseError,
    DamagedCheckpointError,
    NonFiniteLossError,
    NotSeparableError,
    SilentCorruptionError,
    StepNotFoundError,
    WrongProgramError,
)

__all__ = [
    "CheckpointError",
    "CheckpointInUseError",
    "DamagedCheckpointError",
    "NonFiniteLossError",
    "NotSeparableError",
    "SilentCorruptionError",
    "StepNotFoundError",
    "WrongProgramError",
]

# Tracebacks then name a class as users catch it.
for _name in __all__:
    globals()[_name].__module__ = __name__
