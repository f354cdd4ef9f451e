"""Convert models of other libraries to the parameters and the loss that strategies take."""

from shardopt.interop._flax_nnx import NnxLoss, nnx
from shardopt.partition._rules import rules_from_logical_axes

__all__ = ["NnxLoss", "nnx", "rules_from_logical_axes"]
