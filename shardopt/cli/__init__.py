"""The command line: `shardopt train` and `shardopt launch`."""

from shardopt.cli.main import main

__all__ = ["main"]
