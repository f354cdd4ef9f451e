"""Training data: a corpus of bytes, documents as tokens, cut into windows or packed as
documents, and read in batches.

No other package of shardopt imports this one, except the command line.
"""

from shardopt.data._corpus import (
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
from shardopt.data._packing import pack
from shardopt.data._tokens import read_tokens

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
    "read_tokens",
    "split",
    "spread_batches",
]
