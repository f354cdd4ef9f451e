"""The parts of distributed training as optax transformations, for an `optax.chain` under shard_map, pmap or vmap."""

from shardopt.transforms.accumulate import accumulate
from shardopt.transforms.average_gradients import average_gradients
from shardopt.transforms.clip_by_global_norm import clip_by_global_norm
from shardopt.transforms.delay_gradients import DelayRule, delay_compensation, delay_gradients, staleness_learning_rate
from shardopt.transforms.eight_bit import eight_bit
from shardopt.transforms.local_updates import local_updates
from shardopt.transforms.shard_updates import shard_updates
from shardopt.transforms.stochastic_round import stochastic_round

__all__ = [
    "DelayRule",
    "accumulate",
    "average_gradients",
    "clip_by_global_norm",
    "delay_compensation",
    "delay_gradients",
    "eight_bit",
    "local_updates",
    "shard_updates",
    "staleness_learning_rate",
    "stochastic_round",
]
