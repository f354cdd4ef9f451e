"""Reading compiled XLA programs: what they send, hold, overwrite and compute, off their HLO text.

`so.audit` is the function `audit` of this package; the rest is imported from here: `from shardopt.audit import Expected`.
"""

from shardopt.audit.collective import Collective
from shardopt.audit.program import Memory, audit, donated, inner_product_flops, memory
from shardopt.audit.report import Audit, Expected, Traffic

__all__ = [
    "Audit",
    "Collective",
    "Expected",
    "Memory",
    "Traffic",
    "audit",
    "donated",
    "inner_product_flops",
    "memory",
]
