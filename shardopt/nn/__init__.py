"""Layers that use the mesh axes inside a strategy; on one device they are plain functions."""

from shardopt.core._rounding import Rounding
from shardopt.nn._attention import attention
from shardopt.nn._balance import load_balancing_loss, update_router_bias
from shardopt.nn._cross_entropy import cross_entropy
from shardopt.nn._embedding import embedding
from shardopt.nn._mixture_of_experts import mixture_of_experts
from shardopt.nn._order import positions, zigzag
from shardopt.nn._quantized_einsum import quantized_einsum
from shardopt.nn._router import RouterStatistics

__all__ = [
    "Rounding",
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
