"""shardopt: turn any optax optimizer but lookahead into a distributed one.

Start with `make_mesh`, then `ddp`, `zero`, `fsdp` or `hybrid`; train with `fit`; save the state
with `Checkpoints`. For slow links, `local_sgd` and `diloco` combine replicas of these strategies.
`async_sgd` and `async_local_sgd` train without barriers.

`import shardopt` loads the core. Layers, adapters, asynchronous training, planning, the reader of
compiled programs and the models of other libraries load when one of their names is used for the
first time.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardopt import (
    checkpoint,
    errors,
    optimizers,
    reducers,
    runtime,
    training,
    transforms,
)
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._read import restore
from shardopt.checkpoint._write import save
from shardopt.config._compiler_options import compiler_options
from shardopt.config._user_mesh import Axes
from shardopt.core import BlockModel, Max, Min, Sum, TrainState, Updated, Weighted
from shardopt.diagnose._check import check
from shardopt.diagnose._find_nan import find_nan
from shardopt.diagnose._finding import NonFinite
from shardopt.local_updates import diloco, local_sgd
from shardopt.losses._rows import batch_mean, batch_sum, gather_batch
from shardopt.mesh import make_mesh
from shardopt.pipeline import schedules
from shardopt.runtime._doctor import doctor
from shardopt.runtime._processes import initialize
from shardopt.step._adopt import adopt
from shardopt.step._average import with_average
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.strategies import ddp, fsdp, hybrid, zero
from shardopt.training._fit import fit
from shardopt.training._params import with_params
from shardopt.training._resume import DeferredInit

if TYPE_CHECKING:
    from shardopt import adapters, hlo, interop, nn, parameter_server, planning
    from shardopt.hlo._program import audit
    from shardopt.parameter_server._async_local_sgd import async_local_sgd
    from shardopt.parameter_server._async_sgd import async_sgd
    from shardopt.planning._aot import aot
    from shardopt.planning._search import plan

__all__ = [
    "Axes",
    "BlockModel",
    "Checkpoints",
    "DeferredInit",
    "Max",
    "Min",
    "NonFinite",
    "ShardedOptimizer",
    "Sum",
    "TrainState",
    "Updated",
    "Weighted",
    "adapters",
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
    "doctor",
    "errors",
    "find_nan",
    "fit",
    "fsdp",
    "gather_batch",
    "hlo",
    "hybrid",
    "initialize",
    "interop",
    "local_sgd",
    "make_mesh",
    "nn",
    "optimizers",
    "parameter_server",
    "plan",
    "planning",
    "reducers",
    "restore",
    "runtime",
    "save",
    "schedules",
    "training",
    "transforms",
    "with_average",
    "with_params",
    "zero",
]

_WINGS = {
    "adapters": "shardopt.adapters",
    "hlo": "shardopt.hlo",
    "audit": "shardopt.hlo._program",
    "interop": "shardopt.interop",
    "nn": "shardopt.nn",
    "parameter_server": "shardopt.parameter_server",
    "async_sgd": "shardopt.parameter_server._async_sgd",
    "async_local_sgd": "shardopt.parameter_server._async_local_sgd",
    "planning": "shardopt.planning",
    "plan": "shardopt.planning._search",
    "aot": "shardopt.planning._aot",
}
"""Name -> the module of a wing that is, or has, this name."""


def __getattr__(name: str) -> Any:
    """Load the wing of a name when the name is used for the first time."""
    if name not in _WINGS:
        raise AttributeError(f"module 'shardopt' has no attribute {name!r}")
    module = importlib.import_module(_WINGS[name])
    loaded = module if _WINGS[name] == f"shardopt.{name}" else getattr(module, name)
    globals()[name] = loaded
    return loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
