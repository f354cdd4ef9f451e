"""The optimizer state of a train state: the state of the optimizer, and the state of a reducer if
there is one.
"""

from shardopt.config._compression import CompressedOptState, init_compression
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._offload import to_device, to_host
from shardopt.core._types import PyTree
from shardopt.losses._parts import Gradients
from shardopt.step._results import AppliedUpdate


def split_opt_state(
    config: StrategyConfig, layout: Layout, opt_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the state of the optimizer, and the state of the reducer on the device.

    None without a reducer.
    """
    if layout.compression is None:
        return opt_state, None
    reducer_shardings = shardings(config.mesh, layout.specs.opt_state.reducer)
    return opt_state.optimizer, to_device(
        config.update.offload, opt_state.reducer, reducer_shardings
    )


def join_opt_state(
    config: StrategyConfig, layout: Layout, update: AppliedUpdate, gradients: Gradients
) -> PyTree:
    """Return the optimizer state of the train state: the inverse of `split_opt_state`."""
    if layout.compression is None:
        return update.opt_state
    on_device = shardings(config.mesh, layout.specs.opt_state.reducer)
    abstract = layout.abstract.opt_state.reducer
    return CompressedOptState(
        update.opt_state, to_host(config.update.offload, abstract, gradients.reducer, on_device)
    )


def init_opt_state(config: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Return the first optimizer state, together with the reducer's state if there is a reducer."""
    opt_state = config.update.tx.init(layout.trainable(params))
    return (
        opt_state
        if layout.compression is None
        else CompressedOptState(opt_state, init_compression(layout.compression))
    )
