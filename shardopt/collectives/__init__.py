"""Collectives over trees, and the one convention for gradients inside `shard_map`."""

from shardopt.collectives.gathering import gather, scatter_sum
from shardopt.collectives.per_device import per_device, shard_by_shard, sum_over
from shardopt.collectives.together import LITTLE, MUCH

__all__ = ["LITTLE", "MUCH", "gather", "per_device", "scatter_sum", "shard_by_shard", "sum_over"]
