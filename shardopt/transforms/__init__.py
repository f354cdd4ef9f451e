"""The parts of distributed training as optax transformations, for an `optax.chain` under shard_map,
pmap or vmap.
"""

from shardopt.transforms._accumulate import accumulate
from shardopt.transforms._average_gradients import average_gradients
from shardopt.transforms._average_params import average_params
from shardopt.transforms._clip_by_global_norm import clip_by_global_norm
from shardopt.transforms._delay_gradients import (
    DelayRule,
    delay_compensation,
    delay_gradients,
    staleness_learning_rate,
)
from shardopt.transforms._eight_bit import eight_bit
from shardopt.transforms._local_updates import local_updates
from shardopt.transforms._shard_updates import shard_updates
from shardopt.transforms._skip_anomalies import skip_anomalies
from shardopt.transforms._stochastic_round import stochastic_round

__all__ = [
    "DelayRule",
    "accumulate",
    "average_gradients",
    "average_params",
    "clip_by_global_norm",
    "delay_compensation",
    "delay_gradients",
    "eight_bit",
    "local_updates",
    "shard_updates",
    "skip_anomalies",
    "staleness_learning_rate",
    "stochastic_round",
]
