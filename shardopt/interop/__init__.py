"""Convert models of other libraries to the parameters and the loss that strategies take."""

from shardopt.interop.flax_nnx import NnxLoss, nnx

__all__ = ["NnxLoss", "nnx"]
