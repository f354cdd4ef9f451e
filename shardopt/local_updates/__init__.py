"""Local updates: replicas train independently, and synchronize every few steps."""

from shardopt.local_updates.diloco import diloco
from shardopt.local_updates.local_sgd import local_sgd

__all__ = ["diloco", "local_sgd"]
