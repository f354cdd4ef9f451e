"""Count what readers stumble over in words and in code, next to the limits in CONTRIBUTING.md.

Usage: python .ci/reading.py

`readable.py` and `density.py` count; they also list the places, worst first. The exit code is 1 if
a count is above its limit.
"""

import re
import subprocess
import sys
from pathlib import Path

from limits import compare

ROOT = Path(__file__).parents[1]
TREES = ("shardopt", "tests")


def output_of(tool: str, *arguments: str) -> str:
    """Return what a tool of this folder prints."""
    command = [sys.executable, str(ROOT / ".ci" / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def counts(tree: str) -> dict[str, float]:
    """Return what is counted in a tree -> its number, as the first column of the table says it."""
    words = output_of("readable.py", "--summary", tree).splitlines()[-1].split()
    lines, vague_names, _, sentences, _, odd_sentences = (int(word) for word in words[1:])
    row = output_of("density.py", "--tests", tree)
    golf = re.search(r"golf +([\d.]+) in", row)[1]
    numbers = {
        "vague names in 1,000 lines": 1000 * vague_names / lines,
        "odd sentences in 100": 100 * odd_sentences / sentences,
        "golf in 1,000 lines": float(golf),
        "functions with 15 or more decisions": float(row.rpartition(": ")[2]),
    }
    return {f"`{tree}`: {name}": round(number, 1) for name, number in numbers.items()}


def main() -> int:
    """Print the table, and return the exit code."""
    numbers = {name: number for tree in TREES for name, number in counts(tree).items()}
    remedy = (
        "`python .ci/readable.py --top 50 TREE` and `python .ci/density.py --worst 50 TREE` list the"
        " places."
    )
    return compare(numbers, "How it reads", remedy)


if __name__ == "__main__":
    sys.exit(main())
