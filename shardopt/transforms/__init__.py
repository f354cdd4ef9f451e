"""Optax transformations for any chain: averages of parameters, moments in 8 bits, bfloat16
parameters, steps that are skipped at spikes, and the mean of gradients in your own loop.
"""

from shardopt.transforms._average_gradients import average_gradients
from shardopt.transforms._average_params import average_params
from shardopt.transforms._eight_bit import eight_bit
from shardopt.transforms._skip_anomalies import skip_anomalies
from shardopt.transforms._stochastic_round import stochastic_round

__all__ = [
    "average_gradients",
    "average_params",
    "eight_bit",
    "skip_anomalies",
    "stochastic_round",
]
