"""Peak rates of chips and of the links between them: published figures, each with its source."""

import dataclasses

from shardopt.core._errors import error_text
from shardopt.core._types import Devices

GIB = 2**30


_ALL = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A chip and its links. All figures are published peaks; none is measured or tuned.

    Attributes:
      name: the name for `so.plan` and the command line.
      flops: bfloat16 multiplications and additions per second, dense, accumulated in fp32.
      memory_bytes: bytes of high-bandwidth memory.
      memory_bandwidth: bytes per second between that memory and the arithmetic units.
      link_bandwidth: bytes per second that a chip sends over the links of *one* axis of its torus,
        both directions together. Without a torus, bytes per second that it sends into the switch.
      torus_dims: axes of the torus: 2 or 3; 0 for a switch, which makes all chips of a node
        neighbours.
      pod_chips: chips that these links can join: a TPU slice, or the GPUs behind one NVLink switch.
      network_bandwidth: bytes per second that a chip sends to chips outside its pod or node.
      source: source of the figures.
      hides: kinds of collectives that overlap with inner products: all kinds on chips with a
        SparseCore or copy engines, gathers and permutes on TPUs that compute sums on the
        TensorCore.
      clock: cycles per second of a TPU's TensorCore, the unit of XLA:TPU's estimates; None for
        other chips.
      cores: TensorCores that one device joins: 2 on v4 (megacore) and v5p. A tpu7x shows its two as
        two devices.
      devices: devices that jax sees for a chip: 2 on tpu7x, else 1. A mesh of 8 chips of tpu7x has
        16 devices.
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
    cores: int = 1
    devices: int = 1

    def per_device(self, devices: int | None = None) -> "Hardware":
        """Return the rates of one device.

        `devices` of them share a chip's arithmetic, memory and links.

        Args:
          devices: by default `self.devices`.
        """
        count = self.devices if devices is None else devices
        return dataclasses.replace(
            self,
            flops=self.flops / count,
            memory_bytes=self.memory_bytes // count,
            memory_bandwidth=self.memory_bandwidth / count,
            link_bandwidth=self.link_bandwidth / count,
            pod_chips=self.pod_chips * count,
            network_bandwidth=self.network_bandwidth / count,
            cores=max(self.cores // count, 1),
            devices=1,
        )


def _tpu(
    name: str,
    tflops: float,
    gib: float,
    hbm: float,
    ici: float,
    dims: int,
    pod: int,
    dcn: float,
    ghz: float,
) -> Hardware:
    """Convert the units of Google's tables: `ici` is GB/s per chip in both directions, `dcn` is
    Gbit/s per chip.
    """
    return Hardware(
        name=name,
        flops=tflops * 1e12,
        memory_bytes=int(gib * GIB),
        memory_bandwidth=hbm * 1e9,
        # A chip has two links per axis. "Bidirectional" rates add sending and receiving, so half of
        # it is sent.
        link_bandwidth=ici * 1e9 / 2 / dims,
        torus_dims=dims,
        pod_chips=pod,
        network_bandwidth=dcn * 1e9 / 8,
        source=f"docs.cloud.google.com/tpu/docs/{name}",
        hides=("all-gather", "collective-permute") if name in ("v4", "v5e") else _ALL,
        clock=ghz * 1e9,
        cores=2 if name in ("v4", "v5p") else 1,
        devices=2 if name == "tpu7x" else 1,
    )


def _gpu(
    name: str, tflops: float, gb: float, hbm: float, nvlink: float, network: float, source: str
) -> Hardware:
    """Convert the units of NVIDIA's tables: `nvlink` is GB/s per GPU in both directions, `network`
    is Gbit/s.
    """
    return Hardware(
        name,
        tflops * 1e12,
        int(gb * 1e9),
        hbm * 1e12,
        nvlink * 1e9 / 2,
        0,
        8,
        network * 1e9 / 8,
        f"NVIDIA {source}",
    )


HARDWARE = {
    chip.name: chip
    for chip in (
        _gpu(
            "a100",
            312,
            80,
            2.039,
            600,
            200,
            "A100 80GB SXM datasheet; DGX A100: one 200 Gbit/s port a GPU",
        ),
        _gpu(
            "h100",
            989.4,
            80,
            3.35,
            900,
            400,
            "H100 SXM datasheet; DGX H100: one 400 Gbit/s port a GPU",
        ),
        _gpu(
            "h200",
            989.4,
            141,
            4.8,
            900,
            400,
            "H200 SXM datasheet; DGX H200: one 400 Gbit/s port a GPU",
        ),
        _gpu(
            "b200",
            2250,
            180,
            8.0,
            1800,
            400,
            "DGX B200 datasheet, an eighth of it; one 400 Gbit/s port a GPU",
        ),
        _tpu("v4", 275, 32, 1200, 600, 3, 4096, 50, 1.05),
        _tpu("v5e", 197, 16, 819, 400, 2, 256, 25, 1.5),
        _tpu("v5p", 459, 95, 2765, 1200, 3, 6144, 50, 1.75),
        _tpu("v6e", 918, 32, 1638, 800, 2, 256, 100, 1.75),
        _tpu("tpu7x", 2307, 192, 7380, 1200, 3, 9216, 100, 2.2),
    )
}
"""Known chips by name.

The tables of TPU v4 and v5e give no network rate per chip. For v5e it is 6.4 Tbit/s for a pod of
256; for v4 the rate of v5p is assumed. The six links of a v4 chip carry 50 GB/s each way at 1.05
GHz (Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning", 2023,
table 4). The other clocks are the peak flops divided by the flops per cycle of the matrix units: 4
units of 128 x 128 on v5e, 8 on v4 and v5p; 524,288 flops on v6e, twice that on tpu7x. """

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

_ALIASES = {
    "7x": "tpu7x",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
    "trillium": "v6e",
    "v5litepod": "v5e",
}


def find_hardware(name: str | Hardware) -> Hardware:
    """Return the chip with this name; return a `Hardware` unchanged.

    Args:
      name: a name such as "v5p" or "h100", in upper or lower case; or a `Hardware`.

    Raises:
      TypeError: if `name` is neither a string nor a `Hardware`.
      ValueError: if there is no chip with this name.

    Example:
      >>> find_hardware("V5P").memory_bytes == 95 * 2**30
      True
    """
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        fix = "pass a name such as 'v5p', or a so.planning.Hardware."
        raise TypeError(
            error_text(f"hardware must be a name or a Hardware, got {name!r}.", fix=fix)
        )
    normalized_name = name.lower().strip()
    normalized_name = _ALIASES.get(normalized_name, normalized_name)
    if normalized_name not in HARDWARE:
        fix = f"use one of {', '.join(HARDWARE)}, or describe the chip with so.planning.Hardware."
        raise ValueError(error_text(f"unknown hardware {name!r}.", fix=fix))
    return HARDWARE[normalized_name]


def hardware_of(devices: Devices) -> Hardware | None:
    """Return the peak rates of one of these devices; None if they are not known TPUs.

    If a chip appears as two devices, each has half of its arithmetic, memory and links.
    """
    name = _DEVICE_KINDS.get(getattr(devices[0], "device_kind", "")) if devices else None
    if name is None:
        return None
    places = {
        (getattr(device, "slice_index", 0), *getattr(device, "coords", (i,)))
        for i, device in enumerate(devices)
    }
    return HARDWARE[name].per_device(len(devices) // len(places))
