"""Data to train on: a corpus of files as bytes, cut into windows or packed as documents, drawn in batches.

A user of the library, which nothing in it imports but the command line.
"""

from shardopt.data.corpus import (
    Corpus,
    Documents,
    Windows,
    batches,
    decode,
    encode,
    next_token,
    open_corpus,
    split,
    spread_batches,
)
from shardopt.data.packing import pack, padding_share

__all__ = [
    "Corpus",
    "Documents",
    "Windows",
    "batches",
    "decode",
    "encode",
    "next_token",
    "open_corpus",
    "pack",
    "padding_share",
    "split",
    "spread_batches",
]
