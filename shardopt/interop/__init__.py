"""Models of other libraries, as the parameters and the loss that strategies take."""

from shardopt.interop.flax_nnx import NnxLoss, nnx

__all__ = ["NnxLoss", "nnx"]
