"""The part of `peers.py` for one GPU: GPT-2 sizes in bf16 against torch.compile, and the update against a copy.

Run: python benchmarks/peers.py --gpu, with CUDA builds of jax and torch. Contestants: `so.ddp` on one device with
fp32 parameters and bf16 products, torch.compile under bf16 autocast, both with AdamW, torch's fused. The update: AdamW on
fp32 leaves, which reads parameter, gradient and two moments and writes three of them, 28 bytes a parameter; the copy:
one array of the same size as what the update moves. Claims: tokens per second at least torch's; update at least 0.85 of the copy's bytes per second.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from peers_group import Contestant
from peers_measure import measure
from peers_task import B1, B2, EPS, LEARNING_RATE, WEIGHT_DECAY, Config

NOT_MEASURED = "not measured: no GPU was there, and benchmarks/peers_gpu.py has not run yet."
GPU = {"vocab_size": 50304, "tied": True, "dtype": "bfloat16", "simulated": 1}
SIZES = {
    "GPT-2 124M": Config(dim=768, num_layers=12, num_heads=12, batch=16, length=1024, **GPU),
    "GPT-2 350M": Config(dim=1024, num_layers=24, num_heads=16, batch=16, length=1024, **GPU),
}
CONTESTANTS = [Contestant("shardopt", "ddp", 1), Contestant("torch", "compiled", 1)]
UPDATE_BYTES = 28


def measure_gpu(*, rounds: int, steps: int, sizes: dict[str, Config] = SIZES, device: str = "gpu") -> dict[str, Any]:
    """Return tokens per second, share of peak flops, memory, and the update's share of the copy's bandwidth.

    Raises:
      SystemExit: if jax or torch finds no GPU, or the contestants compute different things.
    """
    import jax
    import torch

    if device == "gpu" and not (jax.default_backend() == "gpu" and torch.cuda.is_available()):
        raise SystemExit(f"peers --gpu: jax has {jax.devices()}, torch has CUDA: {torch.cuda.is_available()}.")
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "sizes": {}}
    for name, config in sizes.items():
        # bf16 rounds to three digits: the two agree as far as that goes
        one = measure(CONTESTANTS, config, rounds=rounds, steps=steps, loss_tolerance=5e-3, norm_tolerance=0.1)
        peak = peak_flops(found["device"])
        for row in one["contestants"].values():
            used = row["tokens_per_second"] * flops_per_token(config)
            row["mfu"] = used / peak if peak else None
        found["sizes"][name] = one | {"config": config._asdict(), "update": measure_update(num_parameters(config))}
    return found


def num_parameters(config: Config) -> int:
    """Return how many parameters the GPT has."""
    from peers_task import gpt_config

    from shardopt.models import gpt

    return gpt.num_parameters(gpt_config(config))


def flops_per_token(config: Config) -> float:
    """Return 6 N + 12 L D T: each parameter in a product three times, and attention without regard to its mask.

    References:
      Chowdhery and others, "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    products = num_parameters(config) - (0 if config.tied else config.vocab_size * config.dim)
    return 6 * products + 12 * config.num_layers * config.dim * config.length


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bf16 peak of a device, None where it is not known."""
    from shardopt.planning.hardware import HARDWARE

    return next((each.flops for name, each in HARDWARE.items() if name in device_kind.lower()), None)


def measure_update(count: int) -> dict[str, dict[str, float]]:
    """Return bytes per second of AdamW on `count` parameters, and of a copy, by jax and by torch."""
    found = {"jax": _rates(count, *_jax_pair(count)), "torch": _rates(count, *_torch_pair(count))}
    best = max(each["copy_bytes_per_second"] for each in found.values())
    for each in found.values():
        each["share_of_best_copy"] = each["update_bytes_per_second"] / best
    return found


def _jax_pair(count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
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


def _torch_pair(count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
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


def _rates(count: int, update: Callable[[], Any], copy: Callable[[], Any], rounds: int = 20) -> dict[str, float]:
    times: dict[str, list[float]] = {"update": [], "copy": []}
    for turn in range(-3, rounds):
        for name, run in (("update", update), ("copy", copy)):
            start = time.perf_counter()
            run()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    moved = UPDATE_BYTES * count
    return {
        f"{name}_bytes_per_second": float(moved / statistics.median(np.array(each))) for name, each in times.items()
    }
