"""Integers that are refused in the same words everywhere."""

from typing import Any

import numpy as np


def is_integer(value: Any) -> bool:
    """Return whether a value is a Python or numpy integer, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_count(who: str, name: str, value: Any, *, least: int = 1) -> None:
    """Refuse what is not an integer of at least `least`.

    Raises:
      TypeError: if it is of another kind.
      ValueError: if it is below.
    """
    if not is_integer(value):
        raise TypeError(f"{who}: {name} must be an integer, got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{who}: {name} must be at least {least}, got {value}.")
