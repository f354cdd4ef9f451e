"""Predictions beside published figures: model flops utilisation of runs, and the links that DiLoCo
needs.
"""

import dataclasses

import jax.numpy as jnp

from shardopt.planning import (
    HARDWARE,
    MODELS,
    Hardware,
    ParallelLayout,
    Transformer,
    predict,
)

# Google's figures for a v3 chip: 123 Tflop/s, 32 GiB, 900 GB/s, four links of 70 GB/s; its pod is a
# torus of two axes
V3 = Hardware(
    "v3", 123e12, 32 * 2**30, 900e9, 140e9, 2, 1024, 6.25e9, "docs.cloud.google.com/tpu/docs/v3"
)
GPT_13B = Transformer(
    "gpt-13b", 5120, 40, 40, 20480, 50257, 2048, gated=False, tied=True, positions=2048
)

MAXTEXT = "MaxText, docs/reference/models/tiering.md"
RUNS = [
    # model, chip, chips, rows a chip, length, remat, published MFU, where
    (
        "llama2-70b",
        "v5p",
        512,
        4,
        4096,
        True,
        0.654,
        f"{MAXTEXT}; rows and remat not stated there: taken as 4, full",
    ),
    (
        "llama3-70b",
        "v6e",
        256,
        5,
        8192,
        True,
        0.5033,
        f"{MAXTEXT}, recipe with 5 rows; it offloads what it keeps",
    ),
    (
        "llama3-405b",
        "v6e",
        256,
        1,
        8192,
        True,
        0.3855,
        f"{MAXTEXT}; its config has 1 row and offloads",
    ),
    (
        GPT_13B,
        V3,
        128,
        4,
        2048,
        True,
        0.544,
        "Levanter; v3-256 is 128 chips; rows taken as 4, remat as full",
    ),
    (
        "mixtral-8x7b",
        "v5p",
        128,
        36,
        4096,
        True,
        0.5256,
        f"{MAXTEXT}; rows of its dropless config for v5p-512",
    ),
    ("mixtral-8x7b", "v6e", 256, 12, 4096, True, 0.3523, f"{MAXTEXT}; its dropless config"),
    (
        "deepseek-v3",
        "h100",
        2048,
        15360 / 2048,
        4096,
        False,
        None,
        "DeepSeek-V3 report, sections 1, 3 and 4.2",
    ),
]
# its layout and batch, but 64 blocks instead of 61, as 16 stages ask for; H800s have slower links,
# its products were in 8 bits
DEEPSEEK = ParallelLayout(
    data=2,
    pipeline=16,
    expert=64,
    placement="zero1",
    schedule="dual_pipe_v",
    chunks=2,
    micro_batches=15360 // 128,
)


def deepseek_mfu():
    """Return what 180,000 H800 hours for 10^12 tokens are, of the bfloat16 peak."""
    work = dataclasses.replace(MODELS["deepseek-v3"], num_layers=61).workload()
    return 1e12 / (180e3 * 3600) * work.model_flops / work.tokens / HARDWARE["h100"].flops


def published_rows(only):
    """Yield predicted and published MFU.

    Nothing is fitted, so the ratio is what software leaves of the peaks.
    """
    for model, chip, chips, rows, length, remat, mfu, source in RUNS:
        shape = dataclasses.replace(MODELS[model], length=length)
        if only not in shape.name:
            continue
        layout = ParallelLayout(data=chips, remat=remat, gather_dtype=jnp.bfloat16)
        if mfu is None:
            mfu = deepseek_mfu()
            layout = DEEPSEEK
            shape = dataclasses.replace(shape, num_layers=64)
        told = predict(
            shape.workload(), layout, hardware=HARDWARE[chip], batch_size=int(rows * chips)
        )
        yield {
            "name": f"{shape.name} on {chips} {HARDWARE[chip].name}",
            "predicted": told.mfu,
            "published": mfu,
            "ratio": told.mfu / mfu,
            "predicted_gigabytes": told.memory.total / 1e9,
            "source": source,
        }


SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
LADDER = 10 ** (4 / 49)
"""The paper's bandwidths repeat on a ladder of this ratio, 1.2067: the first rung that reaches the
share is stated.
"""

# Streaming DiLoCo (arXiv 2501.18512), table 4: billion parameters, layers, seconds a step; Gbit/s
# for each of SHARES
PAPER = {
    (1, 24, 0.1): {
        "Data-Parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "Vanilla DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
        "Streaming DiLoCo": (1.4, 5.2, 9.1, 16.0, 28.1),
        "Streaming DiLoCo, overlapped": (1.4, 4.3, 6.2, 9.1, 11.0),
        "Streaming DiLoCo, overlapped, 4 bits": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    (10, 48, 0.8): {
        "Data-Parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "Vanilla DiLoCo": (1.7, 7.5, 16.0, 33.9, 104.8),
        "Streaming DiLoCo": (1.7, 5.2, 9.1, 13.3, 19.3),
        "Streaming DiLoCo, overlapped": (1.7, 3.6, 5.2, 6.2, 7.5),
        "Streaming DiLoCo, overlapped, 4 bits": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    (100, 108, 4.9): {
        "Data-Parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "Vanilla DiLoCo": (3.0, 11.0, 23.3, 49.4, 184.2),
        "Streaming DiLoCo": (2.4, 6.2, 9.1, 11.0, 19.3),
        "Streaming DiLoCo, overlapped": (1.7, 3.6, 4.3, 5.2, 5.2),
        "Streaming DiLoCo, overlapped, 4 bits": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}


def diloco_rows(only):
    """Yield the Gbit/s a replica needs to compute a share of the time, beside table 4 of Streaming
    DiLoCo.

    From the paper: sizes, step times, H = 100, fragments of three layers, a delay of one step where
    it overlaps, 4 bits. From its authors' bandwidth simulator: what is sent sets out during the
    backward pass, two thirds of a step. Ours: two replicas, 16 bits otherwise, and the multiple of
    the fragments that is next to H = 100. Nothing is fitted.
    """
    for (billions, layers, seconds), methods in PAPER.items():
        for name, paper in methods.items():
            if only not in name:
                continue
            way = _way(name, layers // 3)
            predicted = {
                share: 8e-9 * bandwidth_for(share, billions * 1e9, seconds, **way)
                for share in SHARES
            }
            ratios = [
                found / stated for found, stated in zip(predicted.values(), paper, strict=True)
            ]
            yield {
                "name": f"{billions}B, {name}",
                "step_seconds": seconds,
                "shares": list(SHARES),
                "predicted_gbit": list(predicted.values()),
                "paper_gbit": list(paper),
                "ratios": ratios,
                "within_a_rung": sum(1 / LADDER <= ratio <= LADDER for ratio in ratios),
            }


def bandwidth_for(
    share, num_parameters, step_seconds, *, bits, sync_every=1, fragments=1, delay=0, overlap=2 / 3
):
    """Return the bytes a second that each of two replicas has to send, so that it computes for a
    share of the time.

    Every `sync_every` steps each fragment is all-reduced in a ring. Its transfer overlaps with a
    share `overlap` of the step before, and with `delay` steps after it.
    """
    sent = num_parameters * bits / 8
    waiting = sync_every * step_seconds * (1 / share - 1)
    return sent / (waiting + fragments * (delay + overlap) * step_seconds)


def _way(name, fragments):
    if name == "Data-Parallel":
        return {"bits": 16}
    if name == "Vanilla DiLoCo":
        return {"sync_every": 100, "bits": 16}
    steps = min(
        fragments * (100 // fragments),
        fragments * -(-100 // fragments),
        key=lambda steps: abs(steps - 100),
    )
    return {
        "sync_every": steps,
        "fragments": fragments,
        "delay": 1 if "overlapped" in name else 0,
        "bits": 4 if "4 bits" in name else 16,
    }
