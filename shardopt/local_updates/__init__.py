"""Local updates: replicas train independently, and synchronize every few steps."""

from shardopt.local_updates._diloco import diloco
from shardopt.local_updates._local_sgd import local_sgd

__all__ = ["diloco", "local_sgd"]
