"""Training data: a corpus of bytes, conversations as tokens, cut into windows or packed as
documents, and read in batches.

No other package of shardopt imports this one, except the command line.
"""

from shardopt.data._chat import (
    Chat,
    ChatTokenizer,
    TokenizedChats,
    open_chat,
    read_chats,
    tokenize_chats,
)
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
from shardopt.data._packing import pack, padding_share

__all__ = [
    "Chat",
    "ChatTokenizer",
    "Corpus",
    "Documents",
    "TokenizedChats",
    "Windows",
    "batches",
    "decode",
    "encode",
    "next_token",
    "open_chat",
    "open_corpus",
    "pack",
    "padding_share",
    "read_chats",
    "split",
    "spread_batches",
    "tokenize_chats",
]
