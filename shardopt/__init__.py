"""shardopt: turn any optax optimizer into a distributed one.

Start with `make_mesh`, then `ddp`, `zero`, `fsdp` or `hybrid`; train with `fit`; keep what you have with `Checkpoints`.
Over slow links `local_sgd` and `diloco` combine replicas of any of these; `async_sgd` and `async_local_sgd` do without barriers.
"""

from shardopt import checkpoint, interop, nn, optimizers, parameter_server, planning, reducers, training, transforms
from shardopt.audit import audit
from shardopt.checkpoint import Checkpoints, from_bytes, restore, save, to_bytes
from shardopt.core import (
    BlockModel,
    CheckpointError,
    CheckpointInUseError,
    DamagedCheckpointError,
    Max,
    Min,
    NonFiniteLossError,
    NotSeparableError,
    StepNotFoundError,
    Sum,
    TrainState,
    Updated,
    Weighted,
)
from shardopt.engine.adopt import adopt
from shardopt.engine.check import check
from shardopt.engine.compiler_options import compiler_options
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.rows import batch_mean, batch_sum, gather_batch
from shardopt.engine.user_mesh import Axes
from shardopt.local_updates import diloco, local_sgd
from shardopt.mesh import make_mesh
from shardopt.parameter_server import async_local_sgd, async_sgd, should_sync
from shardopt.partition import rules_from_logical_axes
from shardopt.pipeline import schedules
from shardopt.planning import aot, plan
from shardopt.runtime.probe import probe_devices
from shardopt.runtime.processes import initialize
from shardopt.runtime.progress import report_progress
from shardopt.runtime.watchdog import watchdog
from shardopt.strategies import ddp, fsdp, hybrid, zero
from shardopt.training import DeferredInit, EarlyStopping, FitResult, fit, hyperparams, with_hyperparams, with_params

__all__ = [
    "Axes",
    "BlockModel",
    "CheckpointError",
    "CheckpointInUseError",
    "Checkpoints",
    "DamagedCheckpointError",
    "DeferredInit",
    "EarlyStopping",
    "FitResult",
    "Max",
    "Min",
    "NonFiniteLossError",
    "NotSeparableError",
    "ShardedOptimizer",
    "StepNotFoundError",
    "Sum",
    "TrainState",
    "Updated",
    "Weighted",
    "adopt",
    "aot",
    "async_local_sgd",
    "async_sgd",
    "audit",
    "batch_mean",
    "batch_sum",
    "check",
    "checkpoint",
    "compiler_options",
    "ddp",
    "diloco",
    "fit",
    "from_bytes",
    "fsdp",
    "gather_batch",
    "hybrid",
    "hyperparams",
    "initialize",
    "interop",
    "local_sgd",
    "make_mesh",
    "nn",
    "optimizers",
    "parameter_server",
    "plan",
    "planning",
    "probe_devices",
    "reducers",
    "report_progress",
    "restore",
    "rules_from_logical_axes",
    "save",
    "schedules",
    "should_sync",
    "to_bytes",
    "training",
    "transforms",
    "watchdog",
    "with_hyperparams",
    "with_params",
    "zero",
]
