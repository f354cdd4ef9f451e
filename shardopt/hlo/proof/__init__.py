"""Prove that a compiled program computes what one device would: every partial sum is completed,
every piece fits.
"""

from shardopt.hlo.proof._proof import Proof
from shardopt.hlo.proof._prove import prove

__all__ = ["Proof", "prove"]
