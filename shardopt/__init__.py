"""shardopt: turn any optax optimizer into a distributed one."""

from shardopt.core import (
    BlockModel,
    CheckpointError,
    NonFiniteLossError,
    ShardedOptimizer,
    TrainState,
    Updated,
    Weighted,
)
from shardopt.mesh import initialize, make_mesh
from shardopt.strategies import ddp, fsdp, zero

__all__ = [
    "BlockModel",
    "CheckpointError",
    "NonFiniteLossError",
    "ShardedOptimizer",
    "TrainState",
    "Updated",
    "Weighted",
    "ddp",
    "fsdp",
    "initialize",
    "make_mesh",
    "zero",
]
