"""`audit`: the collectives of a compiled program, read off the text that the compiler left behind."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardopt.audit.collective import read_collective
from shardopt.audit.hlo_text import parse
from shardopt.audit.report import Audit
from shardopt.audit.walk import MEGASCALE, HasTicks, check_schedule, collectives_of
from shardopt.core.errors import format_error


def audit(
    program: Any,
    *args: Any,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    schedule: HasTicks | None = None,
) -> Audit:
    """Read the collectives of a program: kind, mesh axes, bytes, calls, inside a loop or not.

    Nothing is run. Loops count as often as they turn, branches as if taken, a start and done pair once. What is read
    is what the compiler made, which may differ from what was written: XLA:CPU widens bfloat16 and float8 before a
    collective, XLA:TPU narrows gathered weights to what its matrix units take, and all of them merge, hoist and pad.

    Args:
      program: a jitted function (or anything with `.lower(*args)`, such as `opt.step`), a `jax.stages.Lowered`, a
        `jax.stages.Compiled`, or the text of an optimised HLO module.
      *args: what a function is lowered for, arrays or `jax.ShapeDtypeStruct`s; nothing otherwise.
      mesh: names the axes: a mesh or a mapping from axis to size, last axis fastest. By default that of the
        program's or the arguments' `NamedSharding`s.
      schedule: of a pipeline, such as `opt.config.schedule`. Its passes are branches directly in the outermost loop that
        turns as often as it has ticks; a stage takes each once a micro-batch and chunk. Without it they count as taken at
        every tick.

    Returns:
      An `Audit`: `.collectives`, `.of(...)`, `.by_axis()`, `.by_kind()`, `.check(expected)`; `print` shows a table.

    Raises:
      TypeError: if `program` is nothing of these, arguments come with something that is lowered already, or
        `schedule` is not a `Schedule`.
      ValueError: if no mesh is given and none can be found, the mesh has other devices than the program or lists
        them in another order, no loop of the program turns as often as `schedule` has ticks, or the text is not that of
        an HLO module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> import shardopt as so
      >>> mesh = so.make_mesh(data=4, tensor=2)
      >>> mean = jax.shard_map(lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
      >>> found = audit(jax.jit(mean), jnp.ones((8, 16)), mesh=mesh)
      >>> [(one.kind, one.axes, one.bytes, one.wire_bytes, one.calls) for one in found.collectives]
      [('all-reduce', ('data',), 128, 192, 1)]
    """
    if schedule is not None and not isinstance(schedule, HasTicks):
        fix = "pass opt.config.schedule, or one of so.schedules made for these stages and micro-batches."
        raise TypeError(format_error("audit", f"schedule must be a Schedule, got {schedule!r}.", fix=fix))
    text, compiled = _compiled_text(program, args)
    module = parse(text)
    replicas, partitions = (_count(module.header, word) for word in ("replica_count", "num_partitions"))
    check_schedule("audit", module, schedule)
    found = tuple(collectives_of(module, schedule))
    sizes = _axis_sizes(mesh, compiled, args)
    if sizes is None and found and replicas * partitions > 1:
        what = f"cannot tell the mesh of this program on {replicas * partitions} devices, none of its inputs has one."
        raise ValueError(format_error("audit", what, fix="pass mesh=, the mesh it was compiled for."))
    sizes = sizes or {}
    slices = 1
    if MEGASCALE in text and sizes and (slices := _slices(sizes, replicas * partitions)) < 2:
        what = (
            f"the program runs on {replicas * partitions} devices of each of several slices, and the mesh has {sizes}."
        )
        raise ValueError(
            format_error("audit", what, fix="pass the mesh of all slices, whose outermost axis spans them.")
        )
    if sizes and math.prod(sizes.values()) != replicas * partitions * slices:
        listed = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        what = f"the mesh ({listed}) has {math.prod(sizes.values())} devices, the program {replicas * partitions}."
        raise ValueError(format_error("audit", what, fix="pass the mesh that the program was compiled for."))
    _check_order(mesh, compiled)
    read = (read_collective(one, sizes, replicas=replicas, partitions=partitions, slices=slices) for one in found)
    name = module.header.removeprefix("HloModule").split(",")[0].strip()
    return Audit(tuple(one for one in read if one is not None), sizes, name)


def _slices(sizes: dict[str, int], devices: int) -> int:
    """Return how often a program of so many devices runs on the mesh, one a slice, if its outermost axis spans slices."""
    slices, rest = divmod(math.prod(sizes.values()), devices)
    outermost = next((size for size in sizes.values() if size > 1), 1)
    return slices if not rest and slices and outermost % slices == 0 else 1


def _compiled_text(program: Any, args: tuple[Any, ...]) -> tuple[str, Any]:
    if hasattr(program, "lower") and not isinstance(program, str):
        program = program.lower(*args)
    elif args:
        what = f"arguments belong to a function, not to a {type(program).__name__}, which is lowered already."
        raise TypeError(format_error("audit", what, fix="leave them out."))
    if isinstance(program, str):
        return program, None
    if hasattr(program, "compile"):
        program = program.compile()
    if not hasattr(program, "as_text"):
        what = f"cannot audit a {type(program).__name__}."
        fix = "pass a jitted function with its arguments, a Lowered, a Compiled, or HLO text."
        raise TypeError(format_error("audit", what, fix=fix))
    text = program.as_text()
    if text is None:
        raise ValueError(format_error("audit", "this backend does not give the text of its compiled programs."))
    return text, program


def _axis_sizes(mesh: Any, compiled: Any, args: tuple[Any, ...]) -> dict[str, int] | None:
    if mesh is not None:
        return dict(mesh.shape if hasattr(mesh, "shape") else mesh)
    shardings = [] if compiled is None else jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    shardings += [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return dict(meshes[0].shape) if meshes else None


def _check_order(mesh: Any, compiled: Any) -> None:
    """Ids in a program are positions in the order it was compiled for: refuse a mesh that lists it otherwise."""
    if not isinstance(mesh, Mesh) or not hasattr(compiled, "runtime_executable"):
        return
    # a program compiled ahead of time for machines elsewhere has no such list
    list_devices = getattr(compiled.runtime_executable(), "local_devices", None)
    order = [] if list_devices is None else [device.id for device in list_devices()]
    given = [device.id for device in mesh.devices.flat]
    if order and order != given and sorted(order) == sorted(given):
        what = f"the mesh lists its devices as {given}, the program was compiled for the order {order}."
        raise ValueError(format_error("audit", what, fix="pass the mesh that the program was compiled for."))


def _count(header: str, word: str) -> int:
    found = re.search(rf"\b{word}=(\d+)", header)
    return int(found[1]) if found else 1
