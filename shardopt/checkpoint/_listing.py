"""Leaves of checkpoints in messages: one line each, or one for a container."""

import sys

import jax

from shardopt.checkpoint._store import StoredLeaves
from shardopt.checkpoint._tree import LeafPath, show
from shardopt.core import error_text, plural


def tell(text: str) -> None:
    """Print a message about restoring on standard error, on process 0."""
    if jax.process_index() == 0:
        print(error_text(text), file=sys.stderr, flush=True)


def listing(
    leaves: StoredLeaves, other_leaves: StoredLeaves, verdict: str, max_lines: int
) -> list[str]:
    """Return one line per leaf, or one per container if these are more than `max_lines`.

    A container is listed only if the other side has no leaf in it. The containers grow until the
    lines are few enough.
    """
    known_paths = {path[:length] for path in other_leaves for length in range(len(path) + 1)}
    lines: list[str] = []
    for depth in range(max(map(len, leaves), default=0), -1, -1):
        groups: dict[LeafPath, list[LeafPath]] = {}
        for path in leaves:
            groups.setdefault(path[: _first_unknown(path, known_paths) + depth], []).append(path)
        lines = [
            (
                f"{show(group_paths[0])}: {leaves[group_paths[0]]}, {verdict}"
                if len(group_paths) == 1
                else f"{show(group)}: {plural(len(group_paths), 'leaf')} {verdict}"
            )
            for group, group_paths in groups.items()
        ]
        if len(lines) <= max_lines:
            break
    return lines


def _first_unknown(path: LeafPath, known_paths: set[LeafPath]) -> int:
    # The full path always counts as unknown: the other side may have a container there, but not a
    # leaf.
    return next(
        (length for length in range(1, len(path)) if path[:length] not in known_paths), len(path)
    )
