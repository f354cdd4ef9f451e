"""What uneven loads of experts cost: devices of an expert axis wait for the one whose experts got most tokens."""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.core.extras import require
from shardopt.planning.plots import Path, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Imbalance(NamedTuple):
    """How much longer the products of experts take than if every device got as many tokens.

    Attributes:
      slowdown: mean over steps and layers of the load of the busiest device over the mean load; 1 where they are equal.
      worst: the largest of these.
      each: [steps, layers], all of them.
    """

    slowdown: float
    worst: float
    each: Float[np.ndarray, "S L"]


def expected_imbalance(tokens: float, *, num_experts: int, top_k: int, devices: int) -> float:
    """Return the expected load of the busiest device over the mean, if every token chose its experts by chance.

    The load of one of X devices then has mean m = N K / X and variance N K (1/X) (1 - 1/X) (E - K) / (E - 1), as K of E are
    drawn without replacement; the largest of X such is about m + sigma sqrt(2 ln X). What is above that is the router's.

    Args:
      tokens: N, of all devices of the axis.
      num_experts: E.
      top_k: K.
      devices: X.

    Raises:
      TypeError: if a count is not an integer.
      ValueError: if a number is not positive, or top_k above the experts.

    Example:
      >>> round(expected_imbalance(8 * 4096, num_experts=64, top_k=8, devices=8), 3)
      1.01
    """
    who = "expected_imbalance"
    for name, value in {"num_experts": num_experts, "top_k": top_k, "devices": devices}.items():
        check_count(who, name, value, least=1)
    if tokens <= 0 or top_k > num_experts:
        what = f"tokens={tokens} must be positive, and top_k={top_k} at most num_experts={num_experts}."
        raise ValueError(format_error(who, what))
    if devices == 1 or top_k == num_experts:
        return 1.0
    mean = tokens * top_k / devices
    variance = mean * (1 - 1 / devices) * (num_experts - top_k) / (num_experts - 1)
    return 1 + math.sqrt(2 * math.log(devices) * variance) / mean


def tile_overlap(tokens: float, *, num_experts: int, top_k: int, devices: int = 1, tile: int = 128) -> float:
    """Return the expected flops of the kernels of experts over those of their rows: 1 where no tile is multiplied twice.

    Kernels take tiles of m rows, and one in which an expert ends and another begins is multiplied with the weights of both. On a
    device are N K / X rows of E / X experts, whose E / X - 1 bounds are multiples of m by chance alone:

        1 + (E / X - 1) (m - 1) X / (N K)

    Args:
      tokens: N, of all devices of the axis, that are dispatched at a time: with `chunk` X times that.
      num_experts: E.
      top_k: K.
      devices: X.
      tile: m; 128 of `jax.lax.ragged_dot` on v5p, at most 512 of megablox.

    Raises:
      TypeError: if a count is not an integer.
      ValueError: if a number is not positive, or devices do not divide the experts.

    Example:
      >>> round(tile_overlap(4096, num_experts=8, top_k=2), 3)
      1.109
    """
    who = "tile_overlap"
    for name, value in {"num_experts": num_experts, "top_k": top_k, "devices": devices, "tile": tile}.items():
        check_count(who, name, value, least=1)
    if tokens <= 0 or num_experts % devices:
        what = f"tokens={tokens} must be positive, and num_experts={num_experts} divisible by devices={devices}."
        raise ValueError(format_error(who, what))
    return 1 + (num_experts // devices - 1) * (tile - 1) * devices / (tokens * top_k)


def imbalance(loads: Float[np.ndarray, "S L E"], devices: int, *, replicas: int = 0) -> Imbalance:
    """Return what a trace of loads costs on an expert axis, also if the hottest experts had copies on other devices.

    Device i holds experts i E/X, ..., (i+1) E/X - 1, as `so.nn.mixture_of_experts` has them, and a layer is done when its
    busiest device is. With `replicas` each device has room for so many copies of experts besides. Each step they are the
    hottest experts of the step before, one after another put on the device with least load that has room, and tokens are shared
    equally among copies. A simulation: `so.nn.mixture_of_experts` has no copies.

    Args:
      loads: [steps, layers, E], the share of tokens of each expert, or their number.
      devices: X, which divides E.
      replicas: copies that each device has room for.

    Raises:
      TypeError: if a count is not an integer.
      ValueError: if loads are not of such a shape, or devices do not divide the experts.

    Example:
      >>> import numpy as np
      >>> loads = np.full((10, 1, 8), 0.1) + 0.2 * (np.arange(8) == 3)  # one expert gets three times as much
      >>> even, copied = imbalance(loads, 4), imbalance(loads, 4, replicas=1)
      >>> round(even.slowdown, 2), bool(copied.slowdown < even.slowdown)
      (1.6, True)

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.4: redundant experts, at inference.
    """
    check_count("imbalance", "devices", devices, least=1)
    check_count("imbalance", "replicas", replicas, least=0)
    loads = np.asarray(loads, float)
    if loads.ndim != 3 or loads.shape[2] % devices or not loads.size:
        what = f"loads must be [steps, layers, experts] with experts divisible by devices={devices}, got {loads.shape}."
        raise ValueError(format_error("imbalance", what, fix="choose a divisor of the experts."))
    each = np.empty(loads.shape[:2])
    for layer in range(loads.shape[1]):
        for step in range(loads.shape[0]):
            held = _copies(loads[max(step - 1, 0), layer], devices, replicas if step else 0)
            each[step, layer] = _busiest(loads[step, layer], held, devices)
    return Imbalance(float(each.mean()), float(each.max()), each)


def _copies(known: np.ndarray, devices: int, replicas: int) -> list[list[int]]:
    """Return the devices that hold each expert, the first of which is its home."""
    held = [[expert * devices // len(known)] for expert in range(len(known))]
    room = [replicas] * devices
    for _ in range(replicas * devices):
        shares = [load / len(where) for load, where in zip(known, held, strict=True)]
        busy = _per_device(known, held, devices)
        for expert in sorted(range(len(known)), key=lambda i: -shares[i]):
            free = [i for i in range(devices) if room[i] and i not in held[expert]]
            if free:
                to = min(free, key=lambda i: busy[i])
                held[expert].append(to)
                room[to] -= 1
                break
    return held


def _per_device(load: np.ndarray, held: list[list[int]], devices: int) -> np.ndarray:
    busy = np.zeros(devices)
    for one, where in zip(load, held, strict=True):
        busy[where] += one / len(where)
    return busy


def _busiest(load: np.ndarray, held: list[list[int]], devices: int) -> float:
    total = load.sum()
    return float(_per_device(load, held, devices).max() * devices / total) if total else 1.0


def plot_expert_loads(loads: Float[np.ndarray, "S L E"], *, devices: int | None = None, path: Path = None) -> "Figure":
    """Draw the loads of experts over time: of each layer a strip, an expert a line of it, white where it has its even share.

    Args:
      loads: as for `imbalance`.
      devices: to draw lines between the experts of different devices of an expert axis; None for none.
      path: where to save the picture; the suffix chooses the format, PNG without one.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: if loads are not [steps, layers, experts].
    """
    require("matplotlib", extra="plot", who="plot_expert_loads")
    from matplotlib.figure import Figure

    loads = np.asarray(loads, float)
    if loads.ndim != 3 or not loads.size:
        what = f"loads must be [steps, layers, experts], got {loads.shape}."
        raise ValueError(format_error("plot_expert_loads", what))
    steps, layers, experts = loads.shape
    relative = loads * experts / np.maximum(loads.sum(axis=2, keepdims=True), 1e-30)
    figure = Figure(figsize=(9, 1.0 + 1.1 * layers), dpi=160, layout="constrained")
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    images = []
    for layer, axes in enumerate(panels):
        drawn = axes.imshow(
            relative[:, layer].T, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest",
            extent=(0.5, steps + 0.5, experts - 0.5, -0.5),
        )  # fmt: skip
        images.append(drawn)
        axes.set_ylabel(f"layer {layer}", fontsize=8)
        axes.tick_params(labelsize=7)
        for edge in range(1, 0 if devices is None else devices):
            axes.axhline(edge * experts / devices - 0.5, color="#555555", linewidth=0.6)
    panels[-1].set_xlabel("step", fontsize=8)
    bar = figure.colorbar(images[0], ax=list(panels), shrink=min(1.0, 2 / layers), pad=0.01)
    bar.set_label("load, of an even share", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return saved(figure, path)
