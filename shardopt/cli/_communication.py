"""Communication of `shardopt train`: local updates and reducers from the options, refusals, and the
bytes of a step.
"""

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
from shardopt.cli._options import (
    Communication,
    TrainOptions,
    changed_flags,
    check_keywords,
    flag,
    read_call,
)
from shardopt.config._sync import SyncConfig
from shardopt.core._arguments import check_count
from shardopt.core._errors import calling, format_error, plural
from shardopt.core._types import PyTree
from shardopt.mesh import spec_axes
from shardopt.planning import Transfer

_MODEL_AXES = ("tensor", "pipeline")
"""Axes over which ddp sends no gradients."""


class Traffic(NamedTuple):
    """Average bytes that each device sends in a step over the axes that share the batch.

    Attributes:
      sent: bytes of this run. Over the axis context they include the traffic of attention. None if
        the program has a loop with an unknown number of iterations.
      ddp: bytes of `so.ddp` on this mesh: one fp32 all-reduce of the gradients that a device holds.
      axes: the axes over which the bytes are sent.
      steps: the number of steps in the average: 1, or the steps between two synchronizations of
        replicas.
    """

    sent: float | None
    ddp: float
    axes: tuple[str, ...]
    steps: int


def measure(opt: so.ShardedOptimizer, state: so.TrainState, batch: PyTree) -> Traffic:
    """Return the traffic, from the programs for this state and batch.

    Programs that have run are not compiled again.
    """
    batch_axes = opt.config.axes
    axes = tuple(
        axis for axis in (*batch_axes.rows, *batch_axes.positions) if opt.mesh.shape[axis] > 1
    )
    num_devices = math.prod(opt.mesh.shape[axis] for axis in axes)
    gradient_bytes = sum(
        row.bytes_total / _num_parts(row.params, opt.mesh) for row in opt.config.report().rows
    )
    ddp = Transfer("all-reduce", "data", "gradients", gradient_bytes, 1).wire_bytes(
        {"data": num_devices}
    )

    schedule = opt.config.schedule

    def bytes_sent(step):
        state_at_step = state._replace(
            step=jax.device_put(jnp.asarray(step, state.step.dtype), state.step.sharding)
        )
        collectives = so.audit(
            opt.step.lower(state_at_step, batch), mesh=opt.mesh, schedule=schedule
        ).collectives
        counted_collectives = [
            op for op in collectives if op.axes is None or set(op.axes) & set(axes)
        ]
        if any(op.calls is None for op in counted_collectives):
            return None
        return sum(op.wire_bytes * (op.calls or 0) for op in counted_collectives)

    local_updates = opt.config.local_updates
    if local_updates is None or local_updates.sync_every == 1:
        return Traffic(bytes_sent(_silent_step(opt)), ddp, axes, 1)
    steps, sync_bytes = (
        local_updates.sync_every,
        [bytes_sent(step) for step in _sync_steps(local_updates)],
    )
    other_bytes = [bytes_sent(_silent_step(opt))] * (steps - len(sync_bytes))
    known_bytes = [value for value in (*sync_bytes, *other_bytes) if value is not None]
    return Traffic(
        sum(known_bytes) / steps if len(known_bytes) == steps else None, ddp, axes, steps
    )


def _silent_step(opt: so.ShardedOptimizer) -> int:
    """Return the number of a step without traffic between replicas, if there is such a step."""
    local_updates = opt.config.local_updates
    if local_updates is None:
        return 0
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


def traffic_text(traffic: Traffic) -> str:
    """Return a text about the bytes that each device sends in a step, compared with ddp.

    Example:
      >>> print(traffic_text(Traffic(20_000.0, 1_000_000.0, ("replica", "data"), 50)))
      sent by each device over replica x data: 20 kB a step, 2.00% of the 1 MB of ddp
      (read off the compiled programs; mean of the 50 steps from one synchronization to the next)
    """
    attention_text = " (with the keys and values of attention)" if "context" in traffic.axes else ""
    prefix, ddp = (
        f"sent by each device over {' x '.join(traffic.axes)}{attention_text}",
        size(round(traffic.ddp)),
    )
    if traffic.sent is None:
        return (
            f"{prefix}: unknown, as a loop of the program does not tell how often it runs; ddp"
            f" sends {ddp} a step"
        )
    average_text = (
        f"; mean of the {traffic.steps} steps from one synchronization to the next"
        if traffic.steps > 1
        else ""
    )
    amount_text = (
        f"{size(round(traffic.sent))} a step, {traffic.sent / traffic.ddp:.2%} of the {ddp} of ddp"
    )
    return f"{prefix}: {amount_text}\n(read off the compiled programs{average_text})"


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
_LOCAL_UPDATE_OPTIONS = (
    "outer",
    "outer_lr",
    "outer_momentum",
    "fragments",
    "delay",
    "mix",
    "warmup_sync_steps",
)
"""Options only for local updates."""

_OUTER_OPTIONS = ("outer_lr", "outer_momentum", "fragments", "delay", "mix")
"""Options only for an outer optimizer."""

_REDUCER_OPTIONS = {"reducer", "error_feedback", "reducer_warmup_steps"}


def check_communication(options: TrainOptions) -> None:
    """Refuse options that cannot be combined, as far as this is known without devices."""
    communication = options.communication
    _check_numbers(communication)
    if communication.sync_every is None:
        if given_flags := changed_flags(communication, _LOCAL_UPDATE_OPTIONS):
            problem = (
                f"{plural(len(given_flags), 'option')} for local updates, and no --sync-every."
            )
            fix = (
                "leave out what is listed, or give the steps between synchronizations:"
                " --sync-every 50."
            )
            raise ValueError(format_error("train", problem, given_flags, fix))
    elif communication.outer == "average":
        if given_flags := changed_flags(communication, (*_OUTER_OPTIONS, "reducer")):
            problem = (
                f"{plural(len(given_flags), 'option')} for an outer optimizer; --outer average has"
                " none."
            )
            fix = "leave out what is listed, or choose --outer sgd, which averages by default too."
            raise ValueError(format_error("train", problem, given_flags, fix))
    elif communication.warmup_sync_steps is not None:
        problem = "--warmup-sync-steps is for --outer average."
        raise ValueError(
            format_error("train", problem, fix="leave it out, or choose --outer average.")
        )
    make_reducer(communication)
    if (
        communication.reducer is not None
        and communication.sync_every is None
        and not _can_reduce_gradients(options)
    ):
        name = (
            f"hybrid with --placement {options.placement}"
            if options.is_hybrid
            else options.where.strategy
        )
        problem = (
            f"--reducer takes the mean of replicated gradients, and {name} shards them or what they"
            " update."
        )
        fix = (
            "choose --strategy ddp, or hybrid with --placement ddp or zero1; or compress outer"
            " gradients instead: --sync-every."
        )
        raise ValueError(format_error("train", problem, fix=fix))


def make_reducer(communication: Communication) -> so.reducers.Reducer | None:
    """Return the reducer that the options name, or None.

    It has error feedback, unless it is bf16, which only rounds, or the options switch it off.
    """
    text = communication.reducer
    if text is None:
        if communication.reducer_warmup_steps is not None or not communication.error_feedback:
            option = (
                "--no-error-feedback"
                if communication.reducer_warmup_steps is None
                else "--reducer-warmup-steps"
            )
            problem = f"{option} is for a reducer, and there is none."
            raise ValueError(
                format_error("train", problem, fix="leave it out, or choose one with --reducer.")
            )
        return None
    name, arguments = read_call("--reducer", text, example="top_k(density=0.05)")
    if name not in _REDUCERS:
        problem = f"there is no reducer {name!r}."
        raise ValueError(format_error("train", problem, fix=f"choose {_alternatives(_REDUCERS)}."))
    keywords = [] if name == "bf16" else list(inspect.signature(_REDUCERS[name]).parameters)
    # use --reducer-warmup-steps instead
    keywords = [keyword for keyword in keywords if keyword != "start_step"]
    note = "; --reducer-warmup-steps is for all reducers" if "start_step" in arguments else ""
    check_keywords(f"--reducer {name}", arguments, keywords, note=note)
    if name == "bf16" and not communication.error_feedback:
        problem = (
            "--no-error-feedback has no meaning for bf16, which rounds and feeds nothing back."
        )
        raise ValueError(format_error("train", problem, fix="leave it out."))
    reducer = _REDUCERS[name](**arguments)
    if communication.reducer_warmup_steps:
        reducer = so.reducers.warm_up(reducer, communication.reducer_warmup_steps)
    return (
        so.reducers.error_feedback(reducer)
        if communication.error_feedback and name != "bf16"
        else reducer
    )


def combined(communication: Communication, strategy: so.ShardedOptimizer) -> so.ShardedOptimizer:
    """Return the strategy, with local updates if the options have them."""
    if communication.sync_every is None:
        return strategy
    if communication.outer == "average":
        return so.local_sgd(
            strategy,
            sync_every=communication.sync_every,
            warmup_steps=communication.warmup_sync_steps or 0,
        )
    return so.diloco(
        strategy,
        outer=outer_optimizer(communication),
        sync_every=communication.sync_every,
        fragments=1 if communication.fragments is None else communication.fragments,
        delay=communication.delay or 0,
        mix=communication.mix or 0.0,
        reducer=make_reducer(communication),
    )


def outer_optimizer(communication: Communication) -> optax.GradientTransformation:
    """Return the outer optimizer; it steps on the mean update of the replicas."""
    learning_rate, momentum, nesterov = _outer_numbers(communication)
    return optax.sgd(learning_rate, momentum=momentum or None, nesterov=nesterov)


def describe(communication: Communication) -> list[tuple[str, str]]:
    """Return (label, line) pairs that describe local updates and reducers."""
    lines = []
    if communication.sync_every is not None:
        method = "their average" if communication.outer == "average" else _outer_text(communication)
        lines.append(
            (
                "replicas",
                f"synchronized every {plural(communication.sync_every, 'step')}, by {method}",
            )
        )
        if (communication.fragments or 1) > 1 or communication.delay or communication.mix:
            fragments_text = (
                f"{plural(communication.fragments or 1, 'fragment')}, applied"
                f" {plural(communication.delay or 0, 'step')} after"
            )
            lines.append(
                (
                    "streaming",
                    f"{fragments_text}, replicas keep {communication.mix or 0:.0%} of their own",
                )
            )
        if communication.warmup_sync_steps:
            lines.append(
                (
                    "warm-up",
                    (
                        f"{plural(communication.warmup_sync_steps, 'step')} of averaged gradients"
                        " at first"
                    ),
                )
            )
    if (reducer := make_reducer(communication)) is not None:
        reduced = "gradients" if communication.sync_every is None else "outer gradients"
        lines.append(("sent", f"{reduced} by {reducer.name}"))
    return lines


def with_meaning(saved: Communication, options: TrainOptions) -> Communication:
    """Return saved options, without options that have no meaning under the current ones."""
    current, dropped = options.communication, set()
    if current.sync_every is None:
        dropped |= set(_LOCAL_UPDATE_OPTIONS)
        if not _can_reduce_gradients(options):
            dropped |= _REDUCER_OPTIONS
    elif current.outer == "average":
        dropped |= {*_OUTER_OPTIONS, *_REDUCER_OPTIONS}
    else:
        dropped |= {"warmup_sync_steps"}
    if current.outer != saved.outer:
        dropped |= {"outer_lr", "outer_momentum"}
    if (current.sync_every is None) != (saved.sync_every is None):
        dropped |= _REDUCER_OPTIONS  # the reducer would compress other gradients
    if current.reducer != saved.reducer:
        dropped |= _REDUCER_OPTIONS - {"reducer"}
    return dataclasses.replace(saved, **{name: getattr(Communication(), name) for name in dropped})


def as_sent(options: TrainOptions, step: int) -> TrainOptions:
    """Return options for a run that sends in every step the same as this run sends at `step`.

    With a warm-up of the reducer these are exact means before its end, and reduced means after it.
    """
    communication = options.communication
    num_means = step // (communication.sync_every or 1)
    if num_means >= (communication.reducer_warmup_steps or 0):
        new_communication = dataclasses.replace(communication, reducer_warmup_steps=None)
    else:
        new_communication = dataclasses.replace(
            communication, reducer=None, error_feedback=True, reducer_warmup_steps=None
        )
    return dataclasses.replace(options, communication=new_communication)


def _outer_numbers(communication: Communication) -> tuple[float, float, bool]:
    nesterov = communication.outer != "sgd"
    default_rate, default_momentum = (0.7, 0.9) if nesterov else (1.0, 0.0)
    return (
        communication.outer_lr or default_rate,
        default_momentum if communication.outer_momentum is None else communication.outer_momentum,
        nesterov,
    )


def _outer_text(communication: Communication) -> str:
    learning_rate, momentum, nesterov = _outer_numbers(communication)
    return f"{'nesterov' if nesterov else 'sgd'}, rate {learning_rate:g}, momentum {momentum:g}"


@calling("train")
def _check_numbers(communication: Communication) -> None:
    for name in (
        "replicas",
        "sync_every",
        "fragments",
        "delay",
        "warmup_sync_steps",
        "reducer_warmup_steps",
    ):
        if (number := getattr(communication, name)) is not None:
            check_count(flag(name), number, minimum=0 if name == "delay" or "warmup" in name else 1)
    if communication.outer_lr is not None and not communication.outer_lr > 0:
        raise ValueError(f"train: --outer-lr must be above 0, got {communication.outer_lr}.")
    if communication.outer_momentum is not None and not 0 <= communication.outer_momentum < 1:
        raise ValueError(
            "train: --outer-momentum must be at least 0 and below 1, got"
            f" {communication.outer_momentum}."
        )


def _can_reduce_gradients(options: TrainOptions) -> bool:
    return options.placement == "ddp" or (options.is_hybrid and options.placement == "zero1")


def _alternatives(names: Iterable[str]) -> str:
    *first_names, last = names
    return f"{', '.join(first_names)} or {last}"
