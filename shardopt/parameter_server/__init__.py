"""Training without barriers: a parameter server with bounded staleness, its event log, replay and simulation."""

from shardopt.parameter_server import durations, rules
from shardopt.parameter_server.async_local_sgd import async_local_sgd
from shardopt.parameter_server.async_sgd import async_sgd
from shardopt.parameter_server.clock import should_sync
from shardopt.parameter_server.log import Event, Log
from shardopt.parameter_server.optimizer import AsyncOptimizer, RunFn
from shardopt.parameter_server.ray import ServerLostError, WorkersLostError
from shardopt.parameter_server.replay import replay
from shardopt.parameter_server.run import AsyncResult
from shardopt.parameter_server.server import Server, ServerState, make_server
from shardopt.parameter_server.simulation import SimulatedWorker, simulate
from shardopt.parameter_server.sparse import SparseRows
from shardopt.parameter_server.updates import NonFiniteUpdateError, Update, make_update
from shardopt.parameter_server.views import Segment, plot_timeline, summarize, timeline

__all__ = [
    "AsyncOptimizer",
    "AsyncResult",
    "Event",
    "Log",
    "NonFiniteUpdateError",
    "RunFn",
    "Segment",
    "Server",
    "ServerLostError",
    "ServerState",
    "SimulatedWorker",
    "SparseRows",
    "Update",
    "WorkersLostError",
    "async_local_sgd",
    "async_sgd",
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
