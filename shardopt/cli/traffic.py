"""What a device sends in a step, read off the compiled programs, and what it would send under ddp."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import shardopt as so
from shardopt.mesh import data_axes

_INSIDE = ("tensor", "pipeline")
"""Axes over which ddp sends nothing of its own."""


class Traffic(NamedTuple):
    """Bytes that each device sends in a step over the axes replica and data, on average.

    Attributes:
      sent: of this run; None where a loop of the program does not tell how often it runs.
      ddp: of `so.ddp` on this mesh: one fp32 all-reduce of the gradients that a device holds.
      axes: the axes that they are sent over.
      steps: over how many steps the average is taken: 1, or those between two agreements of replicas.
    """

    sent: float | None
    ddp: float
    axes: tuple[str, ...]
    steps: int


def measure(opt: so.ShardedOptimizer, state: Any, batch: Any) -> Traffic:
    """Read the traffic off the programs of this state and batch; programs that have run are not compiled again."""
    axes = tuple(axis for axis in data_axes(opt.mesh) if opt.mesh.shape[axis] > 1)
    size = math.prod(opt.mesh.shape[axis] for axis in axes)
    held = sum(row.bytes_whole / _cuts(row.params, opt.mesh) for row in opt.config.report().rows)
    ddp = 2 * (size - 1) / size * held

    program: Any = opt.step
    schedule = opt.config.schedule

    def sent(step):
        now = state._replace(step=jax.device_put(jnp.asarray(step, state.step.dtype), state.step.sharding))
        found = so.audit(program.lower(now, batch), mesh=opt.mesh, schedule=schedule).collectives
        counted = [one for one in found if one.axes is None or set(one.axes) & set(axes)]
        if any(one.calls is None for one in counted):
            return None
        return sum(one.wire_bytes * (one.calls or 0) for one in counted)

    steps = getattr(opt.config, "sync_every", 1)
    if steps == 1:
        return Traffic(sent(_quiet(opt)), ddp, axes, 1)
    agreeing = [sent(step) for step in _agreeing(opt.config)]
    between = [sent(_quiet(opt))] * (steps - len(agreeing))
    known = [one for one in (*agreeing, *between) if one is not None]
    return Traffic(sum(known) / steps if len(known) == steps else None, ddp, axes, steps)


def _quiet(opt: so.ShardedOptimizer) -> int:
    """Return a step in which replicas that train apart send nothing, if there is one."""
    config = opt.config
    if not hasattr(config, "sync_every"):
        return 0
    return config.warmup_steps + config.sync_every + (1 if config.delay else 0)


def _agreeing(config: Any) -> list[int]:
    """Return the steps of one round that send something: after each stride, or in the step after if it may take long."""
    begin, stride = config.warmup_steps + config.sync_every, config.sync_every // config.fragments
    return [begin + (i + 1) * stride - (0 if config.delay else 1) for i in range(config.fragments)]


def _cuts(spec: Any, mesh: Any) -> int:
    """Return into how many parts tensor and pipeline cut a leaf."""
    names = [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))]
    return math.prod(mesh.shape[name] for name in names if name in _INSIDE)


def traffic_text(traffic: Traffic) -> str:
    """Return in words what each device sends in a step, beside what ddp sends.

    Example:
      >>> print(traffic_text(Traffic(20_000.0, 1_000_000.0, ("replica", "data"), 50)))
      sent by each device over replica x data: 20 kB a step, 2.00% of the 1 MB of ddp
      (read off the compiled programs; mean of the 50 steps from one agreement to the next)
    """
    where, ddp = f"sent by each device over {' x '.join(traffic.axes)}", size(round(traffic.ddp))
    if traffic.sent is None:
        return f"{where}: unknown, as a loop of the program does not tell how often it runs; ddp sends {ddp} a step"
    spread = f"; mean of the {traffic.steps} steps from one agreement to the next" if traffic.steps > 1 else ""
    share = f"{size(round(traffic.sent))} a step, {traffic.sent / traffic.ddp:.2%} of the {ddp} of ddp"
    return f"{where}: {share}\n(read off the compiled programs{spread})"


def size(count: int) -> str:
    """Return a number of bytes in three digits: 950 bytes, 12.3 kB, 9.87 MB.

    Example:
      >>> size(950), size(12_340), size(9_870_000)
      ('950 bytes', '12.3 kB', '9.87 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"
