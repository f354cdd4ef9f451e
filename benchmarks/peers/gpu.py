"""One GPU: GPT-2 in bf16 by shardopt, torch.compile and MaxText, interleaved, and AdamW's update
against a copy.

Run: python -m benchmarks.peers.gpu [--sizes 124M 350M] [--maxtext FOLDER], or python -m
benchmarks.peers --gpu, with CUDA builds of jax and torch. Results are written after each size.
Compiling is most of the time: on an H200, torch takes its first step after 40 to 50 s without
`autotuned`. First, anywhere and in two minutes: python -m benchmarks.peers.gpu --tiny, which does
the same with a tiny model, on a CPU if need be, and writes nothing.

Contestants, all with AdamW:

- `so.ddp` on one device, with fp32 parameters and bf16 products and logits.
- torch.compile under bf16 autocast, AdamW fused; and the same with kernels that are chosen by
  timing them ("autotuned").
- MaxText's own step, exported on a machine that has MaxText (`peers.exported`).

The update: AdamW on fp32 leaves, which reads parameter, gradient and two moments and writes three
of them, 28 bytes a parameter; the copy: one array of half as much, read and written. Claims: tokens
per second at least torch's; update at least 0.85 of the copy's bytes per second.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..common import write_json
from .jobs import Contestant
from .measure import measure
from .task import B1, B2, EPS, LEARNING_RATE, WEIGHT_DECAY, Config

NOT_MEASURED = (
    "not measured. On an H200 the contestants agreed, and the run ended before their speeds were"
    " written, 2026-11-27."
)
GPU = {"vocab_size": 50304, "tied": True, "dtype": "bfloat16", "simulated": 1}
SIZES = {
    "124M": Config(dim=768, num_layers=12, num_heads=12, batch=16, length=1024, **GPU),
    # XLA plans 90 GB for a batch of 16: with torch beside it, more than an H200 has
    "350M": Config(dim=1024, num_layers=24, num_heads=16, batch=8, length=1024, **GPU),
}
TINY = Config(dim=64, num_layers=2, num_heads=2, batch=4, length=64, **GPU | {"vocab_size": 512})
CONTESTANTS = [
    Contestant("shardopt", "ddp", 1),
    Contestant("torch", "compiled", 1),
    Contestant("torch", "autotuned", 1),
]
MAXTEXT = [Contestant("maxtext", "stacked", 1), Contestant("maxtext", "unstacked", 1)]
RESULTS = Path(__file__).parents[1] / "results" / "peers_gpu.json"
UPDATE_BYTES = 28


def share_device() -> None:
    """Let this process, the contestants and torch hold parts of one GPU.

    Call before jax makes a backend.

    By itself each process of jax takes three quarters of it at once, and torch finds no room.
    """
    os.environ |= {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
    }


def find_device(*, tiny: bool) -> str:
    """Return what the device is called.

    Raises:
      SystemExit: if jax or torch finds no GPU; a tiny model may run on a CPU.
    """
    import jax
    import torch

    if not tiny and not (jax.default_backend() == "gpu" and torch.cuda.is_available()):
        raise SystemExit(
            f"peers: jax has {jax.devices()}, torch has CUDA: {torch.cuda.is_available()}."
        )
    return jax.devices()[0].device_kind


def measure_size(
    config: Config, device: str, contestants: list[Contestant], *, rounds: int, steps: int
) -> dict[str, Any]:
    """Return tokens per second, share of peak flops, memory, and the update's share of the copy's
    bandwidth.

    Raises:
      SystemExit: if the contestants compute different things.
    """
    # bf16 rounds to three digits. At 124M, width and depth as they are, ten steps were 0.0014 and
    # 0.008 apart on a CPU.
    found = measure(
        contestants, config, rounds=rounds, steps=steps, loss_tolerance=5e-3, norm_tolerance=0.1
    )
    peak = peak_flops(device)
    for row in found["contestants"].values():
        used = row["tokens_per_second"] * flops_per_token(config)
        row["mfu"] = used / peak if peak else None
    return found | {"config": config._asdict(), "update": measure_update(num_parameters(config))}


def num_parameters(config: Config) -> int:
    """Return how many parameters the GPT has."""
    from shardopt.models import gpt

    from .task import gpt_config

    return gpt.num_parameters(gpt_config(config))


def flops_per_token(config: Config) -> float:
    """Return 6 N + 12 L D T: each parameter in a product three times, and attention without regard
    to its mask.

    References:
      Chowdhery and others, "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    products = num_parameters(config) - (0 if config.tied else config.vocab_size * config.dim)
    return 6 * products + 12 * config.num_layers * config.dim * config.length


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bf16 peak of a device, which holds the known name, such as "NVIDIA H200".

    None where none is.
    """
    from shardopt.planning._hardware import HARDWARE

    return next(
        (each.flops for name, each in HARDWARE.items() if name in device_kind.lower()), None
    )


def measure_update(count: int) -> dict[str, dict[str, float]]:
    """Return bytes per second of AdamW on `count` parameters, and of a copy, by jax and by torch,
    one after the other.
    """
    found = {library: _apart(rates_of, library, count) for library in ("jax", "torch")}
    best = max(each["copy_bytes_per_second"] for each in found.values())
    for each in found.values():
        each["share_of_best_copy"] = each["update_bytes_per_second"] / best
    return found


def rates_of(library: str, count: int, rounds: int = 20) -> dict[str, float]:
    """Return bytes per second of a library's AdamW and copy, which take turns."""
    update, copy = {"jax": jax_pair, "torch": torch_pair}[library](count)
    times: dict[str, list[float]] = {"update": [], "copy": []}
    for turn in range(-3, rounds):
        for name, run in (("update", update), ("copy", copy)):
            start = time.perf_counter()
            run()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return {
        f"{name}_bytes_per_second": UPDATE_BYTES * count / statistics.median(each)
        for name, each in times.items()
    }


def jax_pair(count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    leaves = {str(i): jnp.ones(count // 8, jnp.float32) for i in range(8)}
    held = [leaves, tx.init(leaves), jax.tree.map(jnp.ones_like, leaves)]
    jitted = jax.jit(update, donate_argnums=(0, 1))
    source = jnp.zeros(count * UPDATE_BYTES // 8, jnp.float32)
    copied = jax.jit(lambda x: x + 1)

    def step() -> None:
        held[:2] = jitted(*held)
        jax.block_until_ready(held[:2])

    return step, lambda: jax.block_until_ready(copied(source))


def torch_pair(count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaves = [torch.ones(count // 8, device=device, requires_grad=True) for _ in range(8)]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    betas = (B1, B2)
    optimizer = torch.optim.AdamW(leaves, LEARNING_RATE, betas, EPS, WEIGHT_DECAY, fused=True)
    source = torch.zeros(count * UPDATE_BYTES // 8, device=device)
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    return lambda: (optimizer.step(), wait()), lambda: (target.copy_(source), wait())


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own, which gives back what it holds of the device when it
    ends.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def record(
    sizes: list[str], *, rounds: int, steps: int, tiny: bool, maxtext: Path | None = None
) -> None:
    """Measure sizes one after another, and write each as it comes beside those measured before on
    the same device.
    """
    share_device()
    contestants = CONTESTANTS
    if maxtext is not None:
        os.environ["PEERS_MAXTEXT"] = str(maxtext.resolve())
        contestants = CONTESTANTS + MAXTEXT
    # nothing compiled by an earlier run: jax keeps nothing
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    device = find_device(tiny=tiny)
    before = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() and not tiny else {}
    same = before.get("device") == device
    results = {
        "device": device,
        "torch": importlib.metadata.version("torch"),
        "sizes": before["sizes"] if same else {},
    }
    for name, config in (
        {"tiny": TINY}.items() if tiny else {name: SIZES[name] for name in sizes}.items()
    ):
        results["sizes"][name] = measure_size(
            config, device, contestants, rounds=rounds, steps=steps
        )
        print(json.dumps({name: results["sizes"][name]}, indent=2), flush=True)
        if not tiny:
            print("wrote", write_json("peers_gpu", results, RESULTS), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps a round")
    parser.add_argument(
        "--maxtext", type=Path, help="folder that `python -m benchmarks.peers.exported` wrote"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="try it with a tiny model, and write nothing"
    )
    options = parser.parse_args()
    record(
        options.sizes,
        rounds=options.rounds,
        steps=options.steps,
        tiny=options.tiny,
        maxtext=options.maxtext,
    )


if __name__ == "__main__":
    main()
