"""Read compiled XLA programs from their HLO text: collectives, memory and flops.

Begin with `so.hlo.audit`.
"""

from shardopt.hlo._check_proved import check_proved
from shardopt.hlo._collective import Collective
from shardopt.hlo._program import Memory, audit, inner_product_flops, memory
from shardopt.hlo._report import Audit, Traffic
from shardopt.hlo.proof import Proof, prove

__all__ = [
    "Audit",
    "Collective",
    "Memory",
    "Proof",
    "Traffic",
    "audit",
    "check_proved",
    "inner_product_flops",
    "memory",
    "prove",
]
