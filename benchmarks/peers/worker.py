"""One process of a contestant: takes the first step, then as many as it is asked for, and reports
what it saw.

Started by the launcher that the contestant's users would use: python worker.py LIBRARY STRATEGY
FOLDER.
"""

import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # the folder that holds `peers`, not this script's own
from peers.task import read_task


def pin(rank: int, processes: int) -> None:
    """Give each process a core of its own; a single one keeps them all."""
    cores = sorted(os.sched_getaffinity(0))
    if processes > 1:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def memory(name: str) -> int:
    """Return VmRSS (held now) or VmHWM (the most ever held) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Restart VmHWM from what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


def compiled_memory() -> dict[str, int] | None:
    """Return what XLA planned for the largest program of this process, in bytes a device.

    None without jax.
    """
    if "jax" not in sys.modules:
        return None
    plans = [
        program.get_compiled_memory_stats()
        for program in sys.modules["jax"].devices()[0].client.live_executables()
    ]
    kinds = ("argument", "output", "alias", "temp")
    sizes = [{kind: getattr(plan, f"{kind}_size_in_bytes") for kind in kinds} for plan in plans]
    for each in sizes:
        each["total"] = each["argument"] + each["output"] - each["alias"] + each["temp"]
    return max(sizes, key=lambda each: each["total"])


def device_peak() -> int | None:
    """Return the most bytes ever held on the accelerator; None on a CPU, which does not say."""
    if "torch" in sys.modules:
        cuda = sys.modules["torch"].cuda
        return cuda.max_memory_allocated() if cuda.is_available() else None
    stats = sys.modules["jax"].local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def main() -> None:
    library, strategy, folder = sys.argv[1:4]
    task = read_task(Path(folder))
    pin(task.rank, task.processes)
    if task.processes == 1 and task.config.simulated > 1:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={task.config.simulated}"
    host, port = os.environ["PEERS_ADDRESS"].split(":")
    with socket.create_connection((host, int(port))) as line, line.makefile("rw") as wire:

        def say(**what) -> None:
            wire.write(json.dumps(what) + "\n")
            wire.flush()

        contestant = importlib.import_module(f"peers.contestants.{library}")
        imported = memory("VmRSS")
        steps = getattr(contestant, strategy)(task)
        first = next(steps)
        say(rank=task.rank, results=[first], imported=imported, peak=memory("VmHWM"))
        for command in map(json.loads, wire):
            if command == "memory":
                say(
                    peak_of_steps=memory("VmHWM"),
                    compiled=compiled_memory(),
                    device_peak=device_peak(),
                )
            elif command == "forget peak":
                forget_peak()
                say()
            else:
                start, cpu = time.perf_counter(), time.process_time()
                results = [next(steps) for _ in range(command)]
                cpu = time.process_time() - cpu
                say(results=results, seconds=time.perf_counter() - start, cpu_seconds=cpu)


if __name__ == "__main__":
    main()
