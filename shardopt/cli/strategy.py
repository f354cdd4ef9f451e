"""What the options name: devices, mesh and strategy, and the refusal of options that do not go together."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import optax
from jax.sharding import Mesh

import shardopt as so
from shardopt.cli.communication import check_communication, combined, make_reducer
from shardopt.cli.models import check_model, strategy_arguments
from shardopt.cli.options import Pipeline, TrainOptions
from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error, plural
from shardopt.mesh import data_axes
from shardopt.pipeline import Schedule
from shardopt.runtime.processes import num_processes

Devices = Sequence[jax.Device]
_AXES = ("replica", "data", "tensor", "pipeline", "context", "expert")

_DIGITS = 18
"""No number of devices has more; and Python refuses to read thousands."""

_CHUNKS = {"interleaved": 2, "looped_breadth_first": 2, "zero_bubble": 1, "zero_bubble_lockstep": 1}
"""Schedules that can have several chunks a stage, and how many they have by default."""

_V = {"zero_bubble_v": 2, "dual_pipe_v": 2}
"""Schedules that always have two, on a V."""

_GATHER = ("fsdp", "zero3")
"""Placements of hybrid that gather weights."""


def start_devices(count: int) -> Devices:
    """Start jax and return its devices: accelerators where there are some, else `count` simulated on the CPU.

    Each of several processes has an equal share of those.
    """
    check_count("train", "--devices", count)
    so.initialize()
    processes = num_processes()
    try:
        jax.config.update("jax_num_cpu_devices", max(count // processes, 1))
    except RuntimeError:  # jax has started already, in a notebook or a test: what is there is there
        return jax.devices()
    devices = jax.devices()
    if count % processes and devices[0].platform == "cpu":
        near = max(count // processes, 1) * processes
        what = f"--devices {count} cannot be shared out evenly among {processes} processes."
        raise ValueError(format_error("train", what, fix=f"use --devices {near} or {near + processes}."))
    return devices


def mesh_of(sizes: str, devices: Devices, *, pipelined: bool = False, replicas: int | None = None) -> Mesh:
    """Return the mesh that "data=4,tensor=2" or "auto" describes; `pipelined` gives "auto" two stages."""
    if sizes == "auto":
        count = replicas or 1
        if len(devices) % count:
            what = f"{len(devices)} devices cannot be shared evenly by --replicas {count}."
            fix = "choose another number of either, or name sizes with --mesh."
            raise ValueError(format_error("train", what, fix=fix))
        pipeline = 2 if pipelined and len(devices) // count % 2 == 0 else 1
        rest = len(devices) // count // pipeline
        tensor = 2 if rest >= 4 and rest % 2 == 0 else 1
        return so.make_mesh(replica=count, tensor=tensor, pipeline=pipeline, devices=devices)
    named = parse_mesh(sizes)
    if replicas is not None and named.get("replica", replicas) != replicas:
        what = f"--mesh {sizes} and --replicas {replicas} disagree."
        raise ValueError(format_error("train", what, fix="leave one of them out."))
    return so.make_mesh(**{"data": 1, "replica": replicas or 1} | named, devices=devices)


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes in a text such as "data=4,tensor=2".

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
        elif not size.removeprefix("-").isdecimal() or len(size) > _DIGITS:
            problems.append(f"{part.strip()!r}: the size must be an integer")
        else:
            sizes[axis] = int(size)
    if problems:
        fix = f"write --mesh data=4,tensor=2; the axes are {', '.join(_AXES)}, and one size may be -1."
        raise ValueError(format_error("train", f"--mesh {text} cannot be read.", problems, fix))
    return sizes


def check_strategy(options: TrainOptions) -> None:
    """Refuse options that do not go together, as far as they can be told before there are devices."""
    where, pipeline = options.where, options.pipeline
    numbers = {
        "--batch-size": options.training.batch_size,
        "--micro-batches": where.micro_batches,
        "--chunks": pipeline.chunks,
        "--layers": options.model.layers,
        "--experts": options.model.experts,
        "--top-k": options.model.top_k,
    }
    for flag, number in numbers.items():
        if number is not None:
            check_count("train", flag, number)
    if not options.is_hybrid and (given := _given(pipeline)):
        what = f"{plural(len(given), 'option')} for --strategy hybrid; {where.strategy} was asked for."
        raise ValueError(format_error("train", what, given, "leave out what is listed, or choose --strategy hybrid."))
    check_model(options.model)
    check_communication(options)
    _check_gather_dtype(options)
    if not options.pipeline.regather and options.placement not in _GATHER:
        what = f"--no-regather is for placements that gather weights; --placement {options.placement} does not."
        raise ValueError(format_error("train", what, fix="leave it out, or choose --placement fsdp."))
    check_chunks("train", "--schedule", _schedule_name(pipeline), pipeline.chunks)


def _check_gather_dtype(options: TrainOptions) -> None:
    if options.where.gather_dtype is None or options.where.strategy == "fsdp":
        return
    if not options.is_hybrid:
        what = f"--gather-dtype is for fsdp, which gathers weights; {options.where.strategy} was asked for."
        raise ValueError(format_error("train", what, fix="leave it out, or choose --strategy fsdp."))
    if options.placement not in _GATHER:
        what = f"--gather-dtype is for placements that gather weights; --placement {options.placement} does not."
        raise ValueError(format_error("train", what, fix="leave it out, or choose --placement fsdp."))


def _given(pipeline: Pipeline) -> list[str]:
    """Return the flags that say something else than nothing."""
    default = dataclasses.asdict(Pipeline())
    values = {name: one for name, one in dataclasses.asdict(pipeline).items() if one != default[name]}
    words = {True: "--{}", False: "--no-{}"}
    flags = {name: name.replace("_", "-") for name in values}
    return [words[x].format(flags[name]) if isinstance(x, bool) else f"--{name} {x}" for name, x in values.items()]


def check_chunks(who: str, flag: str, schedule: str, chunks: int | None) -> None:
    """Refuse several chunks for a schedule that has one per stage."""
    if chunks not in (None, 2 if schedule in _V else 1) and schedule not in _CHUNKS:
        what = f"--chunks {chunks} is for schedules that have chunks; {schedule} has {'two' if schedule in _V else 'one'} a stage."
        *several, last = _CHUNKS
        fix = f"leave it out, or choose {flag} {', '.join(several)} or {last}."
        raise ValueError(format_error(who, what, fix=fix))


def schedule_builder(name: str, chunks: int | None, *, send_ahead: bool = False) -> Callable[[int, int], Schedule]:
    """Return the function of `so.schedules`, of stages and micro-batches, with as many chunks as asked."""
    make = getattr(so.schedules, name)
    make = functools.partial(make, num_chunks=chunks or _CHUNKS[name]) if name in _CHUNKS else make
    return so.schedules.send_ahead(make) if send_ahead else make


def _schedule_name(pipeline: Pipeline) -> str:
    return pipeline.schedule or "eager_one_f_one_b"


def fitted(options: TrainOptions, mesh: Mesh) -> TrainOptions:
    """Return the options with a number of layers, where none was given, that can be cut into stages."""
    where, stages = options.where, mesh.shape["pipeline"]
    asked = options.communication
    if asked.sync_every is not None and mesh.shape.get("replica", 1) < 2:
        what = f"--sync-every {asked.sync_every} is for several replicas, and there is one."
        raise ValueError(format_error("train", what, fix="add --replicas 2, or leave --sync-every out."))
    if stages > 1 and not options.is_hybrid:
        what = f"pipeline={stages} is for --strategy hybrid; {where.strategy} was asked for."
        raise ValueError(format_error("train", what, fix="choose --strategy hybrid, or a --mesh without pipeline."))
    chunks = options.pipeline.chunks or (_CHUNKS | _V).get(_schedule_name(options.pipeline), 1)
    parts = stages * chunks if stages > 1 else 1
    layers = options.model.layers or max(2, parts)
    if layers < parts:
        cut = f"{plural(stages, 'stage')} x {plural(chunks, 'chunk')} = {parts}"
        what = f"--layers {layers} are too few for {cut}."
        fix = f"use --layers {parts} or more, or another --mesh, --schedule or --chunks."
        raise ValueError(format_error("train", what, fix=fix))
    return dataclasses.replace(options, model=dataclasses.replace(options.model, layers=layers))


def make_strategy(
    options: TrainOptions, tx: optax.GradientTransformation, mesh: Mesh, model: so.BlockModel
) -> so.ShardedOptimizer:
    """Return the strategy that the options name, once they have passed `check_strategy` and `fitted`."""
    asked = options.communication
    reducer = make_reducer(asked) if asked.sync_every is None else None
    return combined(asked, make_base(options, tx, mesh, model, reducer=reducer))


def make_base(
    options: TrainOptions,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    model: so.BlockModel,
    *,
    reducer: so.reducers.Reducer | None = None,
) -> so.ShardedOptimizer:
    """Return the strategy that the options name, without local updates."""
    where, pipeline = options.where, options.pipeline
    arguments = {"micro_batches": num_micro_batches(options, mesh), **strategy_arguments(options.model)}
    if options.is_hybrid:
        return so.hybrid(
            tx,
            mesh,
            model,
            schedule=schedule_builder(_schedule_name(pipeline), pipeline.chunks, send_ahead=pipeline.send_ahead),
            reducer=reducer,
            placement=options.placement,
            gather_dtype=where.gather_dtype,
            remat=pipeline.remat,
            regather=pipeline.regather,
            **arguments,
        )
    if where.strategy == "fsdp":
        return so.fsdp(tx, mesh, model, gather_dtype=where.gather_dtype, **arguments)
    if where.strategy == "ddp":
        return so.ddp(tx, mesh, model, reducer=reducer, **arguments)
    return so.zero(tx, mesh, model, stage=int(where.strategy.removeprefix("zero")), **arguments)


def num_micro_batches(options: TrainOptions, mesh: Mesh) -> int:
    """Return how many there are: as asked, else twice as many as stages, or as many; one without a pipeline."""
    size, asked, stages = options.training.batch_size, options.where.micro_batches, mesh.shape["pipeline"]
    axes = data_axes(mesh)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    candidates = [asked] if asked else [2 * stages, stages] if stages > 1 else [1]
    for count in candidates:
        if size % (devices * count) == 0:
            return count
    pieces = devices * candidates[-1]
    cut = f"{plural(devices, 'device')} along {' x '.join(axes)}"
    if candidates[-1] > 1:
        cut += f" x {candidates[-1]} micro-batches"
    what = f"--batch-size {size} is not divisible by {cut} = {pieces}."
    fix = f"use --batch-size {_nearest(size, pieces)}, or another --mesh or --micro-batches."
    raise ValueError(format_error("train", what, fix=fix))


def _nearest(count: int, pieces: int) -> str:
    """Return the multiples of `pieces` on both sides of `count`, or the first."""
    below = count // pieces * pieces
    return f"{below} or {below + pieces}" if below else str(pieces)
