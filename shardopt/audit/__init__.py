"""Read compiled XLA programs from their HLO text: collectives, memory, donated inputs and flops.

`so.audit` is the function `audit` of this package. Import the other names from here, such as
`from shardopt.audit import Expected`.
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
