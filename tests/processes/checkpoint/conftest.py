"""Ways to compare states, and to read the message of a failure."""

from support.checkpoints import complaint_of, same

__all__ = ["complaint_of", "same"]
