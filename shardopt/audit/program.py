"""What a compiled program says of itself: its collectives, the memory it needs, the inputs it overwrites, its flops."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from shardopt.audit.collective import Collective, read_collective
from shardopt.audit.hlo_text import Instruction, Module, arrays, attributes, nbytes, operands, parse, tiled_nbytes
from shardopt.audit.report import Audit
from shardopt.audit.walk import (
    MEGASCALE,
    Found,
    HasTicks,
    callees,
    check_schedule,
    collectives_of,
    times_taken,
    trip_count,
)
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, leaves_with_paths

Devices = tuple[jax.Device, ...]


class CanLower(Protocol):
    """A jitted function, or anything else that lowers as one does."""

    def lower(self, *args: PyTree) -> Lowered:
        """Return the program for these arguments."""
        ...


def audit(
    program: CanLower | Lowered | Compiled | str,
    *args: PyTree,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    schedule: HasTicks | None = None,
) -> Audit:
    """Read the collectives of a program: kind, mesh axes, bytes, calls, inside a loop or not.

    Nothing is run. Loops count as often as they turn, branches as if taken, a start and its done once. What is read
    is what the compiler made, which may differ from what was written: XLA:CPU widens bfloat16 and float8 before a
    collective, XLA:TPU narrows gathered weights to what its matrix units take, and all of them merge, hoist and pad.

    Args:
      program: a jitted function (or anything with `.lower(*args)`, such as `opt.step`), a `jax.stages.Lowered`, a
        `jax.stages.Compiled`, or the text of an optimised HLO module.
      *args: what a function is lowered for, arrays or `jax.ShapeDtypeStruct`s; nothing otherwise.
      mesh: names the axes: a mesh or a mapping from axis to size, last axis fastest. By default that of the
        program's or the arguments' `NamedSharding`s.
      schedule: of a pipeline, such as `opt.config.schedule`. Its passes are branches directly in the outermost loop that
        turns as often as it has ticks; a stage takes each once per micro-batch and chunk. Without it they count as taken at
        every tick.

    Returns:
      An `Audit`: `.collectives`, `.of(...)`, `.by_axis()`, `.by_kind()`, `.check(expected)`; `print` shows a table.

    Raises:
      TypeError: if `program` is nothing of these, arguments come with something that is lowered already, or
        `schedule` is not a `Schedule`.
      ValueError: if arguments are abstract and have no shardings, so that the program would be for one device of several; no
        mesh is given and none can be found, the mesh has other devices than the program or lists
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
    found = read_program("audit", program, args, mesh=mesh)
    check_schedule("audit", found.module, schedule)
    name = found.module.header.removeprefix("HloModule").split(",")[0].strip()
    read = (found.collective(one) for one in collectives_of(found.module, schedule))
    return Audit(tuple(one for one in read if one is not None), found.sizes, name)


class Program(NamedTuple):
    """A compiled program as read, and the devices it runs on.

    Attributes:
      text: of the HLO module.
      module: the same, parsed.
      sizes: mesh axis to size, last axis fastest; nothing for one device.
      replicas: devices of one slice are replicas x partitions.
      partitions: see there.
      slices: parts of the outermost axis that the data-centre network joins.
      devices: those of the mesh, where one was given or the program knows it.
    """

    text: str
    module: Module
    sizes: dict[str, int]
    replicas: int
    partitions: int
    slices: int
    devices: Devices

    def collective(self, found: Found) -> Collective | None:
        """Return what a collective sends; None if no device sends to another."""
        return read_collective(
            found, self.sizes, replicas=self.replicas, partitions=self.partitions, slices=self.slices
        )


def read_program(
    who: str,
    program: CanLower | Lowered | Compiled | str,
    args: tuple[PyTree, ...],
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None,
) -> Program:
    """Compile and parse a program, and find the mesh it was made for; arguments and errors are those of `audit`."""
    text, compiled = _compiled_text(who, program, args)
    module = parse(text)
    replicas, partitions = (_count(module.header, word) for word in ("replica_count", "num_partitions"))
    known = mesh if mesh is not None else _known_mesh(compiled, args)
    if known is None and replicas * partitions > 1 and any(collectives_of(module)):
        what = f"cannot tell the mesh of this program on {replicas * partitions} devices, none of its inputs has one."
        raise ValueError(format_error(who, what, fix="pass mesh=, the mesh it was compiled for."))
    sizes = dict(known.shape if isinstance(known, Mesh | AbstractMesh) else known or {})
    slices = _check_devices(who, sizes, replicas * partitions, several_slices=MEGASCALE in text)
    _check_order(who, mesh, compiled)
    devices = tuple(known.devices.flat) if isinstance(known, Mesh) else ()
    return Program(text, module, sizes, replicas, partitions, slices, devices)


def _compiled_text(
    who: str, program: CanLower | Lowered | Compiled | str, args: tuple[PyTree, ...]
) -> tuple[str, Compiled | None]:
    if not isinstance(program, str | Lowered | Compiled) and hasattr(program, "lower"):
        program = program.lower(*args)
        _check_placed(who, program, args)
    elif args:
        what = f"arguments belong to a function, not to a {type(program).__name__}, which is lowered already."
        raise TypeError(format_error(who, what, fix="leave them out."))
    if isinstance(program, str):
        return program, None
    compiled = program.compile() if isinstance(program, Lowered) else program
    if not isinstance(compiled, Compiled):
        what = f"cannot audit a {type(compiled).__name__}."
        fix = "pass a jitted function with its arguments, a Lowered, a Compiled, or HLO text."
        raise TypeError(format_error(who, what, fix=fix))
    text = compiled.as_text()
    if text is None:
        raise ValueError(format_error(who, "this backend does not give the text of its compiled programs."))
    return text, compiled


def _check_placed(who: str, lowered: Lowered, args: tuple[PyTree, ...]) -> None:
    """Refuse arguments that are abstract and nowhere, of which jax makes a program for one device, that sends nothing."""
    leaves = leaves_with_paths(args)
    nowhere = [
        f"argument {path}: {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None
    ]
    if not nowhere or jax.device_count() == 1:
        return
    placed = any(
        isinstance(getattr(leaf, "sharding", None), NamedSharding) for _, leaf in leaves
    )  # if only on a mesh of one
    partitions = re.search(r"mhlo.num_partitions = (\d+)", lowered.as_text())
    if not placed and partitions is not None and int(partitions[1]) == 1:
        what = "these arguments have no shardings, so the program would be for one device, and send nothing."
        fix = (
            "pass jax.ShapeDtypeStruct(shape, dtype, sharding=...), as in opt.abstract_state(); or jitted.lower(...), if "
            "one device is meant."
        )
        raise ValueError(format_error(who, what, nowhere, fix))


def _count(header: str, word: str) -> int:
    found = re.search(rf"\b{word}=(\d+)", header)
    return int(found[1]) if found else 1


def _known_mesh(compiled: Compiled | None, args: tuple[PyTree, ...]) -> Mesh | AbstractMesh | None:
    """Return the mesh of a program's shardings or its arguments'."""
    shardings = [] if compiled is None else jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    shardings += [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    return next((one.mesh for one in shardings if isinstance(one, NamedSharding)), None)


def _check_devices(who: str, sizes: dict[str, int], devices: int, *, several_slices: bool) -> int:
    """Return how many slices the program runs on, each a part of the mesh's outermost axis; refuse another mesh."""
    total = math.prod(sizes.values())
    slices = 1
    if several_slices and sizes:
        outermost = next((size for size in sizes.values() if size > 1), 1)
        slices = total // devices
        if total % devices or slices < 2 or outermost % slices:
            what = f"the program runs on {devices} devices of each of several slices, and the mesh has {sizes}."
            fix = "pass the mesh of all slices, whose outermost axis spans them."
            raise ValueError(format_error(who, what, fix=fix))
    if sizes and total != devices * slices:
        listed = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        what = f"the mesh ({listed}) has {total} devices, the program {devices}."
        raise ValueError(format_error(who, what, fix="pass the mesh that the program was compiled for."))
    return slices


def _check_order(who: str, mesh: object, compiled: Compiled | None) -> None:
    """Ids in a program are positions in the order it was compiled for: refuse a mesh that lists it otherwise."""
    if not isinstance(mesh, Mesh) or compiled is None:
        return
    # a program compiled ahead of time for machines elsewhere has no such list
    list_devices = getattr(compiled.runtime_executable(), "local_devices", list)
    order = [device.id for device in list_devices()]
    given = [device.id for device in mesh.devices.flat]
    if order and order != given and sorted(order) == sorted(given):
        what = f"the mesh lists its devices as {given}, the program was compiled for the order {order}."
        raise ValueError(format_error(who, what, fix="pass the mesh that the program was compiled for."))


class Memory(NamedTuple):
    """What one device needs to run a program, in bytes.

    Attributes:
      arguments: its inputs.
      outputs: its results, those included that are written into inputs.
      temporary: everything in between, at its peak.
      aliased: the part of the outputs that is written into donated inputs.
    """

    arguments: int
    outputs: int
    temporary: int
    aliased: int

    @property
    def peak(self) -> int:
        """Inputs, temporaries, and the outputs that have buffers of their own."""
        return self.arguments + self.temporary + self.outputs - self.aliased


def memory(compiled: Compiled) -> Memory:
    """Return the bytes per device of a `jax.stages.Compiled`, as its compiler planned them.

    Raises:
      ValueError: if the backend does not tell.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        what = "this backend does not tell how much memory a compiled program needs."
        raise ValueError(format_error("memory", what, fix="compile for cpu, gpu or tpu."))
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
    )


def argument_padding(program: Compiled | str) -> int:
    """Return by how many bytes the inputs of a program grow on a device because their layouts are tiled.

    XLA:TPU stores the last two dims of an array in tiles, of 8 x 128 numbers for fp32: shards that are thin in both pay.
    Elsewhere it is 0.
    """
    inputs = _INDEX.sub("", _header(program).partition("entry_computation_layout={")[2].partition("->")[0])
    return tiled_nbytes(inputs) - nbytes(inputs) if inputs.startswith("(") else 0


def donated(program: Compiled | str) -> dict[int, int]:
    """Return which inputs are overwritten by which outputs: flat input position to flat output position.

    Positions count the leaves of the compiled program's inputs; jax drops arguments that it does not use.

    Args:
      program: a `jax.stages.Compiled`, or HLO text.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> step = jax.jit(lambda state, batch: state + batch, donate_argnums=0)
      >>> donated(step.lower(jnp.ones(4), jnp.ones(4)).compile())
      {0: 0}
    """
    aliases = _header(program).partition("input_output_alias={")[2].partition(" }")[0]
    return {int(source): int(output or 0) for output, source in _ALIAS.findall(aliases)}


def _text(program: Compiled | str) -> str:
    return program if isinstance(program, str) else program.as_text() or ""


def _header(program: Compiled | str) -> str:
    """Return the line that tells of the whole module; programs are long, so no other is looked at."""
    found = _HEADER.search(_text(program))
    return found[0] if found else ""


_HEADER = re.compile(r"^HloModule.*", re.MULTILINE)
_INDEX = re.compile(r"/\*index=\d+\*/")
_ALIAS = re.compile(r"\{(\d*)[\d,\s]*\}: \((\d+),")


def inner_product_flops(program: Compiled | str, *, schedule: HasTicks | None = None) -> float | None:
    """Return the multiplications and additions of one device in one execution of a program.

    Counted are `dot`, `convolution` (which XLA:TPU makes of inner products; positions that only padding or dilation
    fills are left out), and the matrix products of cuBLAS. Loops count as often as they turn, of a branch the dearest.
    `compiled.cost_analysis()` counts each loop once.

    Args:
      program: a `jax.stages.Compiled`, or HLO text.
      schedule: of the pipeline that the program is, such as `opt.config.schedule`: passes are branches in a loop over its
        ticks, and count once per micro-batch and chunk. Without it they count at every tick.

    Returns:
      The flops; None if a loop with inner products does not tell how often it turns.

    Raises:
      ValueError: if no loop of the program turns as often as the schedule has ticks, or the text is not that of an HLO
        module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def five(x):
      ...     return jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=5)[0]
      >>> inner_product_flops(jax.jit(five).lower(jnp.ones((64, 64))).compile()) == 5 * 2 * 64**3
      True
    """
    module = parse(_text(program))
    check_schedule("inner_product_flops", module, schedule)
    # the outermost loop over the ticks is the schedule's: what is in it is counted without
    flops = functools.cache(lambda name, inside: _computation(module, name, flops, None if inside else schedule))
    total = flops(module.entry, False).total
    return None if math.isinf(total) else total


class _Flops(NamedTuple):
    """Flops of a computation, by whether they stand in a branch that is directly in it."""

    always: float = 0.0
    branches: float = 0.0

    @property
    def total(self) -> float:
        return self.always + self.branches


def _computation(module: Module, name: str, flops: Callable[[str, bool], _Flops], schedule: HasTicks | None) -> _Flops:
    lines = module.computations.get(name, ())
    shapes = {line.name: line.shape for line in lines}

    def one(line: Instruction) -> _Flops:
        if line.opcode in ("dot", "convolution") or (line.opcode == "custom-call" and "__cublas$" in line.rest):
            count = _convolution if line.opcode == "convolution" else _dot
            return _Flops(count(line, shapes))
        turns = trip_count(module, name, line) if line.opcode == "while" else None
        inside = schedule is None or turns == schedule.num_ticks
        inner = [flops(callee, inside) for callee in callees(line)]
        if line.opcode == "conditional":
            return _Flops(branches=max((one.total for one in inner), default=0.0))
        body = _sum(inner)
        if line.opcode != "while" or body.total == 0.0:
            return body
        if turns is None:
            return _Flops(math.inf)
        return _Flops(body.always * turns + body.branches * times_taken(turns, schedule))

    return _sum(map(one, lines))


def _sum(found: Iterable[_Flops]) -> _Flops:
    return _Flops(*(math.fsum(column) for column in zip((0.0, 0.0), *found, strict=True)))


def _dot(line: Instruction, shapes: Mapping[str, str]) -> float:
    """2 x result x contracted dims, which cuBLAS calls name in their configuration."""
    lhs = _dims(shapes[operands(line)[0]])
    told = attributes(line).get("lhs_contracting_dims", "")
    if line.opcode == "custom-call":
        found = re.search(r'lhs_contracting_dimensions\\?":\[([^\]]*)\]', line.rest)
        told = found[1] if found else str(len(lhs) - 1)
    return 2.0 * math.prod(_dims(line.shape)) * math.prod(lhs[dim] for dim in _numbers(told))


def _convolution(line: Instruction, shapes: Mapping[str, str]) -> float:
    """2 x batch x output features x input features x the (output, kernel) positions that meet an input."""
    words = attributes(line)
    dims = [_dims(shape) for shape in (*(shapes[name] for name in operands(line)[:2]), line.shape)]
    labels = re.split("_|->", words["dim_labels"])
    lhs, kernel, out = (dict(zip(names, sizes, strict=True)) for names, sizes in zip(labels, dims, strict=True))
    window = dict(part.split("=") for part in words.get("window", "").strip("{}").split())
    total = 2.0 * out["b"] * out["f"] * kernel["i"]
    for axis in filter(str.isdigit, lhs):
        here = {key: value.split("x")[int(axis)] for key, value in window.items()}
        total *= _overlaps(lhs[axis], kernel[axis], out[axis], here)
    return total


def _overlaps(size: int, kernel: int, out: int, window: Mapping[str, str]) -> int:
    """Return how many pairs of output and kernel positions read an element of the input, along one axis."""
    stride, dilation, holes = (int(window.get(key, "1")) for key in ("stride", "rhs_dilate", "lhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    if kernel == 1 and stride == 1 and holes == 1 and low == 0:
        return out
    reach = range((size - 1) * holes + 1)
    at = (o * stride + k * dilation - low for o in range(out) for k in range(kernel))
    return sum(position in reach and position % holes == 0 for position in at)


def _dims(shape: str) -> list[int]:
    return _numbers(arrays(shape)[0].partition("[")[2].rstrip("]"))


def _numbers(text: str) -> list[int]:
    return [int(one.strip(' "').replace("<=", "")) for one in text.strip("{}").split(",") if one.strip(' "')]
