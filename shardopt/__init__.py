"""shardopt: turn any optax optimizer but lookahead into a distributed one.

Start with `make_mesh`, then `ddp`, `zero`, `fsdp` or `hybrid`; train with `fit`; save the state
with `Checkpoints`. For slow links, `local_sgd` and `diloco` combine replicas of these strategies.
`async_sgd` trains without barriers.

`import shardopt` loads the core. Layers, adapters, asynchronous training, planning, the reader of
compiled programs and the models of other libraries load when one of their names is used for the
first time.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardopt import (
    checkpoint,
    errors,
    losses,
    optimizers,
    reducers,
    runtime,
    training,
    transforms,
)
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._read import restore
from shardopt.checkpoint._write import save
from shardopt.config._user_mesh import Axes
from shardopt.core import BlockModel, TrainState
from shardopt.diagnose._check import check
from shardopt.diagnose._find_nan import find_nan
from shardopt.local_updates import diloco, local_sgd
from shardopt.mesh import make_mesh
from shardopt.pipeline import schedules
from shardopt.runtime._processes import initialize
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.strategies import ddp, fsdp, hybrid, zero
from shardopt.training._fit import fit
from shardopt.training._replace import replace

if TYPE_CHECKING:
    from shardopt import adapters, hlo, interop, nn, parameter_server, planning
    from shardopt.parameter_server._async_sgd import async_sgd
    from shardopt.planning._search import plan

__all__ = [
    "Axes",
    "BlockModel",
    "Checkpoints",
    "ShardedOptimizer",
    "TrainState",
    "adapters",
    "async_sgd",
    "check",
    "checkpoint",
    "ddp",
    "diloco",
    "errors",
    "find_nan",
    "fit",
    "fsdp",
    "hlo",
    "hybrid",
    "initialize",
    "interop",
    "local_sgd",
    "losses",
    "make_mesh",
    "nn",
    "optimizers",
    "parameter_server",
    "plan",
    "planning",
    "reducers",
    "replace",
    "restore",
    "runtime",
    "save",
    "schedules",
    "training",
    "transforms",
    "zero",
]

_WINGS = {
    "adapters": "shardopt.adapters",
    "hlo": "shardopt.hlo",
    "interop": "shardopt.interop",
    "nn": "shardopt.nn",
    "parameter_server": "shardopt.parameter_server",
    "async_sgd": "shardopt.parameter_server._async_sgd",
    "planning": "shardopt.planning",
    "plan": "shardopt.planning._search",
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
