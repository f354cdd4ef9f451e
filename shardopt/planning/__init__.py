"""Before renting the machine: what a program sends and holds, which layout fits, and what the compiler says."""

from shardopt.audit.collective import Collective
from shardopt.audit.flops import inner_product_flops
from shardopt.audit.memory import Memory, donated, memory
from shardopt.audit.program import audit
from shardopt.audit.report import Audit, Expected, Traffic
from shardopt.planning.aot import AotReport, aot, parse_topology, topology_devices
from shardopt.planning.costs import Footprint, StepTime, Transfer
from shardopt.planning.diloco import Utilisation, bandwidth_for, diloco_utilisation
from shardopt.planning.hardware import HARDWARE, Hardware, find_hardware
from shardopt.planning.layout import Layout
from shardopt.planning.models import MODELS, Transformer, find_model
from shardopt.planning.plots import plot_memory, plot_placement, plot_plans, plot_traffic
from shardopt.planning.search import Dropped, Plans, Prediction, plan, predict
from shardopt.planning.workload import Bytes, Workload, count_flops, trace

__all__ = [
    "HARDWARE",
    "MODELS",
    "AotReport",
    "Audit",
    "Bytes",
    "Collective",
    "Dropped",
    "Expected",
    "Footprint",
    "Hardware",
    "Layout",
    "Memory",
    "Plans",
    "Prediction",
    "StepTime",
    "Traffic",
    "Transfer",
    "Transformer",
    "Utilisation",
    "Workload",
    "aot",
    "audit",
    "bandwidth_for",
    "count_flops",
    "diloco_utilisation",
    "donated",
    "find_hardware",
    "find_model",
    "inner_product_flops",
    "memory",
    "parse_topology",
    "plan",
    "plot_memory",
    "plot_placement",
    "plot_plans",
    "plot_traffic",
    "predict",
    "topology_devices",
    "trace",
]
