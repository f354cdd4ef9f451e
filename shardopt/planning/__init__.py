"""Before renting the machine: what a compiled program sends and holds."""

from shardopt.hlo.check import Expected
from shardopt.hlo.collective import Collective
from shardopt.hlo.memory import Memory, donated, memory
from shardopt.hlo.report import Audit, Traffic
from shardopt.planning.audit import audit

__all__ = ["Audit", "Collective", "Expected", "Memory", "Traffic", "audit", "donated", "memory"]
