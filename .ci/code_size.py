"""Print the lines and tokens of code of each package, next to its budget in CONTRIBUTING.md.

Usage: python .ci/code_size.py

Docstrings, comments and blank lines do not count. The exit code is 1 if a package is larger than
its budget.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """The size of some code.

    Attributes:
      lines: the number of lines that hold code.
      tokens: the number of names, operators, numbers and strings.
    """

    lines: int
    tokens: int


def size_of(text: str) -> Size:
    """Return the size of a Python file without its docstrings."""
    docstring_lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring_lines |= _docstring_lines(node.body)
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NOT_CODE
    ]
    tokens = [token for token in tokens if token.start[0] not in docstring_lines]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Size(len(lines), len(tokens))


def _docstring_lines(body: list[ast.stmt]) -> set[int]:
    """Return the lines of the strings that stand alone in a body, as docstrings of it or of the
    names in it.
    """
    strings = [
        statement
        for statement in body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]
    return {
        line
        for string in strings
        for line in range(string.lineno, (string.end_lineno or string.lineno) + 1)
    }


def sizes_of_packages(folder: Path) -> dict[str, Size]:
    """Return package -> its size; the files at the top are "shardopt" together."""
    sizes: dict[str, Size] = {}
    for path in sorted(folder.rglob("*.py")):
        package = path.relative_to(folder).parts[0] if path.parent != folder else folder.name
        size, old = size_of(path.read_text()), sizes.get(package, Size(0, 0))
        sizes[package] = Size(old.lines + size.lines, old.tokens + size.tokens)
    return sizes


def budgets_of(text: str) -> dict[str, int]:
    """Return package -> the most lines of code it may have, from the table in CONTRIBUTING.md."""
    return {
        name: int(lines.replace(",", ""))
        for name, lines in re.findall(r"^\| `(\w+)` +\| +([\d,]+) \|", text, re.MULTILINE)
    }


def main() -> int:
    """Print the table, and return the exit code."""
    sizes, budgets = (
        sizes_of_packages(ROOT / "shardopt"),
        budgets_of((ROOT / "CONTRIBUTING.md").read_text()),
    )
    print(f"{'package':18} {'lines':>7} {'tokens':>8} {'budget':>7}")
    for package, size in sizes.items():
        print(f"{package:18} {size.lines:7,} {size.tokens:8,} {budgets.get(package, 0):7,}")
    total = Size(*map(sum, zip(*sizes.values(), strict=True)))
    print(f"{'all':18} {total.lines:7,} {total.tokens:8,} {sum(budgets.values()):7,}")
    too_large = [package for package, size in sizes.items() if size.lines > budgets.get(package, 0)]
    if too_large:
        print(
            f"over budget: {', '.join(too_large)}. Make the code smaller, or raise the budget and"
            " say why in the commit."
        )
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
