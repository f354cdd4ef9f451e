"""Devices, mesh and strategy from the options of `shardopt train`.

Options that cannot be combined are refused.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh

import shardopt as so
from shardopt.cli._communication import check_communication, combined, make_reducer
from shardopt.cli._models import check_model, strategy_arguments
from shardopt.cli._options import Pipeline, RunOptions, TrainOptions, changed_flags
from shardopt.core._arguments import check_count
from shardopt.core._errors import calling, error_text, format_error, plural
from shardopt.core._types import Devices
from shardopt.mesh import data_axes
from shardopt.pipeline import Schedule
from shardopt.pipeline._kinds import KINDS
from shardopt.planning._layout import named_builder

_AXES = ("replica", "data", "tensor", "pipeline", "context", "expert")

_MAX_DIGITS = 18
"""Maximum digits of a mesh size: no number of devices has more, and Python refuses to parse
thousands of digits.
"""

_GATHERING_PLACEMENTS = ("fsdp", "zero3")
"""The placements of hybrid that gather weights."""


def mesh_of(
    sizes: str, devices: Devices, *, pipelined: bool = False, replicas: int | None = None
) -> Mesh:
    """Return the mesh for "data=4,tensor=2" or "auto".

    Args:
      sizes: the text of --mesh.
      devices: the devices.
      pipelined: whether "auto" makes two pipeline stages.
      replicas: the size of the axis replica, or None.
    """
    if sizes == "auto":
        num_replicas = replicas or 1
        if len(devices) % num_replicas:
            problem = (
                f"{len(devices)} devices cannot be shared evenly by --replicas {num_replicas}."
            )
            fix = "choose another number of either, or name sizes with --mesh."
            raise ValueError(format_error("train", problem, fix=fix))
        pipeline = 2 if pipelined and len(devices) // num_replicas % 2 == 0 else 1
        num_remaining = len(devices) // num_replicas // pipeline
        tensor = 2 if num_remaining >= 4 and num_remaining % 2 == 0 else 1
        return so.make_mesh(replica=num_replicas, tensor=tensor, pipeline=pipeline, devices=devices)
    named_sizes = parse_mesh(sizes)
    if replicas is not None and named_sizes.get("replica", replicas) != replicas:
        problem = f"--mesh {sizes} and --replicas {replicas} disagree."
        raise ValueError(format_error("train", problem, fix="leave one of them out."))
    return so.make_mesh(**{"data": 1, "replica": replicas or 1} | named_sizes, devices=devices)


def parse_mesh(text: str) -> dict[str, int]:
    """Return the axis sizes in a text such as "data=4,tensor=2".

    Example:
      >>> parse_mesh("data=4,tensor=2")
      {'data': 4, 'tensor': 2}
    """
    sizes: dict[str, int] = {}
    problems = []
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in _AXES:
            problems.append(f"{part.strip()!r}: there is no axis {axis!r}")
        elif axis in sizes:
            problems.append(f"{part.strip()!r}: {axis} is there twice")
        elif not size.removeprefix("-").isdecimal() or len(size) > _MAX_DIGITS:
            problems.append(f"{part.strip()!r}: the size must be an integer")
        else:
            sizes[axis] = int(size)
    if problems:
        fix = (
            f"write --mesh data=4,tensor=2; the axes are {', '.join(_AXES)}, and one size may"
            " be -1."
        )
        raise ValueError(format_error("train", f"--mesh {text} cannot be read.", problems, fix))
    return sizes


@calling("train")
def check_strategy(options: TrainOptions) -> None:
    """Refuse options of train that cannot be combined, as far as this is known without devices."""
    model = options.model
    check_layout(
        options, {"--layers": model.layers, "--experts": model.experts, "--top-k": model.top_k}
    )
    check_model(model)
    check_communication(options)


@calling("train")
def check_layout(options: RunOptions, counts: Mapping[str, int | None]) -> None:
    """Refuse options of devices and pipeline that cannot be combined, and counts of the command
    that are below 1.
    """
    device_options, pipeline = options.where, options.pipeline
    all_counts = {
        "--batch-size": options.training.batch_size,
        "--micro-batches": device_options.micro_batches,
        "--chunks": pipeline.chunks,
        **counts,
    }
    for flag, number in all_counts.items():
        if number is not None:
            check_count(flag, number)
    if not options.is_hybrid and (hybrid_flags := changed_flags(pipeline)):
        problem = (
            f"{plural(len(hybrid_flags), 'option')} for --strategy hybrid;"
            f" {device_options.strategy} was asked for."
        )
        fix = "leave out what is listed, or choose --strategy hybrid."
        raise ValueError(format_error("train", problem, hybrid_flags, fix))
    _check_gather_dtype(options)
    if not options.pipeline.regather and options.placement not in _GATHERING_PLACEMENTS:
        problem = (
            f"--no-regather is for placements that gather weights; --placement {options.placement}"
            " does not."
        )
        raise ValueError(
            format_error("train", problem, fix="leave it out, or choose --placement fsdp.")
        )
    check_chunks("--schedule", _schedule_name(pipeline), pipeline.chunks)


def _check_gather_dtype(options: RunOptions) -> None:
    if options.where.gather_dtype is None or options.where.strategy == "fsdp":
        return
    if not options.is_hybrid:
        problem = (
            f"--gather-dtype is for fsdp, which gathers weights; {options.where.strategy} was asked"
            " for."
        )
        raise ValueError(
            format_error("train", problem, fix="leave it out, or choose --strategy fsdp.")
        )
    if options.placement not in _GATHERING_PLACEMENTS:
        problem = (
            f"--gather-dtype is for placements that gather weights; --placement {options.placement}"
            " does not."
        )
        raise ValueError(
            format_error("train", problem, fix="leave it out, or choose --placement fsdp.")
        )


def check_chunks(flag: str, schedule: str, chunks: int | None) -> None:
    """Refuse a number of chunks that the schedule cannot have."""
    kind = KINDS[schedule]
    if chunks not in (None, kind.chunks) and not kind.takes_chunks:
        problem = (
            f"--chunks {chunks} is for schedules that have chunks; {schedule} has"
            f" {('one', 'two')[kind.on_a_v]} a stage."
        )
        *first_names, last_name = (name for name, other in KINDS.items() if other.takes_chunks)
        fix = f"leave it out, or choose {flag} {', '.join(first_names)} or {last_name}."
        raise ValueError(error_text(problem, fix=fix))


def schedule_builder(
    name: str, chunks: int | None, *, send_ahead: bool = False
) -> Callable[[int, int], Schedule]:
    """Return the function of `so.schedules` from stages and micro-batches to a schedule, with this
    many chunks.
    """
    builder = named_builder(name, chunks)
    return so.schedules.send_ahead(builder) if send_ahead else builder


def _schedule_name(pipeline: Pipeline) -> str:
    return pipeline.schedule or "eager_one_f_one_b"


def fitted(options: TrainOptions, mesh: Mesh) -> TrainOptions:
    """Return the options with a number of layers that can be divided into stages, if none was set."""
    device_options, stages = options.where, mesh.shape["pipeline"]
    communication = options.communication
    if communication.sync_every is not None and mesh.shape.get("replica", 1) < 2:
        problem = (
            f"--sync-every {communication.sync_every} is for several replicas, and there is one."
        )
        raise ValueError(
            format_error("train", problem, fix="add --replicas 2, or leave --sync-every out.")
        )
    if communication.sync_every is not None and options.run.metrics_every is not None:
        problem = (
            "--metrics-every takes norms of one gradient, and with --sync-every the replicas train"
            " apart."
        )
        raise ValueError(format_error("train", problem, fix="leave --metrics-every out."))
    if stages > 1 and not options.is_hybrid:
        problem = (
            f"pipeline={stages} is for --strategy hybrid; {device_options.strategy} was asked for."
        )
        raise ValueError(
            format_error(
                "train", problem, fix="choose --strategy hybrid, or a --mesh without pipeline."
            )
        )
    chunks = options.pipeline.chunks or KINDS[_schedule_name(options.pipeline)].chunks
    num_parts = stages * chunks if stages > 1 else 1
    layers = options.model.layers or max(2, num_parts)
    if layers < num_parts:
        parts_text = f"{plural(stages, 'stage')} x {plural(chunks, 'chunk')} = {num_parts}"
        problem = f"--layers {layers} are too few for {parts_text}."
        fix = f"use --layers {num_parts} or more, or another --mesh, --schedule or --chunks."
        raise ValueError(format_error("train", problem, fix=fix))
    return dataclasses.replace(options, model=dataclasses.replace(options.model, layers=layers))


def make_strategy(
    options: TrainOptions, tx: optax.GradientTransformation, mesh: Mesh, model: so.BlockModel
) -> so.ShardedOptimizer:
    """Return the strategy for the options; they must have passed `check_strategy` and `fitted`."""
    communication = options.communication
    reducer = make_reducer(communication) if communication.sync_every is None else None
    return combined(communication, make_base(options, tx, mesh, model, reducer=reducer))


def make_base(
    options: RunOptions,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    model: so.BlockModel,
    *,
    reducer: so.reducers.Reducer | None = None,
    leaf_arguments: Mapping[str, Any] | None = None,
) -> so.ShardedOptimizer:
    """Return the strategy for the options, without local updates.

    Args:
      options: options that were checked.
      tx: the optimizer.
      mesh: the mesh.
      model: the model.
      reducer: the reducer of gradients, or None.
      leaf_arguments: the arguments of a strategy that describe the leaves of the model; by default
        those of train's models.
    """
    device_options, pipeline = options.where, options.pipeline
    if leaf_arguments is None:
        assert isinstance(options, TrainOptions)
        leaf_arguments = strategy_arguments(options.model)
    arguments = {"micro_batches": num_micro_batches(options, mesh), **leaf_arguments}
    if options.is_hybrid:
        return so.hybrid(
            tx,
            mesh,
            model,
            schedule=schedule_builder(
                _schedule_name(pipeline), pipeline.chunks, send_ahead=pipeline.send_ahead
            ),
            reducer=reducer,
            placement=options.placement,
            gather_dtype=device_options.gather_dtype,
            remat=pipeline.remat,
            regather=pipeline.regather,
            **arguments,
        )
    arguments |= {"gather_dtype": device_options.gather_dtype, "reducer": reducer}
    return named_strategy(device_options.strategy, tx, mesh, model, **arguments)


def named_strategy(
    name: str,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    model: so.BlockModel,
    *,
    gather_dtype: Any = None,
    reducer: so.reducers.Reducer | None = None,
    **arguments: Any,
) -> so.ShardedOptimizer:
    """Return the strategy with a name such as "zero1".

    `gather_dtype` is for fsdp, and `reducer` for ddp.
    """
    if name == "fsdp":
        return so.fsdp(tx, mesh, model, gather_dtype=gather_dtype, **arguments)
    if name == "ddp":
        return so.ddp(tx, mesh, model, reducer=reducer, **arguments)
    return so.zero(tx, mesh, model, stage=int(name.removeprefix("zero")), **arguments)


def num_micro_batches(options: RunOptions, mesh: Mesh) -> int:
    """Return the number of micro-batches.

    It is the number in the options. By default it is 1, or with a pipeline twice the number of
    stages, or the number of stages if twice does not divide the batch.
    """
    batch_size, requested, stages = (
        options.training.batch_size,
        options.where.micro_batches,
        mesh.shape["pipeline"],
    )
    axes = data_axes(mesh)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    candidates = [requested] if requested else [2 * stages, stages] if stages > 1 else [1]
    for count in candidates:
        if batch_size % (devices * count) == 0:
            return count
    pieces = devices * candidates[-1]
    pieces_text = f"{plural(devices, 'device')} along {' x '.join(axes)}"
    if candidates[-1] > 1:
        pieces_text += f" x {candidates[-1]} micro-batches"
    problem = f"--batch-size {batch_size} is not divisible by {pieces_text} = {pieces}."
    fix = f"use --batch-size {_nearest(batch_size, pieces)}, or another --mesh or --micro-batches."
    raise ValueError(format_error("train", problem, fix=fix))


def _nearest(count: int, pieces: int) -> str:
    """Return the multiples of `pieces` below and above `count`, or the first multiple."""
    below = count // pieces * pieces
    return f"{below} or {below + pieces}" if below else str(pieces)
