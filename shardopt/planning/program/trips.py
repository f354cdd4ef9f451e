"""How often a while loop runs."""

import re

from shardopt.planning.program.text import Instruction, Module


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Return the trip count that XLA wrote down, or None."""
    if known := _KNOWN.search(loop.rest):
        return int(known[1])
    return None


_KNOWN = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
