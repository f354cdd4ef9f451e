"""Layers that know the mesh axes; on one device they are plain functions."""

from shardopt.nn.attention import attention
from shardopt.nn.cross_entropy import cross_entropy
from shardopt.nn.embedding import embedding
from shardopt.nn.order import positions, zigzag

__all__ = ["attention", "cross_entropy", "embedding", "positions", "zigzag"]
