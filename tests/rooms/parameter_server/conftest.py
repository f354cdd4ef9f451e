"""A small regression, cut into batches of workers."""

from support.regression import message_of, odd, regression, simulate_really, waiting_for_joins

__all__ = ["message_of", "odd", "regression", "simulate_really", "waiting_for_joins"]
