"""The results as a picture: speed and peak memory of each contestant, a row a size.

Run: python -m benchmarks.peers.plot, which draws benchmarks/results/peers.json again.
"""

import json
from pathlib import Path
from typing import Any

_COLOURS = {
    "shardopt": "#3369b2",
    "jax": "#8fa3b8",
    "torch": "#c04a3a",
    "maxtext": "#d9a441",
    "levanter": "#7a9e5f",
}
_LABELS = {
    "shardopt": "shardopt",
    "jax": "jax by hand",
    "torch": "torch 2.13",
    "maxtext": "MaxText",
    "levanter": "Levanter",
}
_STRATEGIES = ("ddp", "zero1", "fsdp")
_GREY = "#6b7280"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw tokens per second and peak memory of a process, two processes on a core each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = [size for size in results["cpu"].values() if "processes" in size]
    if not sizes:
        return
    figure = Figure(figsize=(10, 0.5 + 2.5 * len(sizes)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(sizes), 2, squeeze=False)
    for (speed, memory), size in zip(grid, sizes, strict=True):
        rows, config = size["processes"]["contestants"], size["config"]
        _bars(speed, rows, lambda row: row["tokens_per_second"] / 1e3, "{:.1f}")
        _bars(memory, rows, lambda row: row["peak_bytes"] / 1e6, "{:,.0f}")
        shape = (
            f"width {config['dim']}, {config['num_layers']} layers, batch {config['batch']} x"
            f" {config['length']}"
        )
        speed.set_title(f"{shape}: thousand tokens a second", loc="left", fontsize=10)
        memory.set_title("peak memory of a process, MB", loc="left", fontsize=10)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path)


def _bars(axes: Any, rows: dict[str, Any], value_of: Any, form: str) -> None:
    libraries = [library for library in _LABELS if f"{library} {_STRATEGIES[0]}" in rows]
    for turn, library in enumerate(libraries):
        # not all have all
        known = [i for i, strategy in enumerate(_STRATEGIES) if f"{library} {strategy}" in rows]
        values = [value_of(rows[f"{library} {_STRATEGIES[i]}"]) for i in known]
        share = 0.86 / len(libraries)
        places = [at + share * (turn - (len(libraries) - 1) / 2) for at in known]
        drawn = axes.bar(
            places, values, 0.93 * share, color=_COLOURS[library], label=_LABELS[library]
        )
        axes.bar_label(
            drawn, [form.format(value) for value in values], fontsize=7, color=_GREY, padding=1
        )
    axes.set_xticks(range(len(_STRATEGIES)), _STRATEGIES)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#d1d5db")
    axes.tick_params(colors=_GREY, length=0)
    axes.set_yticks([])


if __name__ == "__main__":
    _RESULTS = Path(__file__).parents[1] / "results" / "peers.json"
    draw(json.loads(_RESULTS.read_text())["results"], _RESULTS.with_suffix(".png"))
