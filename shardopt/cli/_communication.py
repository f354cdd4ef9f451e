"""Communication of `shardopt train`: local updates and reducers from the options, and the bytes of
a step.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

import shardopt as so
from shardopt.cli._optimizer import check_keywords, read_call
from shardopt.cli._options import CommunicationOptions, TrainOptions
from shardopt.config._sync import SyncConfig
from shardopt.core._errors import plural, value_error
from shardopt.core._types import PyTree
from shardopt.mesh import spec_axes
from shardopt.planning._costs import StepTransfer

_MODEL_AXES = ("tensor", "pipeline")
"""Axes over which ddp sends no gradients."""


class SentBytes(NamedTuple):
    """Average bytes that each device sends in a step over the axes that share the batch.

    Attributes:
      sent: bytes of this run. Over the axis context they include the traffic of attention. NaN if
        the program has a loop with an unknown number of iterations.
      ddp: bytes of `so.ddp` on this mesh: one fp32 all-reduce of the gradients that a device holds.
      axes: the axes over which the bytes are sent.
      steps: the number of steps in the average: 1, or the steps between two synchronizations of
        replicas.
    """

    sent: float
    ddp: float
    axes: tuple[str, ...]
    steps: int


def measure(opt: so.ShardedOptimizer, state: so.TrainState, batch: PyTree) -> SentBytes:
    """Return the traffic, from the programs for this state and batch.

    Programs that have run are not compiled again.
    """
    batch_axes, local_updates = opt.config.axes, opt.config.local_updates
    axes = tuple(
        axis for axis in (*batch_axes.rows, *batch_axes.positions) if opt.mesh.shape[axis] > 1
    )
    num_devices = math.prod(opt.mesh.shape[axis] for axis in axes)
    gradient_bytes = sum(
        row.bytes_total / _num_parts(row.params, opt.mesh) for row in opt.config.report().rows
    )
    ddp = StepTransfer("all-reduce", "data", "gradients", gradient_bytes, 1)
    ddp_bytes = ddp.wire_bytes({"data": num_devices})

    def bytes_sent(step):
        return _bytes_sent(opt, state, batch, step, axes)

    if local_updates is None or local_updates.sync_every == 1:
        step = 0 if local_updates is None else _silent_step(local_updates)
        return SentBytes(bytes_sent(step), ddp_bytes, axes, 1)
    sync_steps, num_steps = _sync_steps(local_updates), local_updates.sync_every
    sent = [bytes_sent(step) for step in sync_steps]
    if len(sync_steps) < num_steps:
        silent_bytes = bytes_sent(_silent_step(local_updates))
        sent += [silent_bytes] * (num_steps - len(sync_steps))
    mean = sum(sent) / num_steps
    return SentBytes(mean, ddp_bytes, axes, num_steps)


def _bytes_sent(
    opt: so.ShardedOptimizer, state: so.TrainState, batch: PyTree, step: int, axes: Sequence[str]
) -> float:
    """Return the bytes that a step sends over the axes; NaN if they are unknown."""
    array = jax.device_put(jnp.asarray(step, state.step.dtype), state.step.sharding)
    program = opt.step.lower(state._replace(step=array), batch)
    audit = so.hlo.audit(program, mesh=opt.mesh, schedule=opt.config.schedule)
    return sum(
        op.wire_bytes * (math.nan if op.calls is None else op.calls)
        for op in audit.collectives
        if op.axes is None or set(op.axes) & set(axes)
    )


def _silent_step(local_updates: SyncConfig) -> int:
    """Return the number of a step without traffic between replicas, if there is such a step."""
    return local_updates.warmup_steps + local_updates.sync_every + bool(local_updates.delay)


def _sync_steps(local_updates: SyncConfig) -> list[int]:
    """Return the synchronizing steps of one round: the last step of each stride, or with a delay
    the step after it.
    """
    start = local_updates.warmup_steps + local_updates.sync_every
    return [
        start + (fragment + 1) * local_updates.stride - (0 if local_updates.delay else 1)
        for fragment in range(local_updates.fragments)
    ]


def _num_parts(spec: PartitionSpec, mesh: Mesh) -> int:
    """Return the number of parts into which tensor and pipeline shard a leaf."""
    return math.prod(mesh.shape[axis] for axis in spec_axes(spec) if axis in _MODEL_AXES)


def traffic_text(traffic: SentBytes) -> str:
    """Return a text about the bytes that each device sends in a step, compared with ddp.

    Example:
      >>> print(traffic_text(SentBytes(20_000.0, 1_000_000.0, ("replica", "data"), 50)))
      sent by each device over replica x data: 20 kB a step, 2.00% of the 1 MB of ddp
      (read off the compiled programs; mean of the 50 steps from one synchronization to the next)
    """
    attention_text = " (with the keys and values of attention)" if "context" in traffic.axes else ""
    prefix = f"sent by each device over {' x '.join(traffic.axes)}{attention_text}"
    ddp = size(round(traffic.ddp))
    if math.isnan(traffic.sent):
        return (
            f"{prefix}: unknown, as a loop of the program does not tell how often it runs; ddp"
            f" sends {ddp} a step"
        )
    average_text = ""
    if traffic.steps > 1:
        average_text = f"; mean of the {traffic.steps} steps from one synchronization to the next"
    sent, share = size(round(traffic.sent)), traffic.sent / traffic.ddp
    return (
        f"{prefix}: {sent} a step, {share:.2%} of the {ddp} of ddp\n"
        f"(read off the compiled programs{average_text})"
    )


def size(count: int) -> str:
    """Return a number of bytes with three digits: 950 bytes, 12.3 kB, 9.87 MB.

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


def make_reducer(communication: CommunicationOptions) -> so.reducers.Reducer | None:
    """Return the reducer that the options name, or None.

    It has error feedback, unless it is bf16, which only rounds, or the options switch it off.
    """
    text = communication.reducer
    if text is None:
        return None
    name, arguments = read_call("--reducer", text, example="top_k(density=0.05)")
    if name not in _REDUCERS:
        problem = f"there is no reducer {name!r}."
        *names, last = _REDUCERS
        raise value_error(problem, fix=f"choose {', '.join(names)} or {last}.")
    keywords = list(inspect.signature(_REDUCERS[name]).parameters)
    if name == "bf16":
        keywords = []
    elif "start_step" in keywords:  # --reducer-warmup-steps instead
        keywords.remove("start_step")
    note = "; --reducer-warmup-steps is for all reducers" if "start_step" in arguments else ""
    check_keywords(f"--reducer {name}", arguments, keywords, note=note)
    reducer = _REDUCERS[name](**arguments)
    if communication.reducer_warmup_steps:
        reducer = so.reducers.warm_up(reducer, communication.reducer_warmup_steps)
    if name == "bf16" and not communication.error_feedback:
        problem = (
            "--no-error-feedback has no meaning for bf16, which rounds and feeds nothing back."
        )
        raise value_error(problem, fix="leave it out.")
    if name == "bf16" or not communication.error_feedback:
        return reducer
    return so.reducers.error_feedback(reducer)


def combined(
    communication: CommunicationOptions, strategy: so.ShardedOptimizer
) -> so.ShardedOptimizer:
    """Return the strategy, with local updates if the options have them."""
    sync_every = communication.sync_every
    if sync_every is None:
        return strategy
    if communication.outer == "average":
        return so.local_sgd(
            strategy, sync_every=sync_every, warmup_steps=communication.warmup_sync_steps
        )
    return so.diloco(
        strategy,
        outer=outer_optimizer(communication),
        sync_every=sync_every,
        fragments=communication.fragments,
        delay=communication.delay,
        mix=communication.mix,
        reducer=make_reducer(communication),
    )


def outer_optimizer(communication: CommunicationOptions) -> optax.GradientTransformation:
    """Return the outer optimizer; it steps on the mean update of the replicas."""
    learning_rate, momentum = _outer_rates(communication)
    return optax.sgd(learning_rate, momentum or None, nesterov=communication.outer != "sgd")


def _outer_rates(communication: CommunicationOptions) -> tuple[float, float]:
    """Return learning rate and momentum of the outer optimizer."""
    learning_rate, momentum = (1.0, 0.0) if communication.outer == "sgd" else (0.7, 0.9)
    if communication.outer_momentum is not None:
        momentum = communication.outer_momentum
    return communication.outer_lr or learning_rate, momentum


def describe(communication: CommunicationOptions) -> list[tuple[str, str]]:
    """Return (label, line) pairs that describe local updates and reducers."""
    lines = []
    if communication.sync_every is not None:
        lines = _describe_local_updates(communication, communication.sync_every)
    reducer = make_reducer(communication)
    if reducer is not None:
        reduced = "gradients" if communication.sync_every is None else "outer gradients"
        lines.append(("sent", f"{reduced} by {reducer.name}"))
    return lines


def _describe_local_updates(
    communication: CommunicationOptions, sync_every: int
) -> list[tuple[str, str]]:
    method = "their average"
    if communication.outer != "average":
        learning_rate, momentum = _outer_rates(communication)
        method = (
            f"{communication.outer or 'nesterov'}, rate {learning_rate:g}, momentum {momentum:g}"
        )
    lines = [("replicas", f"synchronized every {plural(sync_every, 'step')}, by {method}")]
    if communication.fragments > 1 or communication.delay or communication.mix:
        streaming_text = (
            f"{plural(communication.fragments, 'fragment')}, applied"
            f" {plural(communication.delay, 'step')} after, replicas keep {communication.mix:.0%}"
            " of their own"
        )
        lines.append(("streaming", streaming_text))
    if communication.warmup_sync_steps:
        warmup_text = plural(communication.warmup_sync_steps, "step")
        lines.append(("warm-up", f"{warmup_text} of averaged gradients at first"))
    return lines


def as_sent(options: TrainOptions, step: int) -> TrainOptions:
    """Return options for a run that sends in every step the same as this run sends at `step`.

    With a warm-up of the reducer these are exact means before its end, and reduced means after it.
    """
    communication = options.communication
    changes: dict[str, Any] = {"reducer_warmup_steps": 0}
    if step // (communication.sync_every or 1) < communication.reducer_warmup_steps:
        changes |= {"reducer": None, "error_feedback": True}
    return dataclasses.replace(options, communication=dataclasses.replace(communication, **changes))
