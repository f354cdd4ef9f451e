"""`--failures mtbf=5y,restart=300,save=5`: the text that makes a `so.planning.Failures`."""

import dataclasses
from typing import Any

from shardopt.core._errors import error_text
from shardopt.planning import Failures

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365 * 86400.0}


def parse_failures(text: str) -> Failures:
    """Return the failures in a text of names and numbers; a time is in seconds, or has a unit.

    Raises:
      ValueError: if the text cannot be read, or a number is out of range.

    Example:
      >>> parse_failures("mtbf=5y,restart=5min,save=2,islands=1+4")
      Failures(mtbf=157680000.0, restart=300.0, save=2.0, detect=0.0, replace=0.0, host_chips=8, snapshot=None, wide=0.0, \
islands=(1, 4), exchange=0.0, stall=0.0)
    """
    names = {field.name: field for field in dataclasses.fields(Failures)}
    values: dict[str, Any] = {}
    problems = []
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in names:
            problems.append(f"{part.strip()!r}: there is no {name!r}")
        elif name in values:
            problems.append(f"{part.strip()!r}: {name} is there twice")
        else:
            try:
                values[name] = _value(name, number)
            except (ValueError, KeyError):
                problems.append(f"{part.strip()!r}: {number!r} is no number")
    required = [name for name, field in names.items() if field.default is dataclasses.MISSING]
    problems += [f"{name} is missing" for name in required if name not in values and not problems]
    if problems:
        fix = (
            f"write --failures mtbf=5y,restart=300,save=5; the names are {', '.join(names)}, the"
            f" units {', '.join(UNITS)}."
        )
        raise ValueError(error_text(f"--failures {text} cannot be read.", problems, fix))
    return Failures(**values)


def _value(name: str, number: str) -> float | int | tuple[int, ...]:
    if name == "islands":
        return tuple(int(count) for count in number.split("+"))
    if name == "host_chips":
        return int(number)
    digits = number.rstrip("smindhy")
    return float(digits) * (UNITS[number[len(digits) :]] if digits != number else 1.0)
