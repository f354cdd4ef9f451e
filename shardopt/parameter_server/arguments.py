"""Numbers that every part of the parameter server refuses in the same words."""

from typing import Any

from shardopt.core.arguments import is_integer
from shardopt.core.errors import format_error

UNBOUNDED_FIX = "0 waits at every step, s lets the fastest run s steps ahead, None never waits."


def check_max_staleness(who: str, max_staleness: Any) -> None:
    """Refuse a bound that is neither None nor an integer of at least 0.

    Raises:
      TypeError: if it is of another kind.
      ValueError: if it is negative.
    """
    if max_staleness is None:
        return
    if not is_integer(max_staleness):
        what = f"max_staleness must be an integer or None, got {max_staleness!r} ({type(max_staleness).__name__})."
        raise TypeError(format_error(who, what, fix=UNBOUNDED_FIX))
    if max_staleness < 0:
        raise ValueError(
            format_error(who, f"max_staleness must be at least 0, got {max_staleness}.", fix=UNBOUNDED_FIX)
        )
