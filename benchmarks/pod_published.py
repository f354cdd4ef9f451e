"""Predictions beside published figures: model flops utilisation of runs, and the links that DiLoCo needs."""

import dataclasses

import jax.numpy as jnp

from shardopt.planning import Candidate, Transformer, find_hardware, find_model, predict
from shardopt.planning.diloco import bandwidth_for
from shardopt.planning.hardware import Hardware

# Google's figures for a v3 chip: 123 Tflop/s, 32 GiB, 900 GB/s, four links of 70 GB/s; its pod is a torus of two axes
V3 = Hardware("v3", 123e12, 32 * 2**30, 900e9, 140e9, 2, 1024, 6.25e9, "docs.cloud.google.com/tpu/docs/v3")
GPT_13B = Transformer("gpt-13b", 5120, 40, 40, 20480, 50257, 2048, gated=False, tied=True, positions=2048)

MAXTEXT = "MaxText, docs/reference/models/tiering.md"
RUNS = [
    # model, chip, chips, rows a chip, length, remat, published MFU, where
    ("llama2-70b", "v5p", 512, 4, 4096, True, 0.654, f"{MAXTEXT}; rows and remat not stated there: taken as 4, full"),
    ("llama3-70b", "v6e", 256, 5, 8192, True, 0.5033, f"{MAXTEXT}, recipe with 5 rows; it offloads what it keeps"),
    ("llama3-405b", "v6e", 256, 1, 8192, True, 0.3855, f"{MAXTEXT}; its config has 1 row and offloads"),
    (GPT_13B, V3, 128, 4, 2048, True, 0.544, "Levanter; v3-256 is 128 chips; rows taken as 4, remat as full"),
]


def published_rows(only):
    """Yield predicted and published MFU; nothing is fitted, so the ratio is what software leaves of the peaks."""
    for model, chip, chips, rows, length, remat, mfu, source in RUNS:
        shape = dataclasses.replace(find_model("pod", model), length=length)
        if only not in shape.name:
            continue
        layout = Candidate(data=chips, remat=remat, gather_dtype=jnp.bfloat16)
        told = predict(shape.workload(), layout, hardware=find_hardware("pod", chip), batch_size=rows * chips)
        yield {
            "name": f"{shape.name} on {chips} {find_hardware('pod', chip).name}",
            "predicted": told.mfu,
            "published": mfu,
            "ratio": told.mfu / mfu,
            "predicted_gigabytes": told.memory.total / 1e9,
            "source": source,
        }


def diloco_rows(only):
    """Yield the Gbit/s a replica needs to compute a share of the time, by method, for a 1, 10 and 100 billion model.

    Step times are those that the Streaming DiLoCo paper assumes for its simulation.
    """
    ways = {
        "data parallel": {},
        "DiLoCo H=100": {"sync_every": 100},
        "Streaming H=100 P=4 delay=5": {"sync_every": 100, "fragments": 4, "delay": 5},
        "Streaming H=100 P=4 delay=5, 4 bits": {"sync_every": 100, "fragments": 4, "delay": 5, "bits": 4},
    }
    for billions, seconds in ((1, 0.1), (10, 0.8), (100, 4.9)):
        for name, way in ways.items():
            if only not in name:
                continue
            bits = {"bits": 16} | way
            need = {
                f"gbit_for_{share:.0%}": 8e-9
                * bandwidth_for(share, num_parameters=billions * 1e9, step_seconds=seconds, **bits)
                for share in (0.5, 0.8, 0.9, 0.95, 0.99)
            }
            yield {"name": f"{billions}B, {name}", "step_seconds": seconds, **need}
