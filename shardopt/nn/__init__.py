"""Layers that know the mesh axes; on one device they are plain functions."""

from shardopt.nn.attention import attention

__all__ = ["attention"]
