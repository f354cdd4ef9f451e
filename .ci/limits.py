"""Numbers next to their limits, which stand in the tables of CONTRIBUTING.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def limits_of(heading: str) -> dict[str, float]:
    """Return what is counted -> the limit, from the table below a heading of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \|", table, re.MULTILINE)
    return {name: float(limit) for name, limit in rows}


def above_limit(numbers: dict[str, float], limits: dict[str, float]) -> list[str]:
    """Return what is above its limit, or has none."""
    return [name for name, number in numbers.items() if number > limits.get(name, -1)]


def compare(numbers: dict[str, float], heading: str, remedy: str) -> int:
    """Print the numbers next to their limits, and return the exit code.

    Args:
      numbers: what is counted -> its number, as the first column of the table says it.
      heading: the heading of the table in CONTRIBUTING.md.
      remedy: what to do about a number above its limit.
    """
    limits = limits_of(heading)
    for name, number in numbers.items():
        print(f"{name:50} {number:6g} {limits.get(name, -1):6g}")
    above = above_limit(numbers, limits)
    if above:
        print(f"above the limit: {', '.join(above)}. {remedy}")
    return int(bool(above))
