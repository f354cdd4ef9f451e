"""What 8-bit products cost in loss, and how long one takes by the TPU compiler's own estimates.

    python benchmarks/low_precision.py [--only int8]       # trains a GPT over bytes on this machine, in each precision
    python benchmarks/low_precision.py --product v6e:2x2   # compiles one product of Llama 3 8B with its gradients, for one chip; needs shardopt[tpu]

The first trains the GPT of `shardopt train` (192 wide, 2 blocks) with the same data, seeds and
AdamW, all but the 8 bits in float32, and takes the loss of held-out text.
"""

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import statistics
from pathlib import Path
from typing import Any, Literal

from common import commit, write_json

RESULTS = Path(__file__).parent / "results" / "low_precision.json"
PRECISIONS = ("float32", "int8", "fp8")
DIM = 192
LENGTH = 128
BATCH = 16
RATE = 2e-3
SEEDS = range(6)
HELD_OUT = 16


def train(precision: Literal["float32", "int8", "fp8"], seed: int, steps: int) -> float:
    """Return the held-out loss, in nats a byte, after so many steps."""
    import jax
    import optax

    import shardopt as so
    from shardopt import data
    from shardopt.core._rounding import Precision
    from shardopt.models import gpt

    windows, held_out = data.split(data.open_corpus(None), LENGTH)
    eight: Precision | None = None if precision == "float32" else precision
    config = gpt.config(dim=DIM, num_layers=2, max_length=LENGTH, precision=eight)
    schedule = optax.warmup_cosine_decay_schedule(0, RATE, steps // 10, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    opt = so.ddp(tx, so.make_mesh(devices=jax.devices()[:1]), gpt.model(config))
    state = opt.init(gpt.init(config, jax.random.key(seed)))
    for _, batch in zip(range(steps), data.batches(windows, BATCH, seed=seed), strict=False):
        state, _ = opt.step(state, batch)
    return float(
        so.training.evaluation(opt, data.spread_batches(held_out, BATCH, HELD_OUT))(state)[
            "val_loss"
        ]
    )


def compile_product(topology: str, precision: str | None, vmem_kib: int) -> dict[str, Any]:
    """Return the milliseconds of 8192 tokens times the weight of Llama 3 8B's first layer, and of
    both gradients, by operation.
    """
    import jax
    import jax.numpy as jnp
    from step_times import step_seconds

    import shardopt as so
    from shardopt.nn._quantized_einsum import quantized_einsum
    from shardopt.planning import topology_devices

    mesh = so.make_mesh(data=1, devices=topology_devices(topology)[:1])
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated)
        for shape in ((1, 8192, 4096), (4096, 14336), (1, 8192, 14336))
    ]

    def product(x, weight, grad):
        multiply = lambda x, weight: quantized_einsum("btd,df->btf", x, weight, precision=precision)  # pyright: ignore
        y, pull = jax.vjp(multiply, x, weight)
        return y, *pull(grad)

    options = {"xla_tpu_scoped_vmem_limit_kib": vmem_kib} if vmem_kib else {}
    with jax.set_mesh(mesh):
        compiled = jax.jit(product).lower(*shapes).compile(compiler_options=options)
    seconds = step_seconds(compiled.as_text(), mesh=mesh, hardware=topology.split(":")[0])
    operations = [
        [round(one.seconds * 1e3, 3), one.op_name]
        for one in seconds.operations
        if one.seconds > 1e-5
    ]
    return {"milliseconds": round(seconds.total * 1e3, 3), "operations": operations}


def main() -> None:
    """Train or compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--product", metavar="TOPOLOGY", help="compile one product with its gradients"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=PRECISIONS)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.product:
        for precision, vmem_kib in itertools.product((None, "int8"), (0, 96 * 1024)):
            vmem = f"{vmem_kib // 1024} MiB of VMEM" if vmem_kib else "default VMEM"
            row = compile_product(options.product, precision, vmem_kib) | {"versions": versions()}
            keep("product", f"{options.product} {precision or 'bfloat16'}, {vmem}", row)
        return
    for precision in [options.only] if options.only else PRECISIONS:
        losses = [train(precision, seed, options.steps) for seed in SEEDS]
        keep(
            "loss",
            precision,
            {"steps": options.steps, "losses": losses, "mean": statistics.mean(losses)},
        )


def keep(part: str, name: str, found: dict[str, Any]) -> None:
    """Write what came out beside what is there.

    The head of the file is that of the losses; what was compiled names its own versions.
    """
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {"loss": {}}}
    record["results"].setdefault(part, {})[name] = found
    if part != "loss":
        RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    else:
        write_json(__file__, record["results"], RESULTS)
    print(name, found.get("losses") or found["milliseconds"], flush=True)


def versions() -> dict[str, str | None]:
    """Return what a row was compiled from and with."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {"commit": commit(), "date": datetime.date.today().isoformat(), **packages}


if __name__ == "__main__":
    main()
