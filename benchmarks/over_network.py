"""What slow links cost: a GPT between two hosts, by method and bandwidth, in tokens per second and
loss over time.

    python over_network.py --megabits 10 100 1000 --minutes 2

Needs root and iproute2: hosts are network namespaces (`tests/support/hosts.py`), whose links are
limited in both directions. Hosts share the cores of this machine. So each row states the measured
rate of the link, the load, and two shares of the time: in which the link was busy, and in which a
core computed for a process. A row whose link is busy nearly all the time is about the method. In any
other row the machine counts, and what else runs on it.

A row is written as soon as it is measured, and a later call measures only what is missing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import over_network_methods as methods
from common import write_json
from over_network_methods import HOSTS, LENGTH, METHODS, ROWS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

RESULTS = Path(__file__).parent / "results" / "over_network.json"
MINUTES = 2.0
CALIBRATED_AT = 1000.0  # Mbit/s
SEND = """
import socket, sys, time
address, count = sys.argv[1], int(sys.argv[2])
with socket.create_connection((address, 5000)) as connection:
    connection.sendall(bytes(count // 4))
    connection.recv(1)
    began = time.monotonic()
    connection.sendall(bytes(count))
    connection.recv(1)
    print(8 * count / 1e6 / (time.monotonic() - began))
"""
RECEIVE = """
import socket, sys
server = socket.create_server(("", 5000))
print("ready", flush=True)
connection, _ = server.accept()
for count in (int(sys.argv[1]) // 4, int(sys.argv[1])):
    while count:
        count -= len(connection.recv(min(count, 65536)))
    connection.sendall(b"x")
"""


def sent_bytes():
    """Return the bytes that this host has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def train(method, dim, layers, minutes, rank):
    """Train as one of two processes. Process 0 prints its row."""
    stream, held_out = methods.batches(rank)
    join = methods.torch_process if method.startswith("torch") else methods.shardopt_process
    process = join(method, dim, layers, rank, held_out)
    every = process.meets_every
    # All programs are compiled before the clock starts, also the one that synchronises. Torch
    # compresses from the third step on.
    for _ in range(every + 2):
        process.step(next(stream))
    process.evaluate()
    process.wait()
    process.reset()
    curve = [[0.0, process.evaluate()]]
    process.slowest(0.0)  # both processes start the clock together
    seconds, steps, cpu, sent = 0.0, 0, 0.0, 0
    loads = []
    while seconds < 60 * minutes:
        began, cpu_began, sent_began = time.monotonic(), time.process_time(), sent_bytes()
        for _ in range(every):
            process.step(next(stream))
        process.wait()
        spent = time.monotonic() - began
        cpu += time.process_time() - cpu_began
        sent += sent_bytes() - sent_began
        steps += every
        # both processes stop at the same step; this message is not on the clock
        seconds += process.slowest(spent)
        if seconds > 60 * minutes * len(curve) / 12:
            curve.append([seconds / 60, process.evaluate()])
            loads.append(os.getloadavg()[0])
    row = {
        "parameters": process.num_params,
        "steps": steps,
        "seconds": seconds,
        "tokens_per_second": steps * HOSTS * ROWS * LENGTH / seconds,
        "megabytes_per_step": sent / steps / 1e6,
        "compute_share": cpu / seconds,
        "loss": curve[-1][1],
        "curve": curve,
        "load": statistics.median(loads),
    }
    if rank == 0:
        print("row " + json.dumps(row), flush=True)


def rate_of(hosts, megabits):
    """Measure the rate of the link from the first host to the second, in megabits per second."""
    count = str(int(megabits * 250_000))  # two seconds of it
    receiver = hosts[1].popen(
        [sys.executable, "-c", RECEIVE, count], stdout=subprocess.PIPE, text=True
    )
    receiver.stdout.readline()
    rate = float(hosts[0].run([sys.executable, "-c", SEND, hosts[1].address, count]))
    receiver.wait()
    return rate


def measure(method, megabits, options):
    """Return the row of a method at a bandwidth."""
    from support.hosts import network

    with network(HOSTS) as hosts, tempfile.TemporaryDirectory() as folder:
        for host in hosts:
            host.limit(megabits)
        rate = rate_of(hosts, megabits)
        jobs = []
        for rank, host in enumerate(hosts):
            words = [sys.executable, __file__, "--train", method, "--rank", str(rank)]
            words += ["--dim", str(options.dim), "--layers", str(options.layers)]
            words += ["--minutes", str(options.minutes)]
            variables = {
                "SHARDOPT_LISTEN_ADDRESS": host.address,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                # the code of users, unlike in tests
                "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            }
            with Path(folder, host.name).open("w") as said:
                jobs.append(host.popen(words, stdout=said, stderr=said, env=variables))
        codes = [job.wait(timeout=60 * options.minutes * 5 + 600) for job in jobs]
        logs = [Path(folder, host.name).read_text() for host in hosts]
        if any(codes):
            ends = "\n".join(log[-3000:] for log in logs)
            raise SystemExit(f"{method} at {megabits} Mbit/s ended with {codes}:\n{ends}")
    row = json.loads(logs[0].rpartition("row ")[2].splitlines()[0])
    row["link_share"] = row["megabytes_per_step"] * row["steps"] * 8 / rate / row["seconds"]
    return {"method": method, "megabits": megabits, "measured_megabits": round(rate, 2)} | row


def seconds_without_messages(row):
    """Return the seconds of a step, less those of its bytes at the measured rate of the link."""
    return row["seconds"] / row["steps"] - row["megabytes_per_step"] * 8 / row["measured_megabits"]


def planned_seconds(workload, compute, megabits):
    """Return the seconds of a step of ddp on two hosts by `so.plan`."""
    import shardopt as so

    link = megabits * 1e6 / 8

    def plan(flops):
        host = so.planning.Hardware(
            name="a host",
            flops=flops,
            memory_bytes=16 * 2**30,
            memory_bandwidth=20e9,
            link_bandwidth=link,
            torus_dims=0,
            pod_chips=1,
            network_bandwidth=link,
            source="calibrated",
        )
        options = {"chips": HOSTS, "slices": HOSTS, "placements": ["ddp"], "remat": [False]}
        return so.plan(workload, hardware=host, batch_size=HOSTS * ROWS, **options).best.time

    # the seconds of products are inverse to the rate
    flops = 1e11 * plan(1e11).compute / compute
    return plan(flops).total


def predictions(rows, options):
    """Return the seconds a step of ddp, as measured and by `so.plan`, calibrated at 1,000 Mbit/s."""
    import jax

    import shardopt as so
    from shardopt.models import gpt

    config = gpt.config(dim=options.dim, num_layers=options.layers)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    one_row = {"tokens": jax.ShapeDtypeStruct((1, LENGTH + 1), np.int32)}
    workload = so.planning.trace(gpt.model(config), params, one_row)
    measured = {row["megabits"]: row for row in rows if row["method"] == "ddp"}
    compute = seconds_without_messages(measured[CALIBRATED_AT])
    return [
        {
            "megabits": megabits,
            "measured": row["seconds"] / row["steps"],
            "planned": planned_seconds(workload, compute, row["measured_megabits"]),
        }
        for megabits, row in sorted(measured.items())
    ]


def loss_at(row, minutes):
    """Return the held-out loss of a run after some minutes, between two that were measured."""
    times, losses = zip(*row["curve"], strict=True)
    return float(np.interp(minutes, times, losses))


def table(rows):
    """Return the table of the page."""
    lines = ["| Mbit/s, measured | method | MB a step | link busy | core busy | tokens/s | loss |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        shares = f"{row['link_share']:.0%} | {row['compute_share']:.0%}"
        lines.append(
            f"| {row['megabits']:g}, {row['measured_megabits']} | {METHODS[row['method']]}"
            f" | {row['megabytes_per_step']:.2f} | {shares} | {row['tokens_per_second']:.0f}"
            f" | {loss_at(row, MINUTES):.2f} |"
        )
    return "\n".join(lines)


def planned_table(planned):
    """Return the table of the predictions."""
    lines = ["| Mbit/s | seconds a step, measured | by `so.plan` | error |", "|---|---:|---:|---:|"]
    for row in planned:
        error = row["planned"] / row["measured"] - 1
        seconds = f"{row['measured']:.2f} | {row['planned']:.2f}"
        lines.append(f"| {row['megabits']:g} | {seconds} | {error:+.0%} |")
    return "\n".join(lines)


def plot(rows, path):
    """Draw loss over minutes, one line a method, one panel a bandwidth."""
    import matplotlib.pyplot as plt

    bandwidths = sorted({row["megabits"] for row in rows})
    size = (5.2 * len(bandwidths), 4.2)
    figure, axes = plt.subplots(
        1, len(bandwidths), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    colors = plt.get_cmap("tab10").colors
    for axis, megabits in zip(axes[0], bandwidths, strict=True):
        for color, method in zip(colors, METHODS, strict=False):
            for row in rows:
                if row["method"] == method and row["megabits"] == megabits:
                    minutes, losses = zip(*row["curve"], strict=True)
                    style = "--" if method.startswith("torch") else "-"
                    axis.plot(minutes, losses, style, color=color, label=METHODS[method])
        axis.set_title(f"{megabits:g} Mbit/s", loc="left", fontsize=10)
        axis.set_xlabel("minutes")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("held-out loss")
    labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabits", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--train", help="train as one process")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.dim, options.layers, options.minutes, options.rank)
        return
    from support.hosts import obstacle

    if reason := obstacle():
        raise SystemExit(reason)
    rows = []
    if RESULTS.exists():
        rows = json.loads(RESULTS.read_text())["results"]["rows"]
    known = {(row["method"], row["megabits"]) for row in rows}
    for megabits in options.megabits:
        for method in options.methods:
            if (method, megabits) in known:
                continue
            rows.append(measure(method, megabits, options))
            shown = {name: value for name, value in rows[-1].items() if name != "curve"}
            print(json.dumps(shown), flush=True)
            write_json(__file__, {"rows": rows}, RESULTS)
    rows.sort(key=lambda row: (row["megabits"], list(METHODS).index(row["method"])))
    write_json(__file__, {"rows": rows, "planned": predictions(rows, options)}, RESULTS)
    plot(rows, ROOT / "docs" / "over_a_network.png")


if __name__ == "__main__":
    main()
