"""What several processes pay for agreement: the message before each batch, and digests of rows.

Run: python benchmarks/agreement.py [--processes 2 4] [--repeats 500]

The processes are on this machine, with two devices of the CPU each. "message" is `agree` on a text as
`fit` exchanges before each batch. "digest" is the digests of all leaves of a batch of floats, which
`fit` computes for batches 1, 2, 4, 8 and so on, and for each 1000th.

Claim: docs/data_on_several_processes.md states these times. A digest is work of one core, so its time
is that of the core. A message is mostly waiting. So its least time is the time without other programs
on the machine, and the median has what they took.
"""

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import time

from common import write_json

SIZES = (1, 8, 32)
"""Megabytes of a batch."""


def times_of(function, repeats, clock=time.perf_counter):
    """Return the median and the least of the milliseconds of a call."""
    times = []
    for _ in range(repeats):
        began = clock()
        function()
        times.append(1000 * (clock() - began))
    return {"median_ms": round(statistics.median(times), 3), "least_ms": round(min(times), 3)}


def work(rank, count, port, repeats):
    """Measure as one of several processes; the first prints the times."""
    import jax
    import numpy as np
    import optax

    import shardopt as so
    from shardopt.runtime._agreement import agree
    from shardopt.step._host_batch import read_batch

    jax.config.update("jax_num_cpu_devices", 2)
    so.initialize(f"127.0.0.1:{port}", count, rank)
    opt = so.fsdp(optax.sgd(0.1), so.make_mesh(), lambda params, batch: (batch @ params).mean())
    message = ["process", "0123456789abcdef", 8, f"sample of {rank}", None, None, None]
    agree("benchmark", message, range(count))
    rows = {"message": times_of(lambda: agree("benchmark", message, range(count)), repeats)}
    for megabytes in SIZES:
        agree("benchmark", None, range(count))
        values = np.random.default_rng(rank).normal(size=(256, megabytes * 1024))
        batch = read_batch(opt.config, values.astype(np.float32))
        digest = functools.partial(batch.digests, opt.config)
        times = times_of(digest, max(5, repeats // 25), clock=time.thread_time)
        rows[f"digest of {megabytes} MB"] = times
    if rank == 0:
        print(json.dumps(rows), flush=True)


def measure(count, repeats):
    """Return the times with as many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--count", str(count), "--port", str(port), "--repeats", str(repeats)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), *words],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for rank in range(count)
    ]
    outputs = [process.communicate()[0] for process in processes]
    return json.loads(outputs[0].strip().split("\n")[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=500)
    for name in ("rank", "count", "port"):
        parser.add_argument(f"--{name}", type=int)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments.rank, arguments.count, arguments.port, arguments.repeats)
        return
    rows = {}
    for count in arguments.processes:
        rows[f"{count} processes"] = measure(count, arguments.repeats)
        print(count, rows[f"{count} processes"], flush=True)
    write_json(__file__, {"times": rows, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
