"""A model of a few blocks on two replicas, and ways to compare."""

from support.replicas import (
    max_difference,
    model_of,
    new_batches,
    new_params,
    rows_of,
    steps_on,
    strategy_of,
    tiny,
)

__all__ = [
    "max_difference",
    "model_of",
    "new_batches",
    "new_params",
    "rows_of",
    "steps_on",
    "strategy_of",
    "tiny",
]
