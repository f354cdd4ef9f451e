"""A small regression, cut into batches of workers."""

from support.regression import message_of, odd, regression, simulate_really

__all__ = ["message_of", "odd", "regression", "simulate_really"]
