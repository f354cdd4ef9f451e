"""Several parameter servers: bytes of each, pushes per second and MB/s by their number, and how
soon a killed one is back.

Run: python benchmarks/servers.py [--pushes 40]

25 million fp32 parameters (100 MB) and SGD with momentum, as in `server.py`; two workers whose
gradient is there already pull and push as fast as they can, over Ray on one machine. Claims:
parameters and optimizer state of a server are 1/n of those of one, to the byte but for padding; a
killed server loses no update. More servers are faster only where they have cores, memory and links
of their own: here all share two cores, so pushes per second say what the protocol costs, against
the single server that has no copy for its journal. Every server count runs in turn, `--rounds`
times; medians.
"""

import argparse
import itertools
import os
import signal
import statistics
import time
from functools import partial
from pathlib import Path

import jax
from common import write_json
from server import TX, idle_compute, size_of, start

import shardopt as so
from shardopt.parameter_server._run import RunSpec

COUNTS = (1, 2, 4)


def compute(batches_of, key, worker=None):
    return idle_compute(None)


def server_bytes(servers):
    """Bytes of parameters and optimizer state of each server."""
    state = so.parameter_server.make_server(TX, servers=servers).init(start())
    if servers == 1:
        return [size_of((state.params, state.opt_state))]
    return [size_of(part) for part in zip(state.params.trees, state.opt_state, strict=True)]


def run_of(servers):
    make = partial(so.parameter_server.make_server, TX, max_staleness=None, servers=servers)
    spec = RunSpec(
        "servers", 2, make, compute, {"devices": [1, 1]}, "ray", devices=[1, 1], servers=servers
    )
    return so.parameter_server.AsyncOptimizer(
        spec, spec.make_server(donate=True), (), TX, None, None
    ).run


def forever(worker):
    return iter(int, 1)


def rate(result, pushes):
    # the first ones compile
    events = [one for one in result.log if one.kind == "push"][pushes // 4 :]
    return (len(events) - 1) / (events[-1].time - events[0].time)


def part_processes():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ShardProcess" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def killed(servers, pushes):
    """Kill a server in the middle; seconds of the longest gap between pushes, and what was lost."""

    def kill_one(params):
        if not done:
            done.append(time.perf_counter())
            os.kill(min(part_processes()), signal.SIGKILL)
        return {}

    done = []
    result = run_of(servers)(
        start(), forever, num_updates=pushes, evaluate=kill_one, evaluate_every=pushes // 2
    )
    times = [one.time for one in result.log if one.kind == "push"][pushes // 4 :]
    gap = max(b - a for a, b in itertools.pairwise(times))
    names = ("killed_servers", "lost_updates", "updates")
    return {"longest_gap_seconds": gap, **{name: result.metrics[name] for name in names}}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pushes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates = {servers: [] for servers in COUNTS}
    for turn in range(options.rounds):
        for servers in COUNTS:
            result = run_of(servers)(start(), forever, num_updates=options.pushes)
            rates[servers].append(rate(result, options.pushes))
            print(f"round {turn}: {servers} servers {rates[servers][-1]:.2f} pushes/s", flush=True)
    moved, results = 2 * size_of(start()) / 1e6, {}
    for servers in COUNTS:
        middle = statistics.median(rates[servers])
        found = results[servers] = {
            "megabytes_per_server": [size / 1e6 for size in server_bytes(servers)],
            "pushes_per_second": middle,
            "megabytes_per_second": middle * moved,
            "all_pushes_per_second": rates[servers],
        }
        sizes = ", ".join(f"{size:.1f}" for size in found["megabytes_per_server"])
        print(
            f"{servers} servers  {sizes} MB each  {middle:.2f} pushes/s  {middle * moved:.0f} MB/s"
        )
    results["killed"] = killed(2, options.pushes)
    print("one of two killed:", results["killed"])
    results["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(start()))
    print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
