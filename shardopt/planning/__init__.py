"""Plan a run before renting the machine: predict traffic and memory, rank layouts, and compile
without a device.
"""

from shardopt.planning._aot import AotReport, aot
from shardopt.planning._compare import ComparedCollective, ComparedOperation, Comparison, compare
from shardopt.planning._compiled_time import Operation, Span, StepSeconds, step_seconds
from shardopt.planning._costs import Footprint, StepTime, Transfer
from shardopt.planning._diloco import Utilisation, bandwidth_for, diloco_utilisation
from shardopt.planning._failure_simulation import simulate_failures
from shardopt.planning._failures import Failures
from shardopt.planning._hardware import HARDWARE, Hardware, find_hardware
from shardopt.planning._layout import Layout
from shardopt.planning._models import MODELS, Transformer, find_model
from shardopt.planning._plots import (
    plot_memory,
    plot_placement,
    plot_plans,
    plot_timeline,
    plot_traffic,
)
from shardopt.planning._recovery import Recovery, plan_recovery
from shardopt.planning._search import Dropped, PlannedRecovery, Plans, Prediction, predict
from shardopt.planning._topologies import parse_topology, topology_devices
from shardopt.planning._workload import Bytes, NamedValue, Recompute, Workload, count_flops, trace

__all__ = [
    "HARDWARE",
    "MODELS",
    "AotReport",
    "Bytes",
    "ComparedCollective",
    "ComparedOperation",
    "Comparison",
    "Dropped",
    "Failures",
    "Footprint",
    "Hardware",
    "Layout",
    "NamedValue",
    "Operation",
    "PlannedRecovery",
    "Plans",
    "Prediction",
    "Recompute",
    "Recovery",
    "Span",
    "StepSeconds",
    "StepTime",
    "Transfer",
    "Transformer",
    "Utilisation",
    "Workload",
    "aot",
    "bandwidth_for",
    "compare",
    "count_flops",
    "diloco_utilisation",
    "find_hardware",
    "find_model",
    "parse_topology",
    "plan_recovery",
    "plot_memory",
    "plot_placement",
    "plot_plans",
    "plot_timeline",
    "plot_traffic",
    "predict",
    "simulate_failures",
    "step_seconds",
    "topology_devices",
    "trace",
]
