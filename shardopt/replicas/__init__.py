"""Ring 2: replicas that train apart, in lockstep, and agree now and then."""

from shardopt.replicas.diloco import diloco
from shardopt.replicas.local_sgd import local_sgd

__all__ = ["diloco", "local_sgd"]
