"""Compiled programs in jax's persistent cache, shared by all processes of a machine."""

import platform
from pathlib import Path
from typing import Protocol

import numpy as np


class Hash(Protocol):
    """The type of the objects that `hashlib` returns."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""
        ...


def share_compiled_programs() -> None:
    """Let all processes of this machine find the programs that process 0 compiled, if the devices
    are CPUs.

    With several processes, only the first writes jax's cache. But the key of the cache has a
    fingerprint of the topology, which on CPU differs between processes (jax 0.10.2). So the others
    find nothing and compile again at each start. This replaces the fingerprint by the values that a
    program depends on: the kinds of the devices, and the processor.
    """
    from jax._src import cache_key

    hash_topology = cache_key._hash_accelerator_config

    def hash_devices(key_hash: Hash, devices: np.ndarray) -> None:
        if all(device.platform == "cpu" for device in devices.flat):
            key_hash.update(
                "\n".join([*(device.device_kind for device in devices.flat), _processor()]).encode()
            )
        else:
            hash_topology(key_hash, devices)

    cache_key._hash_accelerator_config = hash_devices


def _processor() -> str:
    """Return the name and the instruction sets of this machine's processor, if the system reports
    them.
    """
    cpu_file = Path("/proc/cpuinfo")
    lines = cpu_file.read_text().split("\n\n", 1)[0].splitlines() if cpu_file.is_file() else []
    relevant_lines = [
        line for line in lines if line.startswith(("model name", "flags", "Features"))
    ]
    return "\n".join(relevant_lines) or platform.processor()
