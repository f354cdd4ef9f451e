"""What is sent: local updates and reducers as the options name them, refusals, and the bytes of a step."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

import shardopt as so
from shardopt.cli.options import Communication, TrainOptions, check_keywords, read_call
from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree
from shardopt.engine.config import SyncConfig
from shardopt.mesh import spec_axes
from shardopt.planning import Transfer

_INSIDE = ("tensor", "pipeline")
"""Axes over which ddp sends nothing of its own."""


class Traffic(NamedTuple):
    """Bytes that each device sends in a step over the axes that share the batch, on average.

    Attributes:
      sent: of this run, over context with what attention sends; None where a loop of the program does not tell how often it runs.
      ddp: of `so.ddp` on this mesh: one fp32 all-reduce of the gradients that a device holds.
      axes: the axes that they are sent over.
      steps: over how many steps the average is taken: 1, or those between two synchronizations of replicas.
    """

    sent: float | None
    ddp: float
    axes: tuple[str, ...]
    steps: int


def measure(opt: so.ShardedOptimizer, state: so.TrainState, batch: PyTree) -> Traffic:
    """Read the traffic off the programs of this state and batch; programs that have run are not compiled again."""
    shared = opt.config.axes
    axes = tuple(axis for axis in (*shared.rows, *shared.positions) if opt.mesh.shape[axis] > 1)
    size = math.prod(opt.mesh.shape[axis] for axis in axes)
    held = sum(row.bytes_total / _cuts(row.params, opt.mesh) for row in opt.config.report().rows)
    ddp = Transfer("all-reduce", "data", "gradients", held, 1).wire_bytes({"data": size})

    schedule = opt.config.schedule

    def sent(step):
        now = state._replace(step=jax.device_put(jnp.asarray(step, state.step.dtype), state.step.sharding))
        found = so.audit(opt.step.lower(now, batch), mesh=opt.mesh, schedule=schedule).collectives
        counted = [one for one in found if one.axes is None or set(one.axes) & set(axes)]
        if any(one.calls is None for one in counted):
            return None
        return sum(one.wire_bytes * (one.calls or 0) for one in counted)

    sync = opt.config.local_updates
    if sync is None or sync.sync_every == 1:
        return Traffic(sent(_silent_step(opt)), ddp, axes, 1)
    steps, syncing = sync.sync_every, [sent(step) for step in _sync_steps(sync)]
    between = [sent(_silent_step(opt))] * (steps - len(syncing))
    known = [one for one in (*syncing, *between) if one is not None]
    return Traffic(sum(known) / steps if len(known) == steps else None, ddp, axes, steps)


def _silent_step(opt: so.ShardedOptimizer) -> int:
    """Return a step in which replicas with local updates send nothing, if there is one."""
    sync = opt.config.local_updates
    return 0 if sync is None else sync.warmup_steps + sync.sync_every + (1 if sync.delay else 0)


def _sync_steps(sync: SyncConfig) -> list[int]:
    """Return the steps of one round that send something: after each stride, or in the step after if it may take long."""
    begin = sync.warmup_steps + sync.sync_every
    return [begin + (i + 1) * sync.stride - (0 if sync.delay else 1) for i in range(sync.fragments)]


def _cuts(spec: PartitionSpec, mesh: Mesh) -> int:
    """Return into how many parts tensor and pipeline shard a leaf."""
    return math.prod(mesh.shape[axis] for axis in spec_axes(spec) if axis in _INSIDE)


def traffic_text(traffic: Traffic) -> str:
    """Return in words what each device sends in a step, and what ddp would.

    Example:
      >>> print(traffic_text(Traffic(20_000.0, 1_000_000.0, ("replica", "data"), 50)))
      sent by each device over replica x data: 20 kB a step, 2.00% of the 1 MB of ddp
      (read off the compiled programs; mean of the 50 steps from one synchronization to the next)
    """
    keys = " (with the keys and values of attention)" if "context" in traffic.axes else ""
    where, ddp = f"sent by each device over {' x '.join(traffic.axes)}{keys}", size(round(traffic.ddp))
    if traffic.sent is None:
        return f"{where}: unknown, as a loop of the program does not tell how often it runs; ddp sends {ddp} a step"
    spread = f"; mean of the {traffic.steps} steps from one synchronization to the next" if traffic.steps > 1 else ""
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


_REDUCERS: dict[str, Callable[..., so.reducers.Reducer]] = {
    "bf16": functools.partial(so.reducers.exact, jnp.bfloat16),
    "int8": so.reducers.int8,
    "sign": so.reducers.sign,
    "top_k": so.reducers.top_k,
    "power_sgd": so.reducers.power_sgd,
}
_LOCAL_UPDATES = ("outer", "outer_lr", "outer_momentum", "fragments", "delay", "mix", "warmup_sync_steps")
"""Options of local updates only."""

_OUTER = ("outer_lr", "outer_momentum", "fragments", "delay", "mix")
"""Options of an outer optimizer only."""

_REDUCING = {"reducer", "error_feedback", "reducer_warmup_steps"}


def check_communication(options: TrainOptions) -> None:
    """Refuse what does not go together, as far as it can be told before there are devices."""
    asked = options.communication
    _check_numbers(asked)
    if asked.sync_every is None:
        if given := _given(asked, _LOCAL_UPDATES):
            what = f"{plural(len(given), 'option')} for local updates, and no --sync-every."
            fix = "leave out what is listed, or give the steps between synchronizations: --sync-every 50."
            raise ValueError(format_error("train", what, given, fix))
    elif asked.outer == "average":
        if given := _given(asked, (*_OUTER, "reducer")):
            what = f"{plural(len(given), 'option')} for an outer optimizer; --outer average has none."
            fix = "leave out what is listed, or choose --outer sgd, which averages by default too."
            raise ValueError(format_error("train", what, given, fix))
    elif asked.warmup_sync_steps is not None:
        what = "--warmup-sync-steps is for --outer average."
        raise ValueError(format_error("train", what, fix="leave it out, or choose --outer average."))
    make_reducer(asked)
    if asked.reducer is not None and asked.sync_every is None and not _can_reduce_gradients(options):
        name = f"hybrid with --placement {options.placement}" if options.is_hybrid else options.where.strategy
        what = f"--reducer takes the mean of replicated gradients, and {name} shards them or what they update."
        fix = "choose --strategy ddp, or hybrid with --placement ddp or zero1; or compress outer gradients instead: --sync-every."
        raise ValueError(format_error("train", what, fix=fix))


def make_reducer(asked: Communication) -> so.reducers.Reducer | None:
    """Return the reducer that was asked for, with error feedback unless it rounds only, or that was declined."""
    text = asked.reducer
    if text is None:
        if asked.reducer_warmup_steps is not None or not asked.error_feedback:
            flag = "--no-error-feedback" if asked.reducer_warmup_steps is None else "--reducer-warmup-steps"
            what = f"{flag} is for a reducer, and there is none."
            raise ValueError(format_error("train", what, fix="leave it out, or choose one with --reducer."))
        return None
    name, arguments = read_call("--reducer", text, example="top_k(density=0.05)")
    if name not in _REDUCERS:
        what = f"there is no reducer {name!r}."
        raise ValueError(format_error("train", what, fix=f"choose {_either(_REDUCERS)}."))
    taken = [] if name == "bf16" else list(inspect.signature(_REDUCERS[name]).parameters)
    taken = [one for one in taken if one != "start_step"]  # --reducer-warmup-steps is for all of them
    late = "; --reducer-warmup-steps is for all reducers" if "start_step" in arguments else ""
    check_keywords(f"--reducer {name}", arguments, taken, note=late)
    if name == "bf16" and not asked.error_feedback:
        what = "--no-error-feedback has no meaning for bf16, which rounds and feeds nothing back."
        raise ValueError(format_error("train", what, fix="leave it out."))
    reducer = _REDUCERS[name](**arguments)
    if asked.reducer_warmup_steps:
        reducer = so.reducers.warm_up(reducer, asked.reducer_warmup_steps)
    return so.reducers.error_feedback(reducer) if asked.error_feedback and name != "bf16" else reducer


def combined(asked: Communication, strategy: so.ShardedOptimizer) -> so.ShardedOptimizer:
    """Return the strategy, with local updates if they were asked for."""
    if asked.sync_every is None:
        return strategy
    if asked.outer == "average":
        return so.local_sgd(strategy, sync_every=asked.sync_every, warmup_steps=asked.warmup_sync_steps or 0)
    return so.diloco(
        strategy,
        outer=outer_optimizer(asked),
        sync_every=asked.sync_every,
        fragments=1 if asked.fragments is None else asked.fragments,
        delay=asked.delay or 0,
        mix=asked.mix or 0.0,
        reducer=make_reducer(asked),
    )


def outer_optimizer(asked: Communication) -> optax.GradientTransformation:
    """Return the outer optimizer, which steps on the mean update of the replicas."""
    rate, momentum, nesterov = _outer_numbers(asked)
    return optax.sgd(rate, momentum=momentum or None, nesterov=nesterov)


def describe(asked: Communication) -> list[tuple[str, str]]:
    """Return what is shown of local updates and reducers: a label and a line each."""
    lines = []
    if asked.sync_every is not None:
        how = "their average" if asked.outer == "average" else _outer_text(asked)
        lines.append(("replicas", f"synchronized every {plural(asked.sync_every, 'step')}, by {how}"))
        if (asked.fragments or 1) > 1 or asked.delay or asked.mix:
            parts = f"{plural(asked.fragments or 1, 'fragment')}, applied {plural(asked.delay or 0, 'step')} after"
            lines.append(("streaming", f"{parts}, replicas keep {asked.mix or 0:.0%} of their own"))
        if asked.warmup_sync_steps:
            lines.append(("warm-up", f"{plural(asked.warmup_sync_steps, 'step')} of averaged gradients at first"))
    if (reducer := make_reducer(asked)) is not None:
        what = "gradients" if asked.sync_every is None else "outer gradients"
        lines.append(("sent", f"{what} by {reducer.name}"))
    return lines


def with_meaning(asked: Communication, options: TrainOptions) -> Communication:
    """Return saved options without those that have no meaning under what is asked for now."""
    now, drop = options.communication, set()
    if now.sync_every is None:
        drop |= set(_LOCAL_UPDATES)
        if not _can_reduce_gradients(options):
            drop |= _REDUCING
    elif now.outer == "average":
        drop |= {*_OUTER, *_REDUCING}
    else:
        drop |= {"warmup_sync_steps"}
    if now.outer != asked.outer:
        drop |= {"outer_lr", "outer_momentum"}
    if (now.sync_every is None) != (asked.sync_every is None):
        drop |= _REDUCING  # it would compress something else
    if now.reducer != asked.reducer:
        drop |= _REDUCING - {"reducer"}
    return dataclasses.replace(asked, **{name: getattr(Communication(), name) for name in drop})


def as_sent(options: TrainOptions, step: int) -> TrainOptions:
    """Return the options of a run that sends in every step what this one sends at `step`: exact means, or reduced ones."""
    asked = options.communication
    calls = step // (asked.sync_every or 1)
    if calls >= (asked.reducer_warmup_steps or 0):
        sent = dataclasses.replace(asked, reducer_warmup_steps=None)
    else:
        sent = dataclasses.replace(asked, reducer=None, error_feedback=True, reducer_warmup_steps=None)
    return dataclasses.replace(options, communication=sent)


def _outer_numbers(asked: Communication) -> tuple[float, float, bool]:
    nesterov = asked.outer != "sgd"
    rate, momentum = (0.7, 0.9) if nesterov else (1.0, 0.0)
    return asked.outer_lr or rate, momentum if asked.outer_momentum is None else asked.outer_momentum, nesterov


def _outer_text(asked: Communication) -> str:
    rate, momentum, nesterov = _outer_numbers(asked)
    return f"{'nesterov' if nesterov else 'sgd'}, rate {rate:g}, momentum {momentum:g}"


def _check_numbers(asked: Communication) -> None:
    for name in ("replicas", "sync_every", "fragments", "delay", "warmup_sync_steps", "reducer_warmup_steps"):
        if (number := getattr(asked, name)) is not None:
            check_count("train", _flag(name), number, least=0 if name == "delay" or "warmup" in name else 1)
    if asked.outer_lr is not None and not asked.outer_lr > 0:
        raise ValueError(f"train: --outer-lr must be above 0, got {asked.outer_lr}.")
    if asked.outer_momentum is not None and not 0 <= asked.outer_momentum < 1:
        raise ValueError(f"train: --outer-momentum must be at least 0 and below 1, got {asked.outer_momentum}.")


def _given(asked: Communication, names: Iterable[str]) -> list[str]:
    return [f"{_flag(name)} {value}" for name in names if (value := getattr(asked, name)) is not None]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _can_reduce_gradients(options: TrainOptions) -> bool:
    return options.placement == "ddp" or (options.is_hybrid and options.placement == "zero1")


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
