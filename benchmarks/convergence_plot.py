"""The curves of `convergence.py` as a picture: what is lost to exact ddp, by reducer and by
replicas that train apart.

Run: python benchmarks/convergence_plot.py, which draws benchmarks/results/convergence.json again.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

_COLOURS = ("#3b6ea8", "#d1495b", "#3a9d6e", "#b7791f", "#7c5cc4")
_GREY = "#6b7280"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw held-out loss over tokens, the mean over seeds; the control is black in both halves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    rows = dict(results["contenders"])
    control = rows.pop("ddp, exact")
    rows = {
        name: row
        for name, row in rows.items()
        if not name.endswith((", no warm-up", "(momentum 0.9)"))
    }
    tokens = results["tokens"] / results["steps"] / 1e6

    def plot(axes, name, row, **style):
        steps = [step for step, _ in row["curves"][0]]
        losses = np.mean([[loss for _, loss in curve] for curve in row["curves"]], axis=0)
        axes.plot(tokens * np.array(steps), losses, label=name, **style)

    compressed = list(dict.fromkeys(name.rpartition(", ")[0] for name in rows if ", " in name))
    for name, row in rows.items():
        reducer, _, feedback = name.rpartition(", ")
        if reducer:
            colour = _COLOURS[compressed.index(reducer)]
            dashed = feedback == "none"
            label = None if dashed else f"{reducer}, {row['ratio']:.3f}"
            plot(
                left,
                label,
                row,
                color=colour,
                linestyle=":" if dashed else "-",
                linewidth=1.2 if dashed else 1.6,
            )
        else:
            plot(
                right,
                f"{name}, {row['ratio']:.3f}",
                row,
                color=_COLOURS[len(right.lines)],
                linewidth=1.6,
            )
    for axes in (left, right):
        plot(axes, "ddp, exact", control, color="black", linewidth=1.6)
        axes.set_xlabel("million tokens", color=_GREY)
        axes.set_xlim(left=0)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.tick_params(colors=_GREY, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color("#d1d5db")
        axes.legend(frameon=False, loc="upper right", fontsize=9)
    low, high = left.get_ylim()
    left.set_ylim(top=high + 0.4 * (high - low))  # room for the legends
    left.set_ylabel("held-out loss (nats a byte)", color=_GREY)
    left.set_title(
        "compressed gradients: with error feedback, dotted without", fontsize=10, loc="left"
    )
    right.set_title("four replicas apart, H = 50", fontsize=10, loc="left")
    seeds = "1 seed" if results["seeds"] == 1 else f"mean of {results['seeds']} seeds"
    numbers = (
        f"Numbers: loss at the end / that of exact ddp, {seeds}. Unigrams alone reach"
        f" {results['unigrams']:.2f}."
    )
    figure.suptitle(numbers, fontsize=9, color=_GREY)
    figure.savefig(path)


if __name__ == "__main__":
    _RESULTS = Path(__file__).parent / "results" / "convergence.json"
    draw(json.loads(_RESULTS.read_text())["results"], _RESULTS.with_suffix(".png"))
