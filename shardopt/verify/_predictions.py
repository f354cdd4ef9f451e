"""Rows that compare the predictions of `so.plan` with the compiled step: bytes held, bytes sent,
and seconds.
"""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.hlo import audit, memory
from shardopt.mesh import make_mesh
from shardopt.models import _transformer as transformer
from shardopt.planning import HARDWARE, Hardware, Layout, Transformer, trace
from shardopt.planning._costs import by_axis, footprint, step_time, traffic
from shardopt.planning._hardware import hardware_of
from shardopt.planning._layout import abstract_opt_state, place
from shardopt.planning._models import RULES
from shardopt.strategies import hybrid
from shardopt.verify._rows import Devices, Measurement, Row, agree, mesh_sizes

_ROWS_PER_DEVICE = 4
_STEPS = 3
_CPU_TOLERANCES = {"held": 0.01, "peak": 0.3, "sent": 0.15}
_TOLERANCES = {"held": 0.01, "peak": 1.0, "sent": 1.0}
"""Largest relative error of a prediction. Other compilers than XLA:CPU may plan temporaries and
collectives differently.
"""

_PIPELINE = {"pipeline": 2, "schedule": "eager_one_f_one_b", "micro_batches": 4}

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"placement": "fsdp"},
    {"placement": "ddp"},
    {"placement": "zero1"},
    {"placement": "fsdp", **_PIPELINE},
    {"placement": "fsdp", "tensor": 2},
    {"placement": "zero2", "micro_batches": 2},
    {"placement": "fsdp", "replica": 2},
    {"placement": "fsdp", "context": 2},
)


def prediction_rows() -> list[Row]:
    """Return one row for each layout."""
    return [
        Row("predictions", _name(layout), functools.partial(measure_prediction, layout))
        for layout in LAYOUTS
    ]


def _name(layout: dict[str, Any]) -> str:
    options = [
        f"{name}={value}" for name, value in layout.items() if name not in ("placement", "schedule")
    ]
    return " ".join([layout["placement"], *options])


def model_shape(platform: str) -> Transformer:
    """Return a transformer of a million parameters on CPU, and of a hundred million elsewhere."""
    if platform == "cpu":
        return Transformer(
            "small", 128, 4, 8, 384, 512, 64, dtype=jnp.float32, fused_attention=False
        )
    return Transformer("medium", 1024, 8, 8, 3072, 8192, 1024)


def measure_prediction(options: dict[str, Any], devices: Devices) -> Measurement:
    """Compile and run a step, and compare it with the predictions of the cost model."""
    axes = {
        axis: options[axis]
        for axis in ("replica", "pipeline", "context", "tensor")
        if axis in options
    }
    layout = Layout(
        **mesh_sizes(axes, devices), **{name: options[name] for name in options if name not in axes}
    )
    platform, hardware = devices[0].platform, known_hardware(devices)
    shape, batch_size, tx = (
        model_shape(platform),
        _ROWS_PER_DEVICE * len(devices),
        optax.adamw(1e-3),
    )
    abstract_batch = transformer.abstract_batch(shape, batch_size, form="targets")
    workload = trace(
        transformer.model(shape),
        shape.abstract_params(),
        abstract_batch,
        rules=RULES,
        tokens=shape.length,
    )
    placed = place(workload, layout, abstract_opt_state(workload, tx), tiled=platform == "tpu")
    transfers = traffic(placed, batch_size=batch_size)
    mesh = make_mesh(**layout.sizes, devices=devices)
    opt = hybrid(tx, mesh, transformer.model(shape), **layout.strategy(RULES))
    program = opt.step.lower(opt.abstract_state(shape.abstract_params()), abstract_batch).compile()
    planned, sent = (
        memory(program),
        audit(program, mesh=mesh, schedule=layout.table()).total_wire_bytes,
    )
    measured, seconds, peak = _run(opt, shape, abstract_batch, devices)
    compared = {
        "held": (placed.params + placed.opt_state, measured),
        "peak": (footprint(placed, batch_size=batch_size).total, planned.peak),
        "sent": (sum(by_axis(transfers, layout.sizes).values()), sent),
    }
    allowed = _CPU_TOLERANCES if platform == "cpu" else _TOLERANCES
    errors = {name: _relative_error(*pair) for name, pair in compared.items()}
    too_large = [name for name, error in errors.items() if not error <= allowed[name]]
    words = [f"{name} {_ratio_text(*pair)}" for name, pair in compared.items()]
    numbers: dict[str, Any] = {
        "mesh": layout.sizes,
        "seconds_per_step": seconds,
        "peak_bytes_in_use": peak,
    }
    numbers |= {
        name: {"predicted": pair[0], "measured": pair[1], "tolerance": allowed[name]}
        for name, pair in compared.items()
    }
    if hardware is not None:
        predicted = step_time(placed, transfers, hardware, batch_size=batch_size).total
        words.append(f"time {_ratio_text(predicted, seconds)}")
        numbers["predicted_seconds_per_step"] = predicted
    detail = f"measured/predicted: {', '.join(words)}" + (
        f"; too far: {', '.join(too_large)}" if too_large else ""
    )
    return Measurement(not too_large, detail, numbers)


def _run(
    opt, shape: Transformer, abstract_batch, devices: Devices
) -> tuple[int, float, int | None]:
    """Return the bytes of the state on a device, the seconds of a step, and the peak of memory if
    the device knows it.
    """
    state = opt.init(functools.partial(transformer.init, shape), jax.random.key(0))
    shards = [
        leaf.addressable_shards[0].data for leaf in jax.tree.leaves((state.params, state.opt_state))
    ]
    held = sum(shard.nbytes for shard in shards)
    # GPUs would add the gradients of equal tokens one after another
    draw = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda leaf: draw.integers(shape.vocab_size, size=leaf.shape, dtype=leaf.dtype),
        abstract_batch,
    )
    seconds = []
    for _ in range(1 + _STEPS):
        begin = time.perf_counter()
        state, metrics = opt.step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
    stats = jax.local_devices()[0].memory_stats() or {}
    return (
        held,
        float(agree(np.array(statistics.median(seconds[1:])))),
        stats.get("peak_bytes_in_use"),
    )


def known_hardware(devices: Devices) -> Hardware | None:
    """Return the published peaks of these devices; None if they are not known."""
    kind = devices[0].device_kind.lower()
    gpus = [
        chip for name, chip in HARDWARE.items() if name in kind and devices[0].platform == "gpu"
    ]
    return gpus[0] if gpus else hardware_of(devices)


def _relative_error(predicted: float, measured: float | None) -> float:
    if not predicted and not measured:
        return 0.0
    if not predicted or not measured:
        return float("inf")
    return max(measured / predicted, predicted / measured) - 1


def _ratio_text(predicted: float, measured: float | None) -> str:
    if not predicted:
        return "none" if not measured else "more than none"
    return "unknown" if measured is None else f"{measured / predicted:.2f}"
