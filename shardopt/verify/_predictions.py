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

from shardopt.core._types import PyTree
from shardopt.hlo import audit, memory
from shardopt.mesh import make_mesh
from shardopt.models import _transformer as transformer
from shardopt.planning import HARDWARE, Hardware, ParallelLayout, Transformer, trace
from shardopt.planning._costs import by_axis, footprint, step_time, traffic
from shardopt.planning._hardware import hardware_of
from shardopt.planning._layout import abstract_opt_state, place
from shardopt.planning._models import RULES
from shardopt.step._global_rows import GlobalRows
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.strategies._hybrid import hybrid
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
    left_out = ("placement", "schedule")
    options = [f"{name}={value}" for name, value in layout.items() if name not in left_out]
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
    names = ("replica", "pipeline", "context", "tensor")
    axes = {name: options[name] for name in names if name in options}
    options = options | mesh_sizes(axes, devices)
    layout = ParallelLayout(**options)
    platform, batch_size = devices[0].platform, _ROWS_PER_DEVICE * len(devices)
    shape, tx = model_shape(platform), optax.adamw(1e-3)
    model, params = transformer.model(shape), shape.abstract_params()
    batch = transformer.abstract_batch(shape, batch_size, form="targets")
    workload = trace(model, params, batch, rules=RULES, tokens=shape.length)
    placed = place(workload, layout, abstract_opt_state(workload, tx), tiled=platform == "tpu")
    transfers = traffic(placed, batch_size=batch_size)
    mesh = make_mesh(**layout.sizes, devices=devices)
    opt = hybrid(tx, mesh, model, **layout.strategy(RULES))
    program = opt.step.lower(opt.abstract_state(params), batch).compile()
    collectives = audit(program, mesh=mesh, schedule=layout.table())
    held, seconds, peak = _run(opt, shape, batch)
    pairs = {
        "held": (placed.params + placed.opt_state, held),
        "peak": (footprint(placed, batch_size=batch_size).total, memory(program).peak),
        "sent": (
            sum(by_axis(transfers, layout.sizes).values()),
            collectives.total_wire_bytes,
        ),
    }
    allowed = _CPU_TOLERANCES if platform == "cpu" else _TOLERANCES
    too_large = [
        name for name, pair in pairs.items() if not _relative_error(*pair) <= allowed[name]
    ]
    words = [f"{name} {_ratio_text(*pair)}" for name, pair in pairs.items()]
    numbers: dict[str, Any] = {
        "mesh": layout.sizes,
        "seconds_per_step": seconds,
        "peak_bytes_in_use": peak,
    }
    for name, (predicted, measured) in pairs.items():
        numbers[name] = {
            "predicted": predicted,
            "measured": measured,
            "tolerance": allowed[name],
        }
    hardware = known_hardware(devices)
    if hardware is not None:
        predicted = step_time(placed, transfers, hardware, batch_size=batch_size).total
        words.append(f"time {_ratio_text(predicted, seconds)}")
        numbers["predicted_seconds_per_step"] = predicted
    detail = f"measured/predicted: {', '.join(words)}"
    if too_large:
        detail += f"; too far: {', '.join(too_large)}"
    return Measurement(not too_large, detail, numbers)


def _run(
    opt: ShardedOptimizer, shape: Transformer, abstract_batch: PyTree
) -> tuple[int, float, int | None]:
    """Return the bytes of the state on a device, the seconds of a step, and the peak of memory if
    the device knows it.
    """
    state = opt.init(functools.partial(transformer.init, shape), jax.random.key(0))
    leaves = jax.tree.leaves((state.params, state.opt_state))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    # GPUs would add the gradients of equal tokens one after another
    draw = np.random.default_rng(0)

    def random_tokens(leaf):
        return draw.integers(shape.vocab_size, size=leaf.shape, dtype=leaf.dtype)

    batch = jax.tree.map(random_tokens, abstract_batch)
    seconds = []
    for _ in range(1 + _STEPS):
        begin = time.perf_counter()
        state, metrics = opt.step(state, GlobalRows(batch))
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
    stats = jax.local_devices()[0].memory_stats() or {}
    median_seconds = agree(np.array(statistics.median(seconds[1:])))
    return held, float(median_seconds), stats.get("peak_bytes_in_use")


def known_hardware(devices: Devices) -> Hardware | None:
    """Return the published peaks of these devices; None if they are not known."""
    if devices[0].platform == "gpu":
        kind = devices[0].device_kind.lower()
        for name, chip in HARDWARE.items():
            if name in kind:
                return chip
    return hardware_of(devices)


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
