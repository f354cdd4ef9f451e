"""Training without barriers: a parameter server with bounded staleness, its event log, replay and
simulation.
"""

from shardopt.parameter_server import durations, rules
from shardopt.parameter_server._async_local_sgd import async_local_sgd
from shardopt.parameter_server._clock import should_sync
from shardopt.parameter_server._log import Event, Log
from shardopt.parameter_server._optimizer import AsyncOptimizer
from shardopt.parameter_server._replay import replay
from shardopt.parameter_server._run import AsyncResult, ServerLostError, WorkersLostError
from shardopt.parameter_server._server import Server, ServerState, make_server
from shardopt.parameter_server._simulation import SimulatedWorker, simulate
from shardopt.parameter_server._sparse import SparseRows
from shardopt.parameter_server._updates import NonFiniteUpdateError, Update, make_update
from shardopt.parameter_server._views import Segment, plot_timeline, summarize, timeline

__all__ = [
    "AsyncOptimizer",
    "AsyncResult",
    "Event",
    "Log",
    "NonFiniteUpdateError",
    "Segment",
    "Server",
    "ServerLostError",
    "ServerState",
    "SimulatedWorker",
    "SparseRows",
    "Update",
    "WorkersLostError",
    "async_local_sgd",
    "durations",
    "make_server",
    "make_update",
    "plot_timeline",
    "replay",
    "rules",
    "should_sync",
    "simulate",
    "summarize",
    "timeline",
]
