"""Plots: memory and traffic of plans, the timeline of a compiled step, and the placement of leaves
on a mesh.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardopt.core._errors import calling, error_text, plural
from shardopt.core._extras import require
from shardopt.core._figures import FilePath, new_figure, saved
from shardopt.core._types import PyTree
from shardopt.mesh import spec_axes
from shardopt.step._optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardopt.planning._compiled_time import StepSeconds
    from shardopt.planning._search import Prediction

_MEMORY = {
    "params": ("parameters", "#33608c"),
    "opt_state": ("optimizer state", "#6e94b8"),
    "gradients": ("gradients", "#b3882f"),
    "activations": ("activations", "#218c6b"),
    "gathered": ("gathered weights", "#8fbfae"),
    "working": ("working", "#c3c8d0"),
}
_AXES = {
    "tensor": "#a34d7c",
    "pipeline": "#218c6b",
    "context": "#5aa0a6",
    "expert": "#8c6bb1",
    "data": "#33608c",
    "replica": "#b3882f",
}
_INK, _LINE = "#22272e", "#9aa2ad"
_MAX_BARS, _MAX_BOXES = 40, 64


@calling("plot")
def plot_plans(
    predictions: Sequence["Prediction"], limit: float, path: FilePath = None
) -> "Figure":
    """Draw memory and traffic next to each other; see `Plans.plot`."""
    require("matplotlib", extra="plot")
    if not 1 <= len(predictions) <= _MAX_BARS:
        problem = f"there are {len(predictions)} predictions to draw."
        raise ValueError(
            error_text(problem, fix=f"pass between 1 and {_MAX_BARS}, such as plans.ranked[:10].")
        )
    figure = new_figure(12.8, 1.7 + 0.38 * len(predictions))
    memory, traffic = figure.subplots(1, 2)
    _memory(memory, predictions, limit)
    _traffic(traffic, predictions)
    traffic.set_yticklabels([])
    return saved(figure, path)


def _memory(axes: "Axes", predictions: Sequence["Prediction"], limit: float) -> None:
    gigabytes = {
        name: [getattr(prediction.memory, name) / 1e9 for prediction in predictions]
        for name in _MEMORY
    }
    bars = [(*_MEMORY[name], gigabytes[name]) for name in _MEMORY]
    axes.axvline(limit / 1e9, color=_INK, linewidth=1, linestyle=(0, (4, 2)), label="may be used")
    _bars(axes, predictions, bars, "GB per device")


def _traffic(axes: "Axes", predictions: Sequence["Prediction"]) -> None:
    sent_bytes = [prediction.wire_bytes for prediction in predictions]
    axis_names = [axis for axis in _AXES if any(axis in row for row in sent_bytes)]
    bars = [
        (f"over {axis}", _AXES[axis], [row.get(axis, 0.0) / 1e9 for row in sent_bytes])
        for axis in axis_names
    ]
    _bars(axes, predictions, bars, "GB sent per device and step")


def _bars(
    axes: "Axes",
    predictions: Sequence["Prediction"],
    bars: list[tuple[str, str, list[float]]],
    label: str,
) -> None:
    """Draw one row per prediction, with (name, colour, lengths) bars next to each other."""
    starts = [0.0] * len(predictions)
    for name, color, values in bars:
        axes.barh(range(len(values)), values, left=starts, height=0.7, color=color, label=name)
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    _style(axes, [str(prediction.layout) for prediction in predictions], label)


def _style(axes: "Axes", rows: list[str], label: str) -> None:
    """Name the rows, from top to bottom, and the horizontal axis."""
    axes.set_xlabel(label, color=_INK)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8)


@calling("plot")
def plot_step(step: "StepSeconds", path: FilePath = None) -> "Figure":
    """Draw the timeline of a compiled step; see `StepSeconds.plot`."""
    if step.total is None:
        fix = "compile for a TPU, such as with so.planning.aot."
        raise ValueError(error_text(f"there is no timeline: {step.reason}", fix=fix))
    core = {"compute": "#33608c", "exposed": "#c0392b"}
    transfers = sorted({span.where for span in step.spans} - core.keys())
    rows = dict.fromkeys(core, 0) | {name: row for row, name in enumerate(transfers, 1)}
    figure = new_figure(11, 1.5 + 0.5 * (1 + len(transfers)))
    axes = figure.add_subplot()
    for name, row in rows.items():
        bars = [
            (span.start * 1e3, (span.end - span.start) * 1e3)
            for span in step.spans
            if span.where == name
        ]
        color = core.get(name, _AXES.get(name, _LINE))
        axes.broken_barh(
            bars, (row - 0.4, 0.8), facecolor=color, label=name if name in core else None
        )
    labels = ["TensorCore", *(f"over {name}" for name in transfers)]
    axes.set_xlim(0, step.total * 1e3 or 1)
    _style(axes, labels, "ms, estimated")
    return saved(figure, path)


@calling("plot_placement")
def plot_placement(
    opt: ShardedOptimizer, abstract_params: PyTree = None, *, path: FilePath = None
) -> "Figure":
    """Draw the placement of each parameter leaf on the mesh: one row per leaf, one strip per axis
    that shards it.

    The boxes of the last strip are the shards. A grey row is replicated on every device. The text
    next to a row says how many devices hold each shard. At most 64 boxes are drawn.

    Args:
      opt: a strategy from `so.ddp`, `so.zero`, `so.fsdp` or `so.hybrid`.
      abstract_params: shapes of the parameters; by default the last parameters that the strategy
        has seen.
      path: file to save the picture to.

    Returns:
      A matplotlib figure.
    """
    rows = (
        opt.config.report() if abstract_params is None else opt.config.report(abstract_params)
    ).rows
    shape = dict(opt.mesh.shape)
    figure = new_figure(10, 1.2 + 0.36 * len(rows))
    axes = figure.add_subplot()
    for i, row in enumerate(rows):
        names = spec_axes(row.params)
        num_shards = _strips(axes, i, [(name, shape[name]) for name in names])
        num_copies = opt.mesh.size // num_shards
        devices, sharding = (
            plural(num_copies, "device"),
            " x ".join(f"{name}={shape[name]}" for name in names),
        )
        text = f"replicated: {row.bytes_per_device:,} bytes on each of {devices}"
        if names:
            text = (
                f"{sharding}: {plural(num_shards, 'shard')} of {row.bytes_per_device:,} bytes, each"
                f" on {devices}"
            )
        axes.text(1.01, i, text, va="center", fontsize=7, color=_INK)
    axes.set_yticks(
        range(len(rows)), [f"{row.path} {list(row.shape)}" for row in rows], fontsize=7, color=_INK
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.6)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    mesh = " x ".join(f"{name}={size}" for name, size in shape.items() if size > 1) or "one device"
    axes.set_title(f"parameters on {mesh}", loc="left", fontsize=9, color=_INK)
    return saved(figure, path)


def _strips(axes: "Axes", row: int, sharding: list[tuple[str, int]]) -> int:
    """Draw one strip per axis that shards a leaf, and return the number of shards.

    Each strip cuts the boxes of the strip above it.
    """
    height, num_shards = 0.72 / max(len(sharding), 1), 1
    if not sharding:
        axes.broken_barh([(0, 1)], (row - 0.36, 0.72), facecolor=_LINE)
    for i, (name, size) in enumerate(sharding):
        num_shards *= size
        num_boxes = min(num_shards, _MAX_BOXES)
        boxes = [(box / num_boxes, 1 / num_boxes) for box in range(num_boxes)]
        vertical_range = (row - 0.36 + i * height, height)
        axes.broken_barh(
            boxes, vertical_range, facecolor=_AXES[name], edgecolor="white", linewidth=0.8
        )
    return num_shards
