"""The loss on a piece of the batch: its rows, its parts, the proof that it may run per device, the
global view.

A loss returns `Weighted`, and metrics with a rule of their own. It reads the whole batch by
`gather_batch`, `batch_mean` and `batch_sum`.
"""

from shardopt.core import Max, Min, Sum, Updated, Weighted
from shardopt.losses._rows import batch_mean, batch_sum, gather_batch

__all__ = [
    "Max",
    "Min",
    "Sum",
    "Updated",
    "Weighted",
    "batch_mean",
    "batch_sum",
    "gather_batch",
]
