"""Show where code and prose are hard to read: a reminder, not a limit.

Usage: readable.py [PATH ...] [--base COMMIT] [--top N] [--summary]

PATHs are files or folders (default: shardopt docs README.md). With --base only lines that were added since COMMIT count.
It lists, worst first:
  names      variables and parameters that say nothing about what they hold (`found`, `one`, `rest`, ...)
  functions  with more than 7 parameters, more than 60 lines of code, or more than 3 functions inside
  sentences  of more than 30 words, and words that readers stumble over, in docstrings, comments and Markdown
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

VAGUE_WORDS = """
one ones found some rest given kept own owned theirs others here there left right_one made told asked whole apart
what which who where again much little most more least things thing stuff it that this former latter
"""
VAGUE = set(VAGUE_WORDS.split())
ODD = {
    r"\banew\b": "again",
    r"\bdear(er|est)?\b": "expensive",
    r"\bbeside\b": "next to, compared with",
    r"\bthereof\b|\btherein\b|\bwhereof\b": "of it, in it",
    r"\bthat of (the|a|an|one|what|which)\b": "repeat the noun",
    r"\bthose (of|that|which)\b": "repeat the noun",
    r"\bof which\b|\bin which\b|\bto which\b": "two sentences",
    r"\bwhat (is|was|are|were|it|they|a|an|the|each|no|must|may|has|have|comes|goes|waits|belongs)\b": "name the thing",
    r"\bnothing says\b|\bis said\b|\bare said\b|\bis told\b": "say who does it",
    r"\bso as\b|\bas it were\b|\bas long as it takes\b": "plainer",
    r"^(Gathered|Kept|Sent|Left|Given|Said|Made|Held|Refused|Beside|Of|Only of|Where|Whose)\b": "begin with the subject",
}
ODD = {
    re.compile(pattern, re.IGNORECASE if not pattern.startswith("^") else 0): hint
    for pattern, hint in ODD.items()
}


def added_lines(base: str) -> dict[str, set[int]]:
    """Return file -> numbers of the lines added since a commit."""
    text = subprocess.run(
        ["git", "diff", "--unified=0", "--no-color", base],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines: dict[str, set[int]] = {}
    path = None
    for line in text.splitlines():
        if line.startswith("+++ "):
            path = line[6:] if line.startswith("+++ b/") else None
        elif path and (match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)):
            start, count = int(match[1]), int(match[2] or 1)
            lines.setdefault(path, set()).update(range(start, start + count))
    return lines


def sentences(text: str) -> list[str]:
    """Split prose into sentences, leaving out code, tables and lists of arguments' names."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n\s*[-*|>]\s?|\n\s*\w+(?: \([^)]*\))?:\s", text)
    found = []
    for paragraph in paragraphs:
        if ">>>" in paragraph or paragraph.lstrip().startswith(("|", "#", "References:")):
            continue
        paragraph = re.sub(r"`[^`]*`", "CODE", " ".join(paragraph.split()))
        found += [s for s in re.split(r"(?<=[.!?:;])\s+(?=[A-Z])", paragraph) if len(s.split()) > 2]
    return found


def prose_of(path: Path, text: str) -> list[tuple[int, str]]:
    """Return (line, text) of docstrings and comments of a Python file, or of a Markdown file by paragraph."""
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
        line, blocks = 1, []
        for block in re.split(r"(\n\s*\n)", text):
            if not re.match(r"\s*(<!--[^\n]*-->\s*)?\|", block):
                blocks.append((line, block))
            line += block.count("\n")
        return blocks
    tree = ast.parse(text)
    blocks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and node.body:
                blocks.append((node.body[0].lineno, doc))
    comment: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(
            ("# noqa", "# type", "# fmt", "# pyright")
        ):
            if not comment:
                start = token.start[0]
            comment.append(token.string.lstrip("# "))
        elif (
            token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            and comment
        ):
            blocks.append((start, " ".join(comment)))
            comment = []
    return blocks


def bound_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, name) of each variable and parameter; a name bound in a comprehension of one line does not count."""
    names = []
    inside = {
        id(x)
        for node in ast.walk(tree)
        if isinstance(node, ast.comprehension)
        for x in ast.walk(node.target)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and id(node) not in inside
        ):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
    return names


def code_lines(node: ast.FunctionDef) -> int:
    """Return how many lines a function has, without its signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=["shardopt", "docs", "README.md"])
    parser.add_argument("--base", help="count only lines added since this commit")
    parser.add_argument("--top", type=int, default=12, help="how many of each to list")
    parser.add_argument("--summary", action="store_true", help="a line of totals a folder, no list")
    options = parser.parse_args()
    added = added_lines(options.base) if options.base else None
    files: list[Path] = []
    for path in map(Path, options.paths):
        files += [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
    totals: dict[str, Counter[str]] = {}
    vague: Counter[str] = Counter()
    where: dict[str, str] = {}
    functions, long_ones, odd_ones = [], [], []
    for path in files:
        wanted = None if added is None else added.get(path.as_posix(), set())
        if wanted is not None and not wanted:
            continue
        text = path.read_text()
        total = totals.setdefault(
            "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0], Counter()
        )
        total["lines"] += text.count("\n") if wanted is None else len(wanted)
        if path.suffix == ".py":
            tree = ast.parse(text)
            for line, name in bound_names(tree):
                if name in VAGUE and (wanted is None or line in wanted):
                    vague[name] += 1
                    where.setdefault(name, f"{path}:{line}")
                    total["vague names"] += 1
            for node in ast.walk(tree):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if wanted is not None and not wanted & set(range(node.lineno, node.end_lineno + 1)):
                    continue
                params = (
                    len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
                )
                inner = sum(isinstance(x, ast.FunctionDef) for x in ast.walk(node)) - 1
                lines = code_lines(node)
                if params > 7 or inner > 3 or lines > 60:
                    weight = max(params / 7, inner / 3, lines / 60)
                    functions.append(
                        (
                            weight,
                            f"{path}:{node.lineno} {node.name}: {params} parameters, {lines} lines, {inner} functions inside",
                        )
                    )
                    total["large functions"] += 1
        for line, block in prose_of(path, text):
            span = range(line, line + block.count("\n") + 1)
            if wanted is not None and not wanted & set(span):
                continue
            for sentence in sentences(block):
                total["sentences"] += 1
                words = len(sentence.split())
                if words > 30:
                    long_ones.append((words, f"{path}:{line} ({words} words) {sentence[:150]}..."))
                    total["long sentences"] += 1
                for pattern, hint in ODD.items():
                    if match := pattern.search(sentence):
                        odd_ones.append(
                            (1, f"{path}:{line} '{match[0]}' ({hint}): {sentence[:130]}")
                        )
                        total["odd sentences"] += 1
                        break
    print(
        f"{'folder':28} {'lines':>7} {'vague names':>12} {'large functions':>16} {'sentences':>10} {'long':>6} {'odd':>6}"
    )
    for folder, total in [*sorted(totals.items()), ("all", sum(totals.values(), Counter()))]:
        print(
            f"{folder:28} {total['lines']:7} {total['vague names']:12} {total['large functions']:16}"
            f" {total['sentences']:10} {total['long sentences']:6} {total['odd sentences']:6}"
        )
    if options.summary:
        return
    if vague:
        print("\nnames that say nothing of what they hold (how often, first place):")
        for name, count in vague.most_common(options.top):
            print(f"  {name} {count}  {where[name]}")
    for title, rows in (
        ("large functions", functions),
        ("long sentences", long_ones),
        ("sentences to begin with their subject, and nouns to repeat", odd_ones),
    ):
        if rows:
            print(f"\n{title}:")
            for _, row in sorted(rows, key=lambda row: -row[0])[: options.top]:
                print(f"  {row}")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
