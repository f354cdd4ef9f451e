"""How fast the parameter server is: pushes per second and MB/s on threads and on Ray, and where the
time goes.

Run: python benchmarks/server.py [--pushes 60] [--rounds 15]

A model of 25 million fp32 parameters (100 MB), of the shapes of a GPT. Apply: the server's own
update (average, rule, optimizer) against `jax.jit` of the plain optax update with its state
donated, and with parameters that are kept, as those of a server must be; interleaved, medians.
Claim: at most 1.2 times as long. Threads and Ray: two workers whose gradient costs nothing (they
push a gradient that is there already), so that what is timed is pull, push and apply. MB/s counts
pulls and pushes. The profile is the share of the run's seconds that calls took, in the server's
process and in the last worker's: nested calls count in both, and the server's are those of all
workers together.
"""

import argparse
import collections
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from common import fake_devices, interleave, median_ratio, write_json

fake_devices(2)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.parameter_server._optimizer import AsyncOptimizer
from shardopt.parameter_server._run import RunSpec, WorkerCompute
from shardopt.parameter_server._updates import finiteness
from shardopt.parameter_server._worker import WorkerCompressors, codec_header

WIDTH = 512
LAYERS = 8
TX = optax.sgd(1e-3, momentum=0.9)
REDUCERS = {"as it is": None, "int8": so.reducers.error_feedback(so.reducers.int8())}


def start():
    """25.2 million parameters: eight blocks of 12 width^2."""
    draw = np.random.default_rng(0)
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    return [
        {name: draw.standard_normal(shape, np.float32) / 32 for name, shape in shapes.items()}
        for _ in range(LAYERS)
    ]


def size_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def compare_apply(rounds):
    """Seconds of a push on the pure server and of the plain jitted update."""
    params = jax.tree.map(jnp.asarray, start())
    grads = jax.block_until_ready(jax.tree.map(lambda leaf: 1e-3 * leaf, params))
    found = {}
    for name, tx in (("sgd with momentum", TX), ("adamw", optax.adamw(1e-3))):
        server = so.parameter_server.make_server(tx, max_staleness=None, donate=True)
        state = [server.join(server.init(params), 0)[0]]
        update = so.parameter_server.make_update(grads)
        update = update._replace(is_finite=jax.jit(finiteness)(update._replace(rows=None)))

        def push(server=server, state=state, update=update):
            one, pulled = server.pull(state[0], 0)
            state[0], _ = server.push(one, 0, update, pulled.version)
            return state[0].params

        @jax.jit
        def step(params, opt_state, grads, tx=tx):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        plain = jax.jit(step, donate_argnums=1)
        kept = [jax.tree.map(jnp.copy, params), tx.init(params)]

        def optax_step(plain=plain, kept=kept):
            kept[0], kept[1] = plain(kept[0], kept[1], grads)
            return kept[0]

        times = interleave({"server": push, "optax": optax_step}, rounds=rounds)
        ratio = median_ratio(times["server"], times["optax"])
        milliseconds = {one: 1e3 * statistics.median(values) for one, values in times.items()}
        print(
            f"{name:18} server {milliseconds['server']:.1f} ms, optax {milliseconds['optax']:.1f}"
            f" ms, ratio {ratio:.3f}"
        )
        found[name] = {"milliseconds": milliseconds, "ratio": ratio}
    return found


def watch(path, places):
    """Time calls of `(place, attribute, name)` in this process, seconds in a file.

    Return what undoes it.
    """
    seconds = collections.Counter()
    lock = threading.Lock()
    undo = []

    def timed(inner, name):
        def run(*arguments, **options):
            begin = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                with lock:
                    seconds[name] += time.perf_counter() - begin
                    path.write_text(json.dumps(seconds))

        return run

    for place, attribute, name in places:
        undo.append((place, attribute, getattr(place, attribute)))
        setattr(place, attribute, timed(getattr(place, attribute), name))
    return lambda: [setattr(*one) for one in undo]


def watch_server(folder):
    """Where the seconds go where the server is."""
    from shardopt.parameter_server import _apply as apply
    from shardopt.parameter_server import _coordinator as coordinator
    from shardopt.parameter_server import _ray as ray_processes
    from shardopt.parameter_server import _server as server

    places = [
        (coordinator.Coordinator, "push", "server: push, with the wait for the lock"),
        (apply, "check_update", "server: check shapes"),
        (server, "faults", "server: look for NaN"),
        (ray_processes.ServerProcess, "_share_params", "server: parameters into the object store"),
    ]
    return watch(folder / f"server-{os.getpid()}", places)


def watch_worker(folder):
    """Where the seconds go in a worker's process on Ray."""
    from shardopt.parameter_server import _ray as ray_processes

    places = [
        (ray_processes.RemoteCoordinator, "pull", "worker: pull, parameters read"),
        (ray_processes.RemoteCoordinator, "push", "worker: push, gradient to numpy, sent, taken"),
        (ray_processes.jax, "device_get", "worker: gradient to numpy"),
    ]
    return watch(folder / f"worker-{os.getpid()}", places)


def codec_of(reducer):
    return None if reducer is None else so.reducers.compressor(reducer)


def idle_compute(reducer):
    """Workers whose gradient is there already: what is left is moving and applying."""
    compressors = WorkerCompressors(codec_of(reducer))
    ready = {}

    def update(worker, params, batch, clock):
        params = jax.block_until_ready(params)  # a real worker needs them at once
        if worker not in ready:
            made = so.parameter_server.make_update(
                jax.tree.map(lambda leaf: 1e-3 * jnp.asarray(leaf), params)
            )
            ready[worker] = made._replace(is_finite=jax.jit(finiteness)(made._replace(rows=None)))
        return jax.block_until_ready(compressors.encode(worker, ready[worker]))

    begin = lambda worker, position: compressors.begin(worker)
    home = jax.local_devices()[0]
    return WorkerCompute(begin, lambda worker: (), update, lambda tree: jax.device_put(tree, home))


def serve(backend, reducer, pushes):
    """Run two workers.

    Return rates, and what part of the time each worker or the server spent where.
    """
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder)
        here = os.getpid()

        def server(donate):
            if os.getpid() != here:
                watch_server(marks)
            return so.parameter_server.make_server(
                TX, max_staleness=None, donate=donate, reducer=reducer
            )

        def compute(batches_of, key, worker=None):
            if os.getpid() != here:
                watch_worker(marks)
            return idle_compute(reducer)

        header = {"devices": [1, 1], **codec_header(codec_of(reducer))}
        spec = RunSpec("server", 2, server, compute, header, backend, devices=[1, 1])
        run = AsyncOptimizer(spec, spec.make_server(donate=True), (), TX, None, None).run
        params = start()
        data = lambda worker: iter(int, 1)
        if backend == "threads":
            run(params, data, num_updates=4)  # compiles
        undo = watch_server(marks) if backend == "threads" else lambda: None
        result = run(params, data, num_updates=pushes)
        undo()
        profile = [json.loads(path.read_text()) for path in sorted(marks.iterdir())]
    events = [one for one in result.log if one.kind == "push"]
    events = events[len(events) // 4 :]  # the first ones compile
    rate = (len(events) - 1) / (events[-1].time - events[0].time)
    moved = size_of(params) + result.metrics["push_bytes"] / result.metrics["pushes"]
    total = result.metrics["seconds"]
    return {
        "pushes_per_second": rate,
        "megabytes_per_second": rate * moved / 1e6,
        "megabytes_per_round": moved / 1e6,
        "share_of_time": {name: value / total for one in profile for name, value in one.items()},
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pushes", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    results = {"parameters": size_of(start()) // 4, "apply": compare_apply(options.rounds)}
    for backend in ("threads", "ray"):
        for name, reducer in REDUCERS.items():
            found = results[f"{backend}, {name}"] = serve(backend, reducer, options.pushes)
            rates = (
                f"{found['pushes_per_second']:.2f} pushes/s, {found['megabytes_per_second']:.0f}"
                " MB/s"
            )
            print(f"{backend:8} {name:9} {rates}")
            for what, share in found["share_of_time"].items():
                print(f"    {share:5.0%}  {what}")
    print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
