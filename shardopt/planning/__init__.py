"""Before renting the machine: what a compiled program sends and holds."""

from shardopt.planning.audit import audit
from shardopt.planning.program.check import Expected
from shardopt.planning.program.collective import Collective
from shardopt.planning.program.memory import Memory, donated, memory
from shardopt.planning.program.report import Audit, Traffic

__all__ = ["Audit", "Collective", "Expected", "Memory", "Traffic", "audit", "donated", "memory"]
