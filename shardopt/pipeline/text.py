"""A schedule as text: one line a stage, one column a tick."""

from shardopt.pipeline.ticks import Ticks

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}


def lines(ticks: Ticks) -> list[str]:
    """Return a line of tick numbers and a line a stage; F3 is forward of micro-batch 3, F3.1 that of chunk 1."""
    cells = [["" for _ in range(ticks.num_ticks)] for _ in range(ticks.num_stages)]
    chunk_of = ticks.chunk_of
    for kind, when in ticks.passes.items():
        for v, row in enumerate(when.tolist()):
            chunk = f".{chunk_of[v]}" if ticks.num_chunks > 1 else ""
            for m, tick in enumerate(row):
                cells[ticks.stage_of[v]][tick] += f"{LETTERS[kind]}{m}{chunk}"
    columns = [["tick", *(f"stage {stage}" for stage in range(ticks.num_stages))]]
    columns += [[str(tick), *(row[tick] or "." for row in cells)] for tick in range(ticks.num_ticks)]
    widths = [max(map(len, column)) for column in columns]
    grid = zip(
        *([text.ljust(width) for text in column] for column, width in zip(columns, widths, strict=True)), strict=True
    )
    return ["  ".join(line).rstrip() for line in grid]
