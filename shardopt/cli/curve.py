"""The loss curve of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path

_BLUE, _ORANGE, _GREY = "#3b6ea8", "#d1495b", "#6b7280"


def draw_curve(metrics: Sequence[dict[str, float]], path: Path) -> None:
    """Draw training and validation loss over the steps into a PNG.

    Args:
      metrics: `{"step": n, "loss": ..., "val_loss": ...}` each, either loss may be missing.
      path: the file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own: pyplot would choose a backend for the whole process.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, label, style in (
        ("loss", "training", {"color": _BLUE, "linewidth": 1.4, "alpha": 0.85}),
        ("val_loss", "validation", {"color": _ORANGE, "linewidth": 1.8, "marker": "o", "markersize": 4}),
    ):
        points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, label=f"{label}, {losses[-1]:.3f} at the end", **style)
    axes.set_xlabel("step", color=_GREY)
    axes.set_ylabel("loss (nats a byte)", color=_GREY)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.tick_params(colors=_GREY, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#d1d5db")
    if axes.lines:
        axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)
