"""Layers that use the mesh axes inside a strategy; on one device they are plain functions."""

from shardopt.nn.attention import attention
from shardopt.nn.balance import load_balancing_loss, update_router_bias
from shardopt.nn.cross_entropy import cross_entropy
from shardopt.nn.embedding import embedding
from shardopt.nn.low_precision import quantized_einsum
from shardopt.nn.mixture_of_experts import mixture_of_experts
from shardopt.nn.order import positions, zigzag
from shardopt.nn.router import RouterStatistics

__all__ = [
    "RouterStatistics",
    "attention",
    "cross_entropy",
    "embedding",
    "load_balancing_loss",
    "mixture_of_experts",
    "positions",
    "quantized_einsum",
    "update_router_bias",
    "zigzag",
]
