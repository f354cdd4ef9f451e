"""Print the tokens of code of each package, next to its budget in CONTRIBUTING.md.

Usage: python .ci/code_size.py

Docstrings, comments and blank lines do not count. "loaded" is what the first example of the README
loads: the modules of shardopt in `sys.modules` after it has run, so imports inside functions count.
The exit code is 1 if a package, the whole, or what is loaded is larger than its budget.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
PRINT_FILES = """
import sys
names = [name for name in sys.modules if name.split(".")[0] == "shardopt"]
print("FILES", *[sys.modules[name].__file__ for name in names], sep="\\n")
"""


def tokens_of(text: str) -> int:
    """Return the number of names, operators, numbers and strings, without docstrings."""
    docstring_lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring_lines |= _docstring_lines(node.body)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        token.type not in NOT_CODE and token.start[0] not in docstring_lines for token in tokens
    )


def _docstring_lines(body: list[ast.stmt]) -> set[int]:
    """Return the lines of the strings that stand alone in a body, as docstrings of it or of the
    names in it.
    """
    lines = set()
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def tokens_of_packages(folder: Path) -> dict[str, int]:
    """Return package -> its tokens; the files at the top are "shardopt" together."""
    tokens: dict[str, int] = {}
    for path in sorted(folder.rglob("*.py")):
        package = path.relative_to(folder).parts[0] if path.parent != folder else folder.name
        tokens[package] = tokens.get(package, 0) + tokens_of(path.read_text())
    return tokens


def first_example(readme: str) -> str:
    """Return the first Python block of the README."""
    block = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    return block[1]


def loaded_files(example: str) -> list[Path]:
    """Return the files of shardopt that a program has loaded when it ends."""
    run = subprocess.run(
        [sys.executable, "-c", example + PRINT_FILES],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return [Path(line) for line in run.stdout.partition("FILES\n")[2].splitlines()]


def budgets_of(text: str) -> dict[str, int]:
    """Return package -> the most tokens of code it may have, from the table in CONTRIBUTING.md."""
    rows = re.findall(r"^\| `?([\w ]+)`? +\| +([\d,]+) \|", text, re.MULTILINE)
    return {name.strip(): int(tokens.replace(",", "")) for name, tokens in rows}


def main() -> int:
    """Print the table, and return the exit code."""
    budgets = budgets_of((ROOT / "CONTRIBUTING.md").read_text())
    tokens = tokens_of_packages(ROOT / "shardopt")
    files = loaded_files(first_example((ROOT / "README.md").read_text()))
    tokens["all"] = sum(tokens.values())
    tokens["loaded"] = sum(tokens_of(path.read_text()) for path in files)
    print(f"{'package':18} {'tokens':>8} {'budget':>8}")
    for package, count in tokens.items():
        print(f"{package:18} {count:8,} {budgets.get(package, 0):8,}")
    print(f"The example of the README loads {len(files)} modules.")
    too_large = [package for package, count in tokens.items() if count > budgets.get(package, 0)]
    if too_large:
        print(
            f"over budget: {', '.join(too_large)}. Make the code smaller. A budget may grow if"
            " another one shrinks by as much, or the commit message says which capability came"
            " and why it costs so much."
        )
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
