"""Plan a run before renting the machine: predict traffic and memory, rank layouts, and compile
without a device.
"""

from shardopt.planning._aot import aot
from shardopt.planning._hardware import HARDWARE, Hardware
from shardopt.planning._layout import ParallelLayout
from shardopt.planning._models import MODELS, Transformer
from shardopt.planning._search import predict
from shardopt.planning._topologies import topology_devices
from shardopt.planning._workload import trace

__all__ = [
    "HARDWARE",
    "MODELS",
    "Hardware",
    "ParallelLayout",
    "Transformer",
    "aot",
    "predict",
    "topology_devices",
    "trace",
]
