"""Before renting the machine: what a program sends and holds, which layout fits, and what the compiler says."""

from shardopt.hlo.check import Expected
from shardopt.hlo.collective import Collective
from shardopt.hlo.flops import inner_product_flops
from shardopt.hlo.memory import Memory, donated, memory
from shardopt.hlo.report import Audit, Traffic
from shardopt.planning.aot_report import AotReport
from shardopt.planning.audit import audit
from shardopt.planning.candidate import Candidate
from shardopt.planning.diloco import Utilisation, bandwidth_for, diloco_utilisation
from shardopt.planning.footprint import Footprint
from shardopt.planning.hardware import HARDWARE, Hardware, find_hardware
from shardopt.planning.models import MODELS, find_model
from shardopt.planning.plots import plot_memory, plot_placement, plot_plans, plot_traffic
from shardopt.planning.prediction import Prediction, predict
from shardopt.planning.search import Dropped, Plans, plan
from shardopt.planning.step_time import StepTime
from shardopt.planning.topology import aot, parse_topology, topology_devices
from shardopt.planning.tracing import count_flops, trace
from shardopt.planning.traffic import Transfer
from shardopt.planning.transformer import Transformer
from shardopt.planning.workload import Bytes, Workload

__all__ = [
    "HARDWARE",
    "MODELS",
    "AotReport",
    "Audit",
    "Bytes",
    "Candidate",
    "Collective",
    "Dropped",
    "Expected",
    "Footprint",
    "Hardware",
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
