"""A small regression, its data, and checkpoints kept in memory."""

from support.fit import batches, loss_fn_fixture, memory, metrics_at, new_state, opt, same

__all__ = ["batches", "loss_fn_fixture", "memory", "metrics_at", "new_state", "opt", "same"]
