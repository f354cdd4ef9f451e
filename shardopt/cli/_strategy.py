"""Devices, mesh and strategy from the options of `shardopt train`.

Options that cannot be combined are refused.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import optax
from jax.sharding import Mesh

import shardopt as so
from shardopt.cli._conditions import check_conditions
from shardopt.cli._options import RunOptions, TrainOptions, check_numbers
from shardopt.core import Devices, Rules, plural, value_error
from shardopt.mesh import data_axes, size_along
from shardopt.models import gpt
from shardopt.pipeline._kinds import KINDS
from shardopt.planning._layout import named_builder

_AXES = ("replica", "data", "tensor", "pipeline", "context", "expert")

_MAX_DIGITS = 18
"""Maximum digits of a mesh size: no number of devices has more, and Python refuses to parse
thousands of digits.
"""


def mesh_of(sizes: str, devices: Devices, *, pipelined: bool = False) -> Mesh:
    """Return the mesh for "data=4,tensor=2" or "auto".

    Args:
      sizes: the text of --mesh.
      devices: the devices.
      pipelined: whether "auto" makes two pipeline stages.
    """
    if sizes == "auto":
        pipeline = 2 if pipelined and len(devices) % 2 == 0 else 1
        num_remaining = len(devices) // pipeline
        tensor = 2 if num_remaining >= 4 and num_remaining % 2 == 0 else 1
        return so.make_mesh(tensor=tensor, pipeline=pipeline, devices=devices)
    axes = {"data": 1} | parse_mesh(sizes)
    count = math.prod(axes.values())
    if min(axes.values()) > 0 and count != len(devices):
        problem = f"--mesh {sizes} needs {plural(count, 'device')}, but there are {len(devices)}."
        fix = f"make one size -1, choose sizes whose product is {len(devices)}"
        fix += f", or use --devices {count}." if devices[0].platform == "cpu" else "."
        raise value_error(problem, fix=fix)
    return so.make_mesh(**axes, devices=devices)


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
        raise value_error(f"--mesh {text} cannot be read.", problems, fix)
    return sizes


def check_options(options: RunOptions) -> None:
    """Refuse options that cannot be combined, as far as this is known without devices."""
    for group in vars(options).values():
        check_numbers(group)
    check_conditions(options)


def fitted(options: TrainOptions, mesh: Mesh) -> TrainOptions:
    """Return the options with a number of layers that can be divided into stages, if none was set."""
    stages = mesh.shape["pipeline"]
    if stages > 1 and not options.is_hybrid:
        problem = f"pipeline={stages} is for --strategy hybrid; {options.placement} was asked for."
        raise value_error(problem, fix="choose --strategy hybrid, or a --mesh without pipeline.")
    chunks = KINDS[options.schedule].chunks
    num_parts = stages * chunks if stages > 1 else 1
    layers = options.model.layers or max(2, num_parts)
    if layers < num_parts:
        parts_text = f"{plural(stages, 'stage')} x {plural(chunks, 'chunk')} = {num_parts}"
        fix = f"use --layers {num_parts} or more, or another --mesh or --schedule."
        raise value_error(f"--layers {layers} is too few for {parts_text}.", fix=fix)
    model = options.model
    if model.dim % (2 * model.heads):
        problem = f"--dim {model.dim} cannot be cut into --heads {model.heads} of an even width."
        fix = f"use --dim {_nearest(model.dim, 2 * model.heads)}, or another number of --heads."
        raise value_error(problem, fix=fix)
    return dataclasses.replace(options, model=dataclasses.replace(model, layers=layers))


def make_strategy(
    options: RunOptions,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    model: so.BlockModel,
    *,
    rules: Rules = gpt.rules,
) -> so.ShardedOptimizer:
    """Return the strategy for the options.

    Args:
      options: options that have passed `check_options`, and for `train` `fitted`.
      tx: the optimizer.
      mesh: the mesh.
      model: the model.
      rules: the rules of the model's leaves.
    """
    arguments = vars(options.where) | vars(options.pipeline)
    arguments |= {
        "rules": rules,
        "micro_batches": num_micro_batches(options, mesh),
        "placement": options.placement,
        "schedule": named_builder(options.schedule),
    }
    return named_strategy(options.where.strategy, tx, mesh, model, arguments)


def named_strategy(
    name: str,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    model: so.BlockModel,
    arguments: Mapping[str, Any],
) -> so.ShardedOptimizer:
    """Return the strategy with a name such as "zero1", with the arguments that it takes."""
    if name.startswith("zero"):
        strategy = functools.partial(so.zero, stage=int(name.removeprefix("zero")))
    else:
        strategy = getattr(so, name)
    keywords = {
        name: arguments[name]
        for name, parameter in inspect.signature(strategy).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name in arguments
    }
    return strategy(tx, mesh, model, **keywords)


def num_micro_batches(options: RunOptions, mesh: Mesh) -> int:
    """Return the number of micro-batches.

    It is the number in the options. By default it is 1, or with a pipeline twice the number of
    stages, or the number of stages if twice does not divide the batch.
    """
    batch_size = options.training.batch_size
    stages = mesh.shape["pipeline"]
    requested = options.where.micro_batches
    axes = data_axes(mesh)
    devices = size_along(mesh.shape, axes)
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
    raise value_error(problem, fix=fix)


def _nearest(count: int, pieces: int) -> str:
    """Return the multiples of `pieces` below and above `count`, or the first multiple."""
    below = count // pieces * pieces
    return f"{below} or {below + pieces}" if below else str(pieces)
