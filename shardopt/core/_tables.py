"""Tables as lines of text."""

from collections.abc import Callable, Sequence


def aligned(
    rows: Sequence[Sequence[str]], is_right: Callable[[int, str], bool] = lambda column, cell: False
) -> list[str]:
    """Return one line per row, with columns of equal width.

    A cell is on the right where `is_right(column, cell)`.

    Example:
      >>> aligned([("leaf", "bytes"), ("w", "8")], lambda column, cell: column > 0)
      ['leaf  bytes', 'w         8']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(column, cell):
        return (cell.rjust if is_right(column, cell) else cell.ljust)(widths[column])

    return [
        "  ".join(pad(column, cell) for column, cell in enumerate(row)).rstrip() for row in rows
    ]


def name_end(name: str) -> str:
    """Return a jax name with at most 60 characters: its end, which is more specific than its
    beginning.
    """
    return name if len(name) <= 60 else f"...{name[-57:]}"
