"""shardopt: turn any optax optimizer into a distributed one."""

from shardopt.core.types import TrainState, Updated, Weighted
from shardopt.mesh import initialize, make_mesh

__all__ = ["TrainState", "Updated", "Weighted", "initialize", "make_mesh"]
