"""The cost of uneven expert loads: devices of an expert axis wait for the device whose experts got
most tokens.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from shardopt.core._arguments import check_count
from shardopt.core._errors import calling, error_text, format_error
from shardopt.core._figures import FilePath, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Imbalance(NamedTuple):
    """How much longer the products of experts take than with equal numbers of tokens on all
    devices.

    The ratio of a step and layer is the load of the busiest device over the mean load; 1 for equal
    loads.

    Attributes:
      slowdown: mean ratio over steps and layers.
      worst: the largest ratio.
      each: all ratios, [steps, layers].
    """

    slowdown: float
    worst: float
    each: Float[np.ndarray, "S L"]


@calling("expected_imbalance")
def expected_imbalance(tokens: float, *, num_experts: int, top_k: int, devices: int) -> float:
    """Return the expected load of the busiest device over the mean load, if every token chose its
    experts at random.

    Args:
      tokens: N, tokens of all devices of the axis.
      num_experts: E.
      top_k: K, experts of a token.
      devices: X, devices of the axis.

    Raises:
      TypeError: if a count is not an integer.
      ValueError: if a number is not positive, or top_k is above the number of experts.

    Example:
      >>> round(expected_imbalance(8 * 4096, num_experts=64, top_k=8, devices=8), 3)
      1.01

    Note:
      The load of one of X devices has mean m = N K / X. Its variance is N K (1/X) (1 - 1/X) (E - K)
      / (E - 1), because K of E experts are drawn without replacement. The largest of X such loads
      is about m + sigma sqrt(2 ln X). A larger load is caused by the router.
    """
    for name, value in {"num_experts": num_experts, "top_k": top_k, "devices": devices}.items():
        check_count(name, value, minimum=1)
    if tokens <= 0 or top_k > num_experts:
        problem = (
            f"tokens={tokens} must be positive, and top_k={top_k} at most"
            f" num_experts={num_experts}."
        )
        raise ValueError(error_text(problem))
    if devices == 1 or top_k == num_experts:
        return 1.0
    mean = tokens * top_k / devices
    variance = mean * (1 - 1 / devices) * (num_experts - top_k) / (num_experts - 1)
    return 1 + math.sqrt(2 * math.log(devices) * variance) / mean


@calling("tile_overlap")
def tile_overlap(
    tokens: float, *, num_experts: int, top_k: int, devices: int = 1, tile: int = 128
) -> float:
    """Return the expected flops of expert kernels over the flops of their rows.

    1 if no tile is multiplied twice.

    Args:
      tokens: N, tokens in one dispatch of all devices of the axis; with `chunk` it is X times the
        chunk.
      num_experts: E.
      top_k: K, experts of a token.
      devices: X, devices of the axis.
      tile: m, rows of a tile; 128 of `jax.lax.ragged_dot` on v5p, at most 512 of megablox.

    Raises:
      TypeError: if a count is not an integer.
      ValueError: if a number is not positive, or devices do not divide the experts.

    Example:
      >>> round(tile_overlap(4096, num_experts=8, top_k=2), 3)
      1.109

    Note:
      Kernels work on tiles of m rows. A tile that contains the border between two experts is
      multiplied with the weights of both. A device has N K / X rows of E / X experts, and their E /
      X - 1 borders are at random positions:

          1 + (E / X - 1) (m - 1) X / (N K)
    """
    for name, value in {
        "num_experts": num_experts,
        "top_k": top_k,
        "devices": devices,
        "tile": tile,
    }.items():
        check_count(name, value, minimum=1)
    if tokens <= 0 or num_experts % devices:
        problem = (
            f"tokens={tokens} must be positive, and num_experts={num_experts} divisible by"
            f" devices={devices}."
        )
        raise ValueError(error_text(problem))
    return 1 + (num_experts // devices - 1) * (tile - 1) * devices / (tokens * top_k)


@calling("imbalance")
def imbalance(loads: Float[np.ndarray, "S L E"], devices: int, *, replicas: int = 0) -> Imbalance:
    """Return how much recorded expert loads slow down an expert axis, also with copies of the
    busiest experts.

    Args:
      loads: the share or the number of tokens of each expert, [steps, layers, E].
      devices: X, devices of the axis; X divides E.
      replicas: how many copies of other devices' experts each device has room for.

    Raises:
      TypeError: if a count is not an integer.
      ValueError: if loads do not have this shape, or devices do not divide the experts.

    Example:
      >>> import numpy as np
      >>> loads = np.full((10, 1, 8), 0.1) + 0.2 * (np.arange(8) == 3)  # one expert gets three times as much
      >>> even, copied = imbalance(loads, 4), imbalance(loads, 4, replicas=1)
      >>> round(even.slowdown, 2), bool(copied.slowdown < even.slowdown)
      (1.6, True)

    Note:
      Device i holds experts i E/X, ..., (i+1) E/X - 1, as in `so.nn.mixture_of_experts`. A layer is
      finished when its busiest device is finished. Copies are a simulation:
      `so.nn.mixture_of_experts` has none. In each step the experts with most tokens in the step
      before are copied, one after another. Each copy goes to the device with the least load that
      has room. Copies of an expert share its tokens equally.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.4: redundant experts, at
      inference.
    """
    check_count("devices", devices, minimum=1)
    check_count("replicas", replicas, minimum=0)
    loads = np.asarray(loads, float)
    if loads.ndim != 3 or loads.shape[2] % devices or not loads.size:
        problem = (
            f"loads must be [steps, layers, experts] with experts divisible by devices={devices},"
            f" got {loads.shape}."
        )
        raise ValueError(format_error("imbalance", problem, fix="choose a divisor of the experts."))
    slowdowns = np.empty(loads.shape[:2])
    for layer in range(loads.shape[1]):
        for step in range(loads.shape[0]):
            expert_devices = _place_copies(
                loads[max(step - 1, 0), layer], devices, replicas if step else 0
            )
            slowdowns[step, layer] = _slowdown(loads[step, layer], expert_devices, devices)
    return Imbalance(float(slowdowns.mean()), float(slowdowns.max()), slowdowns)


def _place_copies(loads: np.ndarray, devices: int, replicas: int) -> list[list[int]]:
    """Return the devices that hold each expert: first its own device, then the devices of its
    copies.
    """
    expert_devices = [[expert * devices // len(loads)] for expert in range(len(loads))]
    room = [replicas] * devices
    for _ in range(replicas * devices):
        shares = [load / len(holders) for load, holders in zip(loads, expert_devices, strict=True)]
        device_loads = _device_loads(loads, expert_devices, devices)
        for expert in sorted(range(len(loads)), key=lambda i: -shares[i]):
            candidates = [i for i in range(devices) if room[i] and i not in expert_devices[expert]]
            if candidates:
                target = min(candidates, key=lambda i: device_loads[i])
                expert_devices[expert].append(target)
                room[target] -= 1
                break
    return expert_devices


def _device_loads(loads: np.ndarray, expert_devices: list[list[int]], devices: int) -> np.ndarray:
    device_loads = np.zeros(devices)
    for load, holders in zip(loads, expert_devices, strict=True):
        device_loads[holders] += load / len(holders)
    return device_loads


def _slowdown(loads: np.ndarray, expert_devices: list[list[int]], devices: int) -> float:
    total = loads.sum()
    return (
        float(_device_loads(loads, expert_devices, devices).max() * devices / total)
        if total
        else 1.0
    )


@calling("plot_expert_loads")
def plot_expert_loads(
    loads: Float[np.ndarray, "S L E"], *, devices: int | None = None, path: FilePath = None
) -> "Figure":
    """Draw the loads of experts over time: one panel per layer, one line per expert, white for an
    equal share.

    Args:
      loads: as for `imbalance`.
      devices: devices of an expert axis; lines separate their experts. None draws no lines.
      path: file to save the picture to; the suffix chooses the format, PNG without one.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: if loads are not [steps, layers, experts].
    """
    loads = np.asarray(loads, float)
    if loads.ndim != 3 or not loads.size:
        problem = f"loads must be [steps, layers, experts], got {loads.shape}."
        raise ValueError(format_error("plot_expert_loads", problem))
    steps, layers, experts = loads.shape
    relative = loads * experts / np.maximum(loads.sum(axis=2, keepdims=True), 1e-30)
    figure = new_figure(9, 1.0 + 1.1 * layers)
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    images = []
    for layer, axes in enumerate(panels):
        image = axes.imshow(
            relative[:, layer].T, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest",
            extent=(0.5, steps + 0.5, experts - 0.5, -0.5),
        )  # fmt: skip
        images.append(image)
        axes.set_ylabel(f"layer {layer}", fontsize=8)
        axes.tick_params(labelsize=7)
        for edge in range(1, 0 if devices is None else devices):
            axes.axhline(edge * experts / devices - 0.5, color="#555555", linewidth=0.6)
    panels[-1].set_xlabel("step", fontsize=8)
    colorbar = figure.colorbar(images[0], ax=list(panels), shrink=min(1.0, 2 / layers), pad=0.01)
    colorbar.set_label("load, of an even share", fontsize=8)
    colorbar.ax.tick_params(labelsize=7)
    return saved(figure, path)
