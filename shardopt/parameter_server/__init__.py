"""Training without barriers: a parameter server with bounded staleness, its event log, replay and
simulation.
"""

from shardopt.parameter_server import rules
from shardopt.parameter_server._async_local_sgd import async_local_sgd
from shardopt.parameter_server._log import Log
from shardopt.parameter_server._run import ServerLostError, WorkersLostError
from shardopt.parameter_server._server import make_server
from shardopt.parameter_server._simulation import SimulatedWorker, simulate
from shardopt.parameter_server._updates import NonFiniteUpdateError, make_update

__all__ = [
    "Log",
    "NonFiniteUpdateError",
    "ServerLostError",
    "SimulatedWorker",
    "WorkersLostError",
    "async_local_sgd",
    "make_server",
    "make_update",
    "rules",
    "simulate",
]
