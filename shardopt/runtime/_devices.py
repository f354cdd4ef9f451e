"""The devices of a command: accelerators, or simulated CPU devices that several processes share."""

import jax

from shardopt.core import Devices, check_count, value_error
from shardopt.runtime._processes import initialize, num_processes


def start_devices(count: int) -> Devices:
    """Start jax and return its devices: accelerators if there are any, else `count` simulated CPU
    devices.

    With several processes, each has an equal share of the simulated devices.
    """
    check_count("--devices", count)
    initialize()
    processes = num_processes()
    try:
        jax.config.update("jax_num_cpu_devices", max(count // processes, 1))
    except RuntimeError:  # jax has already started, in a notebook or a test: use its devices
        return jax.devices()
    devices = jax.devices()
    if count % processes and devices[0].platform == "cpu":
        lower_count = max(count // processes, 1) * processes
        problem = f"--devices {count} cannot be shared out evenly among {processes} processes."
        raise value_error(problem, fix=f"use --devices {lower_count} or {lower_count + processes}.")
    return devices
