"""Local updates: replicas train independently, and synchronize every few steps."""

from shardopt.local_updates._build import diloco, local_sgd

__all__ = ["diloco", "local_sgd"]
