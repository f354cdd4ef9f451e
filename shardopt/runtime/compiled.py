"""Compiled programs in jax's persistent cache, found by all processes of a machine."""

import platform
from pathlib import Path
from typing import Protocol

import numpy as np


class Hash(Protocol):
    """What `hashlib` returns."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""
        ...


def share_compiled_programs() -> None:
    """Let all processes of this machine find what process 0 has compiled, where the devices are CPUs.

    Of several processes jax lets the first alone write its cache, for all of them. But its key has a fingerprint of the
    topology, which on CPU is another one in each process (0.10.2), so that the others find nothing and compile
    again at each start. In its place comes what a program depends on: the kinds of the devices, and the processor.
    """
    from jax._src import cache_key

    of_topology = cache_key._hash_accelerator_config

    def hash_devices(found: Hash, devices: np.ndarray) -> None:
        if all(device.platform == "cpu" for device in devices.flat):
            found.update("\n".join([*(device.device_kind for device in devices.flat), _processor()]).encode())
        else:
            of_topology(found, devices)

    cache_key._hash_accelerator_config = hash_devices


def _processor() -> str:
    """Return the name and the instructions of this machine's processor, as far as the system tells."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().split("\n\n", 1)[0].splitlines() if cpus.is_file() else []
    kept = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return "\n".join(kept) or platform.processor()
