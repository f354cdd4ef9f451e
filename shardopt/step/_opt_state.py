"""The optimizer state of a train state: the state of the optimizer, and the state of the reduction
if it has one.
"""

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._offload import to_device, to_host
from shardopt.core import PyTree
from shardopt.core._loss_parts import Gradients
from shardopt.step._results import AppliedUpdate


def split_opt_state(
    config: StrategyConfig, layout: Layout, opt_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the state of the optimizer, and the state of the reduction on the device."""
    optimizer_state, reducer_state = layout.reduce.split(opt_state)
    on_device = shardings(config.mesh, layout.reduce.split(layout.specs.opt_state)[1])
    return optimizer_state, to_device(config.update.offload, reducer_state, on_device)


def join_opt_state(
    config: StrategyConfig, layout: Layout, update: AppliedUpdate, gradients: Gradients
) -> PyTree:
    """Return the optimizer state of the train state: the inverse of `split_opt_state`."""
    on_device = shardings(config.mesh, layout.reduce.split(layout.specs.opt_state)[1])
    abstract = layout.reduce.split(layout.abstract.opt_state)[1]
    reducer_state = to_host(config.update.offload, abstract, gradients.reducer, on_device)
    return layout.reduce.join(update.opt_state, reducer_state)


def init_opt_state(config: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Return the first optimizer state, together with the reduction's state if it has one."""
    opt_state = config.update.tx.init(layout.trainable(params))
    return layout.reduce.join(opt_state, layout.reduce.init())
