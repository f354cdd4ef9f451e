"""Count how dense code is: tokens, tokens per line, wide lines, decisions per function, comments and golf idioms.

    density.py shardopt                     one line for the whole tree
    density.py --packages shardopt          one line per package
    density.py --worst 20 shardopt          the functions with the most decisions
    density.py core=shardopt/core optax=../optax/optax    names for several trees

Docstrings, comments and blank lines are not code, and neither are tests that stand in the package (`--tests` counts them
too). It counts; a reader decides.
"""

import argparse
import ast
import io
import pathlib
import re
import tokenize

from code_size import NOT_CODE

TESTS = re.compile(
    r"(^|/)(tests?|testing|_test|conftest)(/|$)|_test\.py$|(^|/)test_[^/]*\.py$|conftest\.py$"
)
GOLF = {
    "sequence times bool": r"\]\s*\*\s*(?!\d|\*|len\b)[a-z_][\w.]*\b(?!\s*\()|\]\s*\*\s*\(.*(==|!=| in | and | or |not )",
    "index by bool": r"\[not |\[: ?1 \+ |\)\[[a-z_.]+ (==|is|in) ",
    "named lambda": r"noqa: E731",
    "walrus": r":=",
    "chained is None else": r" is None else .* is None else |^\s+else .* is None else ",
    "tuple assignment": r"^\s+\w+, \w+(, \w+)* = [^=(]+, [^=]+$",
}


def docstring_lines(tree):
    """Return the line numbers of all string statements."""
    lines = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines |= set(range(node.lineno, node.end_lineno + 1))
    return lines


def decisions(function):
    """Count the places where a function chooses: if, loops, handlers, boolean operators, comprehension filters."""
    count = 0
    for node in ast.walk(function):
        if isinstance(
            node,
            (
                ast.If,
                ast.IfExp,
                ast.For,
                ast.While,
                ast.ExceptHandler,
                ast.comprehension,
                ast.match_case,
            ),
        ):
            count += 1
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def measure(path):
    """Return the counts of one file."""
    source = path.read_text()
    tree = ast.parse(source)
    documented = docstring_lines(tree)
    tokens, code_lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in NOT_CODE or token.start[0] in documented:
            continue
        tokens += 1
        code_lines |= set(range(token.start[0], token.end[0] + 1))
    lines = source.splitlines()
    functions = [
        (decisions(node), node.name, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    code = "\n".join(line for number, line in enumerate(lines, 1) if number not in documented)
    return {
        "files": 1,
        "code lines": len(code_lines),
        "tokens": tokens,
        "wide": sum(len(line) > 100 for line in lines),
        "lines": len(lines),
        "comments": sum(line.strip().startswith("#") for line in lines),
        "golf": sum(len(re.findall(pattern, code, re.M)) for pattern in GOLF.values()),
        "branchy": sum(count >= 15 for count, _, _ in functions),
        "functions": [(count, f"{path}:{line} {name}") for count, name, line in functions],
    }


def total(paths):
    """Add the counts of files."""
    result = {}
    for path in paths:
        for key, value in measure(path).items():
            result[key] = result.get(key, type(value)()) + value
    return result


def row(name, counts):
    """Return one line of the table."""
    return (
        f"{name:28} {counts['files']:5} files {counts['code lines']:7,} code lines {counts['tokens']:8,} tokens "
        f"{counts['tokens'] / max(1, counts['code lines']):5.1f} a line; wide {100 * counts['wide'] / max(1, counts['lines']):4.1f}%; "
        f"comments {1000 * counts['comments'] / max(1, counts['lines']):4.0f} and golf {1000 * counts['golf'] / max(1, counts['lines']):4.1f} in 1,000 lines; "
        f"functions with 15 or more decisions: {counts['branchy']}"
    )


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="+")
    parser.add_argument("--packages", action="store_true")
    parser.add_argument("--worst", type=int, default=0)
    parser.add_argument("--tests", action="store_true")
    arguments = parser.parse_args()
    for tree in arguments.trees:
        name, _, place = tree.rpartition("=")
        root = pathlib.Path(place)
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        if not arguments.tests and root.is_dir():
            files = [path for path in files if not TESTS.search(path.relative_to(root).as_posix())]
        if arguments.packages:
            for package in sorted(
                {
                    path.relative_to(root).parts[0]
                    for path in files
                    if len(path.relative_to(root).parts) > 1
                }
            ):
                print(
                    row(
                        package,
                        total(path for path in files if path.relative_to(root).parts[0] == package),
                    )
                )
        counts = total(files)
        print(row(name or place, counts))
        for count, where in sorted(counts["functions"], reverse=True)[: arguments.worst]:
            print(f"  {count:3} {where}")


if __name__ == "__main__":
    main()
