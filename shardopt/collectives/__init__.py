"""Collectives over trees, and the convention for gradients inside `shard_map`."""

from shardopt.collectives._buckets import BUCKET_BYTES, SMALL_BUCKET_BYTES, MeshAxes
from shardopt.collectives._per_device import (
    all_reduce,
    constrain_tensor,
    has_auto_tensor,
    per_device,
    shard_by_shard,
)
from shardopt.collectives._shards import all_gather, all_to_all, reduce_scatter
from shardopt.collectives._wire import LeafWire

__all__ = [
    "BUCKET_BYTES",
    "SMALL_BUCKET_BYTES",
    "LeafWire",
    "MeshAxes",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "constrain_tensor",
    "has_auto_tensor",
    "per_device",
    "reduce_scatter",
    "shard_by_shard",
]
