"""State in and out: checked checkpoints that restore onto any mesh and strategy, and copies as one
string of bytes.
"""

from shardopt.checkpoint._blob import from_bytes, to_bytes

__all__ = ["from_bytes", "to_bytes"]
