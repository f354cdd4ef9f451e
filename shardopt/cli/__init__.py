"""The command line: `shardopt train`."""

from shardopt.cli.main import main

__all__ = ["main"]
