"""Read a compiled program: its collectives, its memory and its flops."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from shardopt.core import (
    Devices,
    PyTree,
    calling,
    format_error,
    leaves_with_paths,
    type_error,
    value_error,
)
from shardopt.core._tracebacks import api_boundary
from shardopt.hlo._collective import Collective, read_collective
from shardopt.hlo._hlo_text import (
    TUPLE_INDEX,
    Instruction,
    Module,
    WindowDim,
    array_shape,
    attributes,
    nbytes,
    numbers,
    operands,
    parse,
    sizes_of_program,
    tiled_nbytes,
    window_dims,
)
from shardopt.hlo._report import Audit
from shardopt.hlo._walk import (
    MEGASCALE,
    CollectiveSite,
    callees,
    check_schedule,
    collectives_of,
    times_taken,
    trip_count,
    unread_starts,
)
from shardopt.hlo.proof._prove import source_of
from shardopt.hlo.proof._shardings import known_mesh, mesh_sizes
from shardopt.hlo.proof._text import text_of
from shardopt.pipeline import Schedule


class CanLower(Protocol):
    """A jitted function, or any object with the same `lower` method."""

    def lower(self, *args: PyTree) -> Lowered:
        """Return the program for these arguments."""
        ...


@api_boundary
@calling("audit")
def audit(
    program: CanLower | Lowered | Compiled | str,
    *args: PyTree,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    schedule: Schedule | None = None,
) -> Audit:
    """Read the collectives of a program: kind, mesh axes, bytes, calls, inside a loop or not.

    Nothing runs.

    Args:
      program: a jitted function (or anything with `.lower(*args)`, such as `opt.step`), a
        `jax.stages.Lowered`, a `jax.stages.Compiled`, or the text of an optimised HLO module.
      *args: arguments of a function, arrays or `jax.ShapeDtypeStruct`s; empty if the program is
        lowered already.
      mesh: names of the axes: a mesh or a mapping from axis to size, last axis fastest. By default
        the mesh of the `NamedSharding`s of the program or the arguments.
      schedule: the schedule of a pipeline, such as `opt.config.schedule`. Its passes are branches
        directly in the outermost loop with as many iterations as the schedule has ticks. A stage
        takes each branch once per micro-batch and chunk. Without `schedule` they count in every
        tick.

    Returns:
      An `Audit`: `.collectives`, `.of(...)`, `.by_axis()`, `.by_kind()`; `print` shows a table.

    Raises:
      TypeError: if `program` has another type, or arguments are passed with a program that is
        lowered already.
      TypeError: if `schedule` is not a `Schedule`.
      ValueError: if arguments are abstract and have no shardings, so the program would be for one
        device of several.
      ValueError: if no mesh is passed and none can be read from the program.
      ValueError: if the mesh has other devices than the program, or lists them in another order.
      ValueError: if no loop of the program runs as often as `schedule` has ticks.
      ValueError: if the text is not the text of an HLO module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> import shardopt as so
      >>> mesh = so.make_mesh(data=4, tensor=2)
      >>> mean = jax.shard_map(lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
      >>> (reduction,) = audit(jax.jit(mean), jnp.ones((8, 16)), mesh=mesh).collectives
      >>> reduction.kind, reduction.axes, reduction.bytes, reduction.wire_bytes, reduction.calls
      ('all-reduce', ('data',), 128, 192, 1)

    Note:
      Collectives in loops count with the trip counts, branches as always taken, a start and its
      done as one collective. The compiled program may differ from the written one. XLA:CPU widens
      bfloat16 and float8 before a collective. XLA:TPU narrows gathered weights to the dtype of its
      matrix units. All compilers merge, hoist and pad collectives.
    """
    if schedule is not None and not isinstance(schedule, Schedule):
        fix = (
            "pass opt.config.schedule, or one of so.schedules made for these stages and"
            " micro-batches."
        )
        raise type_error(f"schedule must be a Schedule, got {schedule!r}.", fix=fix)
    parsed = read_program(program, args, mesh=mesh)
    check_schedule(parsed.module, schedule)
    name = parsed.module.header.removeprefix("HloModule").split(",")[0].strip()
    collectives = (parsed.collective(site) for site in collectives_of(parsed.module, schedule))
    listed = tuple(collective for collective in collectives if collective is not None)
    source = (
        parsed.text
        if parsed.compiled is None
        else source_of(parsed.compiled, parsed.lowered, parsed.text)
    )
    return Audit(listed, parsed.sizes, name, unread_starts(parsed.module), source)


class CompiledProgram(NamedTuple):
    """A parsed program and its devices.

    Attributes:
      text: text of the HLO module.
      module: the parsed text.
      sizes: mesh axis to size, last axis fastest; empty for one device.
      replicas: number of replicas. A slice has replicas x partitions devices.
      partitions: number of partitions.
      slices: number of slices along the outermost axis, joined by the data-centre network.
      devices: devices of the mesh; empty if the mesh is unknown or abstract.
      compiled: the compiled program; None for a text.
      lowered: the program that XLA was given; None if it is unknown.
    """

    text: str
    module: Module
    sizes: dict[str, int]
    replicas: int
    partitions: int
    slices: int
    devices: Devices
    compiled: Compiled | None
    lowered: Lowered | None

    def collective(self, site: CollectiveSite) -> Collective | None:
        """Return the collective at a site; None if no device sends to another."""
        return read_collective(
            site, self.sizes, replicas=self.replicas, partitions=self.partitions, slices=self.slices
        )


def read_program(
    program: CanLower | Lowered | Compiled | str,
    args: tuple[PyTree, ...],
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None,
) -> CompiledProgram:
    """Compile and parse a program, and find its mesh.

    Arguments and errors are the same as in `audit`.
    """
    text, compiled, lowered = _compiled_text(program, args)
    module = parse(text)
    replicas, partitions = sizes_of_program(module)
    program_mesh = known_mesh(mesh, _shardings(compiled, args))
    if program_mesh is None and replicas * partitions > 1 and any(collectives_of(module)):
        problem = (
            f"cannot tell the mesh of this program on {replicas * partitions} devices, none of its"
            " inputs has one."
        )
        raise value_error(problem, fix="pass mesh=, the mesh it was compiled for.")
    sizes = mesh_sizes(program_mesh)
    slices = _check_devices(sizes, replicas * partitions, several_slices=MEGASCALE in text)
    _check_order(mesh, compiled)
    devices = tuple(program_mesh.devices.flat) if isinstance(program_mesh, Mesh) else ()
    return CompiledProgram(
        text, module, sizes, replicas, partitions, slices, devices, compiled, lowered
    )


def _compiled_text(
    program: CanLower | Lowered | Compiled | str, args: tuple[PyTree, ...]
) -> tuple[str, Compiled | None, Lowered | None]:
    if not isinstance(program, str | Lowered | Compiled) and hasattr(program, "lower"):
        try:
            inspect.signature(program.lower).bind(*args)
        except TypeError as error:
            fix = "pass the arguments of the function too: so.hlo.audit(opt.step, state, batch)."
            raise type_error(f"{error}.", fix=fix) from None
        program = program.lower(*args)
        _check_placed(program, args)
    elif args and isinstance(program, str | Lowered | Compiled):
        problem = (
            f"arguments belong to a function, not to a {type(program).__name__}, which is lowered"
            " already."
        )
        raise type_error(problem, fix="leave them out.")
    if isinstance(program, str):
        return program, None, None
    compiled = program.compile() if isinstance(program, Lowered) else program
    if not isinstance(compiled, Compiled):
        fix = (
            "pass a jitted function with its arguments, such as opt.step, a Lowered, a Compiled, or"
            " HLO text."
        )
        raise type_error(f"cannot audit a {type(compiled).__name__}.", fix=fix)
    lowered = program if isinstance(program, Lowered) else None
    text = text_of(compiled, lowered)
    if text is None:
        raise value_error("this backend does not give the text of its compiled programs.")
    return text, compiled, lowered


def _check_placed(lowered: Lowered, args: tuple[PyTree, ...]) -> None:
    """Raise an error for abstract arguments without shardings: jax compiles for one device, without
    collectives.
    """
    leaves = leaves_with_paths(args)
    unplaced = [
        f"argument {path}: {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None
    ]
    if not unplaced or jax.device_count() == 1:
        return
    # a NamedSharding on a mesh of one device counts as well
    is_placed = any(
        isinstance(getattr(leaf, "sharding", None), NamedSharding) for _, leaf in leaves
    )
    partitions = re.search(r"mhlo.num_partitions = (\d+)", lowered.as_text())
    if not is_placed and partitions is not None and int(partitions[1]) == 1:
        problem = (
            "these arguments have no shardings, so the program would be for one device, and send"
            " nothing."
        )
        fix = (
            "pass jax.ShapeDtypeStruct(shape, dtype, sharding=...), as in opt.abstract_state(); or"
            " jitted.lower(...), if one device is meant."
        )
        raise value_error(problem, unplaced, fix)


def _shardings(compiled: Compiled | None, args: tuple[PyTree, ...]) -> list[Any]:
    """Return the shardings of a program and its arguments; None for an argument that has none."""
    of_args = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    if compiled is None:
        return of_args
    return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)) + of_args


def _check_devices(sizes: dict[str, int], devices: int, *, several_slices: bool) -> int:
    """Return the number of slices, which are parts of the mesh's outermost axis.

    Raise an error for another mesh.
    """
    total = math.prod(sizes.values())
    slices = 1
    if several_slices and sizes:
        outermost = next((size for size in sizes.values() if size > 1), 1)
        slices = total // devices
        if total % devices or slices < 2 or outermost % slices:
            problem = (
                f"the program runs on {devices} devices of each of several slices, and the mesh has"
                f" {sizes}."
            )
            fix = "pass the mesh of all slices, whose outermost axis spans them."
            raise value_error(problem, fix=fix)
    if sizes and total != devices * slices:
        listed = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        problem = f"the mesh ({listed}) has {total} devices, the program {devices}."
        raise value_error(problem, fix="pass the mesh that the program was compiled for.")
    return slices


def _check_order(mesh: object, compiled: Compiled | None) -> None:
    """Raise an error if the mesh has another device order: ids in a program are positions in the
    program's order.
    """
    if not isinstance(mesh, Mesh) or compiled is None:
        return
    # a program that was compiled ahead of time for other machines has no such list
    list_devices = getattr(compiled.runtime_executable(), "local_devices", list)
    program_order = [device.id for device in list_devices()]
    mesh_order = [device.id for device in mesh.devices.flat]
    if program_order != mesh_order and sorted(program_order) == sorted(mesh_order):
        problem = (
            f"the mesh lists its devices as {mesh_order}, the program was compiled for the order"
            f" {program_order}."
        )
        raise value_error(problem, fix="pass the mesh that the program was compiled for.")


class Memory(NamedTuple):
    """The memory that one device needs to run a program, in bytes.

    Attributes:
      arguments: bytes of the inputs.
      outputs: bytes of the results, including results that overwrite inputs.
      temporary: bytes of temporary buffers, at their peak.
      aliased: the part of the outputs that overwrites donated inputs.
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
    """Return the bytes per device that the compiler planned for a `jax.stages.Compiled`.

    Raises:
      ValueError: if the backend does not report them.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        problem = "this backend does not tell how much memory a compiled program needs."
        raise ValueError(format_error("memory", problem, fix="compile for cpu, gpu or tpu."))
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
    )


def argument_padding(text: str) -> int:
    """Return the bytes of padding in the inputs of a program on one device.

    XLA:TPU stores the last two dims of an array in tiles, of 8 x 128 numbers for fp32. Shards that
    are smaller than a tile are padded. Other platforms add no padding.
    """
    listed = text.partition("entry_computation_layout={")[2].partition("->")[0]
    inputs = TUPLE_INDEX.sub("", listed)
    return tiled_nbytes(inputs) - nbytes(inputs) if inputs.startswith("(") else 0


@calling("inner_product_flops")
def inner_product_flops(
    program: Compiled | str, *, schedule: Schedule | None = None
) -> float | None:
    """Return the multiplications and additions in inner products of one device in one execution of
    a program.

    Args:
      program: a `jax.stages.Compiled`, or HLO text.
      schedule: the schedule of a pipeline, such as `opt.config.schedule`. Passes are branches in a
        loop over its ticks, and count once per micro-batch and chunk. Without `schedule` they count
        in every tick.

    Returns:
      The flops; None if the trip count of a loop with inner products is unknown.

    Raises:
      ValueError: if no loop of the program runs as often as the schedule has ticks.
      ValueError: if the text is not the text of an HLO module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def five(x):
      ...     return jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=5)[0]
      >>> inner_product_flops(jax.jit(five).lower(jnp.ones((64, 64))).compile()) == 5 * 2 * 64**3
      True

    Note:
      `dot`, `convolution` and the matrix products of cuBLAS are counted. XLA:TPU compiles inner
      products to convolutions; their positions in padding or dilation are not counted. Loops count
      with their trip counts, branches as their most expensive one. `compiled.cost_analysis()`
      counts each loop once.
    """
    module = parse(program if isinstance(program, str) else program.as_text() or "")
    check_schedule(module, schedule)
    # the outermost loop over the ticks belongs to the schedule; loops inside it are counted without
    # the schedule
    flops = functools.cache(
        lambda name, inside: _computation(module, name, flops, None if inside else schedule)
    )
    total = flops(module.entry, False).total
    return None if math.isinf(total) else total


class _Flops(NamedTuple):
    """Flops of a computation: outside of branches, and in the branches directly in it."""

    always: float = 0.0
    branches: float = 0.0

    @property
    def total(self) -> float:
        return self.always + self.branches


def _computation(
    module: Module, name: str, flops: Callable[[str, bool], _Flops], schedule: Schedule | None
) -> _Flops:
    lines = module.computations.get(name, ())
    shapes = {line.name: line.shape for line in lines}

    def line_flops(line: Instruction) -> _Flops:
        if line.opcode in ("dot", "convolution") or (
            line.opcode == "custom-call" and "__cublas$" in line.arguments
        ):
            count = _convolution if line.opcode == "convolution" else _dot
            return _Flops(count(line, shapes))
        iterations = trip_count(module, name, line) if line.opcode == "while" else None
        # Inside of the loop over ticks, loops with as many turns are no loops over ticks.
        in_tick_loop = schedule is None or iterations == schedule.num_ticks
        inner = [flops(callee, in_tick_loop) for callee in callees(line)]
        if line.opcode == "conditional":
            # Branches are counted apart: a stage takes them less often than the loop turns.
            return _Flops(branches=max((branch.total for branch in inner), default=0.0))
        body = _sum(inner)
        if line.opcode != "while" or body.total == 0.0:
            return body
        if iterations is None:
            return _Flops(math.inf)
        return _Flops(body.always * iterations + body.branches * times_taken(iterations, schedule))

    return _sum(map(line_flops, lines))


def _sum(terms: Iterable[_Flops]) -> _Flops:
    return _Flops(*(math.fsum(column) for column in zip((0.0, 0.0), *terms, strict=True)))


def _dot(line: Instruction, shapes: Mapping[str, str]) -> float:
    """Return 2 x result x contracted dims.

    Calls of cuBLAS name the contracted dims in their configuration.
    """
    lhs = array_shape(shapes[operands(line)[0]])
    contracting = attributes(line).get("lhs_contracting_dims", "")
    if line.opcode == "custom-call":
        match = re.search(r'lhs_contracting_dimensions\\?":\[([^\]]*)\]', line.arguments)
        contracting = match[1] if match else str(len(lhs) - 1)
    return (
        2.0
        * math.prod(array_shape(line.shape))
        * math.prod(lhs[dim] for dim in numbers(contracting))
    )


def _convolution(line: Instruction, shapes: Mapping[str, str]) -> float:
    """Return 2 x batch x output features x input features x the (output, kernel) positions that
    read an input.
    """
    values = attributes(line)
    dims = [
        array_shape(shape) for shape in (*(shapes[name] for name in operands(line)[:2]), line.shape)
    ]
    labels = re.split("_|->", values["dim_labels"])
    lhs, kernel, out = (
        dict(zip(names, sizes, strict=True)) for names, sizes in zip(labels, dims, strict=True)
    )
    window = window_dims(values)
    total = 2.0 * out["b"] * out["f"] * kernel["i"]
    for dim in filter(str.isdigit, lhs):
        # Positions in padding and between dilated elements multiply zeros, so they do not count.
        total *= _overlaps(lhs[dim], kernel[dim], out[dim], window[int(dim)])
    return total


def _overlaps(size: int, kernel: int, out: int, window: WindowDim) -> int:
    """Return how many pairs of output and kernel positions read an element of the input, along one
    dim.
    """
    if kernel == 1 and window.stride == 1 and window.spread == 1 and window.low == 0:
        # The usual case in closed form: each output position reads one element.
        return out
    read_positions = range(0, (size - 1) * window.spread + 1, window.spread)
    return sum(
        i * window.stride + j * window.dilation - window.low in read_positions
        for i in range(out)
        for j in range(kernel)
    )
