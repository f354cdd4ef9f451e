"""What one chip can do, and the links between chips: published figures, each with its source."""

import dataclasses
from collections.abc import Sequence

import jax

from shardopt.core.errors import format_error

GIB = 2**30
Devices = Sequence[jax.Device]


_ALL = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A chip and its links. Figures are peaks as published; nothing here is measured or tuned.

    Attributes:
      name: as `so.plan` and the command line take it.
      flops: bfloat16 multiplications and additions per second, dense, accumulated in fp32.
      memory_bytes: high-bandwidth memory.
      memory_bandwidth: bytes per second between that memory and the arithmetic units.
      link_bandwidth: bytes per second that a chip sends over the links of *one* axis of its torus, both directions
        together; without a torus, all that it sends into the switch.
      torus_dims: axes of the torus: 2 or 3; 0 for a switch, in which all chips of a node are neighbours.
      pod_chips: chips that the links above can join: a TPU slice, or the GPUs behind one NVLink switch.
      network_bandwidth: bytes per second that a chip sends to chips beyond those.
      source: where the figures come from.
      hides: kinds of collectives that it can move beside inner products: all where a SparseCore or a GPU's copy engines do,
        gathers and permutes where XLA:TPU has no other core for sums.
      clock: cycles per second of a TPU's TensorCore, in which XLA:TPU estimates what an operation takes; None elsewhere.
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    torus_dims: int
    pod_chips: int
    network_bandwidth: float
    source: str
    hides: tuple[str, ...] = _ALL
    clock: float | None = None


def _tpu(
    name: str, tflops: float, gib: float, hbm: float, ici: float, dims: int, pod: int, dcn: float, ghz: float
) -> Hardware:
    """From the words of Google's tables: ICI is of a chip, both directions, in GB/s; DCN of a chip in Gbit/s."""
    return Hardware(
        name=name,
        flops=tflops * 1e12,
        memory_bytes=int(gib * GIB),
        memory_bandwidth=hbm * 1e9,
        # A chip has two links an axis. "Bidirectional" counts what it sends and receives, so half of it is sent.
        link_bandwidth=ici * 1e9 / 2 / dims,
        torus_dims=dims,
        pod_chips=pod,
        network_bandwidth=dcn * 1e9 / 8,
        source=f"docs.cloud.google.com/tpu/docs/{name.removeprefix('tpu') if name != 'tpu7x' else name}",
        hides=("all-gather", "collective-permute") if name in ("v4", "v5e") else _ALL,
        clock=ghz * 1e9,
    )


def _gpu(name: str, tflops: float, gb: float, hbm: float, nvlink: float, network: float, source: str) -> Hardware:
    """From the words of NVIDIA's tables: NVLink is of a GPU, both directions, in GB/s; the network in Gbit/s."""
    return Hardware(
        name, tflops * 1e12, int(gb * 1e9), hbm * 1e12, nvlink * 1e9 / 2, 0, 8, network * 1e9 / 8, f"NVIDIA {source}"
    )


HARDWARE = {
    chip.name: chip
    for chip in (
        _gpu("a100", 312, 80, 2.039, 600, 200, "A100 80GB SXM datasheet; DGX A100: one 200 Gbit/s port a GPU"),
        _gpu("h100", 989.4, 80, 3.35, 900, 400, "H100 SXM datasheet; DGX H100: one 400 Gbit/s port a GPU"),
        _gpu("h200", 989.4, 141, 4.8, 900, 400, "H200 SXM datasheet; DGX H200: one 400 Gbit/s port a GPU"),
        _gpu("b200", 2250, 180, 8.0, 1800, 400, "DGX B200 datasheet, an eighth of it; one 400 Gbit/s port a GPU"),
        _tpu("v4", 275, 32, 1200, 600, 3, 4096, 50, 1.05),
        _tpu("v5e", 197, 16, 819, 400, 2, 256, 25, 1.5),
        _tpu("v5p", 459, 95, 2765, 1200, 3, 6144, 50, 1.75),
        _tpu("v6e", 918, 32, 1638, 800, 2, 256, 100, 1.75),
        _tpu("tpu7x", 2307, 192, 7380, 1200, 3, 9216, 100, 2.2),
    )
}
"""Known chips by name.

The tables of TPU v4 and v5e give no network rate per chip: v5e is 6.4 Tbit/s for a pod of 256; v4 is taken to be as v5p. In v4
the six links of a chip carry 50 GB/s each way (Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer for
Machine Learning", 2023, table 4), at 1.05 GHz. The other clocks are the peak over what the matrix units do in a cycle: 4 of
128 x 128 on v5e, 8 on v4 and v5p; 524,288 flops on v6e, twice that on tpu7x.
"""

_DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}

_ALIASES = {"7x": "tpu7x", "v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e", "v5litepod": "v5e"}


def find_hardware(who: str, name: str | Hardware) -> Hardware:
    """Return the chip of a name; a `Hardware` of one's own is returned as it is.

    Args:
      who: the function that the user called, for messages.
      name: such as "v5p" or "h100", in any case; or a `Hardware`.

    Raises:
      TypeError: if it is neither.
      ValueError: if the name is unknown.

    Example:
      >>> find_hardware("plan", "V5P").memory_bytes == 95 * 2**30
      True
    """
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        fix = "pass a name such as 'v5p', or a so.planning.Hardware."
        raise TypeError(format_error(who, f"hardware must be a name or a Hardware, got {name!r}.", fix=fix))
    short = name.lower().strip()
    short = _ALIASES.get(short, short)
    if short not in HARDWARE:
        fix = f"use one of {', '.join(HARDWARE)}, or describe the chip with so.planning.Hardware."
        raise ValueError(format_error(who, f"unknown hardware {name!r}.", fix=fix))
    return HARDWARE[short]


def hardware_of(devices: Devices) -> Hardware | None:
    """Return what one of these devices can do; None if they are no TPUs that are known here.

    Where a chip shows up as two devices, each has half of its arithmetic, memory and links.
    """
    name = _DEVICE_KINDS.get(getattr(devices[0], "device_kind", "")) if devices else None
    if name is None:
        return None
    places = {(getattr(one, "slice_index", 0), *getattr(one, "coords", (at,))) for at, one in enumerate(devices)}
    chip, share = HARDWARE[name], len(devices) // len(places)
    return dataclasses.replace(
        chip,
        flops=chip.flops / share,
        memory_bytes=chip.memory_bytes // share,
        memory_bandwidth=chip.memory_bandwidth / share,
        link_bandwidth=chip.link_bandwidth / share,
        network_bandwidth=chip.network_bandwidth / share,
    )
