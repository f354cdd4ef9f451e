"""The command line: `shardopt train`, `launch`, `vault`, `plan`, `audit` and `schedule`."""

import sys
from collections.abc import Sequence

from shardopt.core.extras import require

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `shardopt` and return its exit code: 0, 2 for an error in the request, 130 for a second Ctrl-C."""
    try:
        for module in ("tyro", "rich"):
            require(module, extra="cli", caller="shardopt")
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from shardopt.cli.commands import run

    return run(arguments)
