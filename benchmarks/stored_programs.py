"""Does XLA:CPU compute the same with a program from jax's persistent cache as with the program that
it compiled?

    python benchmarks/stored_programs.py [--programs 20]

Each program is a layer of ring attention over four simulated devices, forward and backward, in
double precision. One process compiles all programs and stores them. Three other processes load
them. Each runs each program ten times, and compares with one device. Each is tried with the two
orders of operations that XLA:CPU knows. A run that waits for a collective for a minute ends with an
error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"


def child(folder, programs):
    """Print how many runs of the programs were wrong."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec

    import shardopt as so

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    mesh = so.make_mesh(context=4)
    wrong = 0
    x_spec = PartitionSpec(None, "context")
    weight_spec = PartitionSpec("context")

    def layer(weights, x):
        query, key, value = (jnp.einsum("btd,dhk->bthk", x, w) for w in weights[:3])
        return x + jnp.einsum(
            "bthk,hkd->btd", so.nn.attention(query, key, value, method="ring"), weights[3]
        )

    def passes(weights, x):
        y, vjp = jax.vjp(layer, weights, x)
        weight_grads, x_grad = vjp(y)
        return x_grad, [grad[None] for grad in weight_grads]

    on_ring = jax.shard_map(
        passes,
        mesh=mesh,
        in_specs=(PartitionSpec(), x_spec),
        out_specs=(x_spec, weight_spec),
        check_vma=False,
    )
    for length in range(32, 32 + 8 * programs, 8):
        draw = np.random.default_rng(length)
        weights = [
            draw.normal(size=shape) / 4 for shape in ((6, 8, 4), (6, 4, 4), (6, 4, 4), (8, 4, 6))
        ]
        x = draw.normal(size=(2, length, 6))
        x_grad, weight_grads = jax.device_get(jax.jit(passes)(weights, x))
        run = jax.jit(on_ring)
        for _ in range(10):
            ring_x_grad, ring_weight_grads = jax.device_get(run(weights, x))
            pairs = [(ring_x_grad, x_grad)]
            pairs += [
                (ring.sum(0, keepdims=True), grad)
                for ring, grad in zip(ring_weight_grads, weight_grads, strict=True)
            ]
            wrong += any(np.abs(a - b).max() > 1e-9 for a, b in pairs)
    print(json.dumps({"wrong": wrong, "runs": 10 * programs}))


def run_child(folder, programs, optimized):
    """Return the result of a process."""
    flags = f"--xla_force_host_platform_device_count=4 {FLAG}={str(optimized).lower()}"
    command = [sys.executable, __file__, "--child", folder, "--programs", str(programs)]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"hang": "Termination timeout" in done.stderr, "exit": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def main(programs):
    from common import write_json

    results = {}
    for optimized in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            name = "concurrent order" if optimized else "sequential order"
            results[name] = {
                "compiled": run_child(folder, programs, optimized),
                "loaded": [run_child(folder, programs, optimized) for _ in range(3)],
                "stored": len(list(Path(folder).iterdir())),
            }
            print(name, results[name], flush=True)
    print(write_json(__file__, results))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(options.child, options.programs)
        sys.exit(0)
    sys.exit(main(options.programs))
