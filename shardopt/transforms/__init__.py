"""Optax transformations for any chain: averages of parameters, moments in 8 bits, bfloat16
parameters, steps that are skipped at spikes. The parts of distributed training are links of your
own loop.
"""

from shardopt.transforms._average_gradients import average_gradients
from shardopt.transforms._average_params import average_params
from shardopt.transforms._eight_bit import eight_bit
from shardopt.transforms._local_updates import local_updates
from shardopt.transforms._on_mesh import on_mesh, per_device_grads
from shardopt.transforms._skip_anomalies import skip_anomalies
from shardopt.transforms._stochastic_round import stochastic_round
from shardopt.transforms._zero import zero

__all__ = [
    "average_gradients",
    "average_params",
    "eight_bit",
    "local_updates",
    "on_mesh",
    "per_device_grads",
    "skip_anomalies",
    "stochastic_round",
    "zero",
]
