"""Ring 2: replicas that train apart, in lockstep, and agree now and then."""

from shardopt.local_updates.diloco import diloco
from shardopt.local_updates.local_sgd import local_sgd

__all__ = ["diloco", "local_sgd"]
