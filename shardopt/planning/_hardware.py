"""Peak rates of chips and of the links between them: published figures, each with its source."""

import dataclasses
import json
from pathlib import Path

from shardopt.core import type_error, value_error

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


_FILE = Path(__file__).with_name("hardware.json")
HARDWARE = {
    name: Hardware(name, **figures | {"hides": tuple(figures.get("hides", _ALL))})
    for name, figures in json.loads(_FILE.read_text(encoding="utf-8")).items()
}
"""Known chips by name.

Google's tables state the rate of all links of a chip, sending and receiving together. A chip has two
links per axis of its torus, so `link_bandwidth` is half of that rate over the number of axes. NVIDIA's
tables state NVLink in both directions: half of it is sent.

The tables of TPU v4 and v5e give no network rate per chip. For v5e it is 6.4 Tbit/s for a pod of
256; for v4 the rate of v5p is assumed. The six links of a v4 chip carry 50 GB/s each way at 1.05
GHz (Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning", 2023,
table 4). The other clocks are the peak flops divided by the flops per cycle of the matrix units: 4
units of 128 x 128 on v5e, 8 on v4 and v5p; 524,288 flops on v6e, twice that on tpu7x. """

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
        raise type_error(f"hardware must be a name or a Hardware, got {name!r}.", fix=fix)
    normalized_name = name.lower().strip()
    normalized_name = _ALIASES.get(normalized_name, normalized_name)
    if normalized_name not in HARDWARE:
        fix = f"use one of {', '.join(HARDWARE)}, or describe the chip with so.planning.Hardware."
        raise value_error(f"unknown hardware {name!r}.", fix=fix)
    return HARDWARE[normalized_name]
