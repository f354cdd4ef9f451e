"""Data to train on: a user of the library, which nothing in it imports but the command line."""

from shardopt.data.text import Corpus, Windows, batches, decode, encode, open_corpus, split, spread_batches

__all__ = ["Corpus", "Windows", "batches", "decode", "encode", "open_corpus", "split", "spread_batches"]
