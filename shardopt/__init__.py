"""shardopt: turn any optax optimizer but lookahead and dpsgd into a distributed one.

Start with `make_mesh`, then `ddp`, `zero`, `fsdp` or `hybrid`; train with `fit`; save the state
with `Checkpoints`. For slow links, `local_sgd` and `diloco` combine replicas of these strategies.
`async_sgd` trains without barriers.

`import shardopt` loads what `ddp`, `zero` and `fsdp` run. Each other name loads its package when it
is used for the first time.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardopt import errors, losses
from shardopt.config._user_mesh import Axes
from shardopt.core import BlockModel, TrainState
from shardopt.losses._per_row import per_row
from shardopt.mesh import make_mesh
from shardopt.runtime._processes import initialize
from shardopt.step._global_rows import GlobalRows
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.strategies._ddp import ddp
from shardopt.strategies._fsdp import fsdp
from shardopt.strategies._zero import zero

if TYPE_CHECKING:
    from shardopt import (
        adapters,
        hlo,
        interop,
        nn,
        optimizers,
        parameter_server,
        planning,
        reducers,
        runtime,
        training,
        transforms,
    )
    from shardopt.checkpoint._checkpoints import Checkpoints
    from shardopt.checkpoint._read import restore
    from shardopt.checkpoint._write import save
    from shardopt.diagnose._check import check
    from shardopt.diagnose._find_nan import find_nan
    from shardopt.local_updates import diloco, local_sgd
    from shardopt.parameter_server._async_sgd import async_sgd
    from shardopt.pipeline import schedules
    from shardopt.planning._search import plan
    from shardopt.strategies._hybrid import hybrid
    from shardopt.training._fit import fit
    from shardopt.training._replace import replace

__all__ = [
    "Axes",
    "BlockModel",
    "Checkpoints",
    "GlobalRows",
    "ShardedOptimizer",
    "TrainState",
    "adapters",
    "async_sgd",
    "check",
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
    "per_row",
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

_MODULE_OF = {
    "Checkpoints": "shardopt.checkpoint._checkpoints",
    "async_sgd": "shardopt.parameter_server._async_sgd",
    "check": "shardopt.diagnose._check",
    "diloco": "shardopt.local_updates",
    "find_nan": "shardopt.diagnose._find_nan",
    "fit": "shardopt.training._fit",
    "hybrid": "shardopt.strategies._hybrid",
    "local_sgd": "shardopt.local_updates",
    "plan": "shardopt.planning._search",
    "replace": "shardopt.training._replace",
    "restore": "shardopt.checkpoint._read",
    "save": "shardopt.checkpoint._write",
    "schedules": "shardopt.pipeline",
}
"""Name -> the module that has it, for names that load at their first use. Packages do so too."""
_MORE_PACKAGES = ["data", "models"]
"""Packages that `so.NAME` loads too. `from shardopt import *` leaves them out."""


def __getattr__(name: str) -> Any:
    """Load a name that is used for the first time."""
    if name not in __all__ + _MORE_PACKAGES:
        raise AttributeError(f"module 'shardopt' has no attribute {name!r}")
    if name in _MODULE_OF:
        loaded = getattr(importlib.import_module(_MODULE_OF[name]), name)
    else:
        loaded = importlib.import_module(f"shardopt.{name}")
    globals()[name] = loaded
    return loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
