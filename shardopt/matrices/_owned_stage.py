"""Run units of work at their owners: an all-to-all sends inputs, each device runs its units, an
all-to-all returns outputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from shardopt.collectives import all_to_all
from shardopt.config._config import StrategyConfig
from shardopt.core import Arrays
from shardopt.core._axis import global_view
from shardopt.matrices._blockwise import match_variables
from shardopt.matrices._owned_tasks import CutLeaves, OwnedStage, OwnedTask, Transfer
from shardopt.mesh import size_along, spec_axes
from shardopt.trace._parts import Trace, jaxpr_of_part

Buffers = dict[np.dtype, jax.Array]
UnitFunction = Callable[..., Arrays]
Retrace = Callable[[CutLeaves], Trace]
"""Makes the trace of the update in which these leaves have a single block."""


class _Slot(NamedTuple):
    """The place of a piece of a value in the row that its owner exchanges with each device."""

    dtype: np.dtype
    start: int
    piece_shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.piece_shape)


class _Unit(NamedTuple):
    """A unit at its owner.

    Attributes:
      task: the index of its task.
      block: the index of its block.
      program: the index of its program.
      number: its index among the units of its program, on all owners.
      inputs: the slot of each input; None if it is not sent.
      outputs: the slot of each output; None if it is not sent.
    """

    task: int
    block: int
    program: int
    number: int
    inputs: list[_Slot | None]
    outputs: list[_Slot | None]


def run_stage(
    config: StrategyConfig, stage: OwnedStage, retrace: Retrace, args: list[Arrays]
) -> list[Arrays]:
    """Return the outputs of every task, from the inputs of every task.

    In the global view.
    """
    if not stage.is_local:
        return _run_on_owners(config, stage, retrace, args)
    return [
        _run_locally(config, stage, owned_task, retrace, task_args)
        for owned_task, task_args in zip(stage.tasks, args, strict=True)
    ]


def _run_locally(
    config: StrategyConfig, stage: OwnedStage, owned_task: OwnedTask, retrace: Retrace, args: Arrays
) -> Arrays:
    """Run a task where its blocks are: one block after another, so that each is computed alone."""

    def local(args: Arrays) -> Arrays:
        (run,) = _unit_functions(stage, [owned_task], retrace)
        blocks = [
            run(
                *(
                    _take_block(x, transfer, block)
                    for x, transfer in zip(args, owned_task.inputs, strict=True)
                )
            )
            for block in range(owned_task.blocks)
        ]
        return [
            _join_blocks(pieces, transfer)
            for *pieces, transfer in zip(*blocks, owned_task.outputs, strict=True)
        ]

    specs, out_specs = (
        [transfer.spec for transfer in transfers]
        for transfers in (owned_task.inputs, owned_task.outputs)
    )
    return jax.shard_map(
        local, mesh=config.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False
    )(args)


def _run_on_owners(
    config: StrategyConfig, stage: OwnedStage, retrace: Retrace, args: list[Arrays]
) -> list[Arrays]:
    local = functools.partial(_plan_exchange(config, stage).run, retrace)
    specs = [[transfer.spec for transfer in owned_task.inputs] for owned_task in stage.tasks]
    out_specs = [[transfer.spec for transfer in owned_task.outputs] for owned_task in stage.tasks]
    return jax.shard_map(
        local, mesh=config.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False
    )(args)


def stage_bytes(config: StrategyConfig, stage: OwnedStage) -> tuple[int, int]:
    """Return the bytes that each device sends to owners and back, and how many of them are padding.

    All rows are padded to the length of the longest row.
    """
    exchange = _plan_exchange(config, stage)
    row = sum(
        total * dtype.itemsize for lengths in exchange.totals for dtype, total in lengths.items()
    )
    slots = [
        slot
        for units in exchange.units_of_owners
        for unit in units
        for slot in (*unit.inputs, *unit.outputs)
        if slot is not None
    ]
    carried = sum(math.prod(slot.piece_shape) * slot.dtype.itemsize for slot in slots)
    count = exchange.count
    return (count - 1) * row, (count - 1) * (count * row - carried) // count


class _Program(NamedTuple):
    """A program that units run.

    Attributes:
      task: a task with this program.
      units: its units on all owners, in the order of their numbers.
      numbers: the numbers of each owner's units, [owners, the most units of an owner]. An owner
        with fewer units gets a number that is out of range.
    """

    task: OwnedTask
    units: list[_Unit]
    numbers: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Exchange:
    """The exchange between devices and owners, as each device runs it.

    Devices whose units have the same programs run the same branch. Units of one program differ only
    in their numbers.

    Attributes:
      stage: the tasks.
      sizes: the sizes of the axes of owners.
      units_of_owners: the units of every owner, ordered by program.
      totals: the row lengths of inputs and of outputs, by dtype.
    """

    stage: OwnedStage
    sizes: Mapping[str, int]
    units_of_owners: list[list[_Unit]]
    totals: tuple[dict[np.dtype, int], dict[np.dtype, int]]

    @property
    def count(self) -> int:
        """The number of owners."""
        return math.prod(self.sizes.values())

    @functools.cached_property
    def programs(self) -> list[_Program]:
        """The programs, in the order of their indices."""
        programs = []
        for i, task in enumerate({task.key: task for task in self.stage.tasks}.values()):
            numbers = [
                [unit.number for unit in units if unit.program == i]
                for units in self.units_of_owners
            ]
            units = [unit for units in self.units_of_owners for unit in units if unit.program == i]
            # `len(units)` is out of range: `_combine_owners` drops it, `_select_unsent` clips it.
            table = np.full((self.count, max(map(len, numbers))), len(units))
            for owner, unit_numbers in enumerate(numbers):
                table[owner, : len(unit_numbers)] = unit_numbers
            programs.append(_Program(task, sorted(units, key=lambda unit: unit.number), table))
        return programs

    def run(self, retrace: Retrace, args: list[Arrays]) -> list[Arrays]:
        """Return the outputs of every task from its inputs, on a device."""
        axes = tuple(self.sizes)
        tasks = self.stage.tasks

        def exchange(buffers: Buffers) -> Buffers:
            return {dtype: all_to_all(x, axes, 0, 0) for dtype, x in buffers.items()}

        # Three devices, units A, B, C; a device holds a third of each matrix:
        #
        #           device 0    device 1    device 2
        # before    A0 B0 C0    A1 B1 C1    A2 B2 C2
        # received  A           B           C          all_to_all: row i of a device goes to owner i
        # run       f(A)        f(B)        f(C)       alone: its bits do not depend on N
        # returned  A0 B0 C0    A1 B1 C1    A2 B2 C2   all_to_all of the results
        device = jax.lax.axis_index(axes)
        # For each program the numbers of this device's units, filled up with a number out of range.
        device_numbers = [jnp.asarray(program.numbers)[device] for program in self.programs]
        inputs = [self.pieces_for(units, args) for units in self.units_of_owners]
        received = exchange(_pack_buffers(inputs, self.totals[0]))
        unsent_args = [
            _select_unsent(tasks, program.units, args, unit_numbers)
            for program, unit_numbers in zip(self.programs, device_numbers, strict=True)
        ]
        branches, branch_of_owner = self.branches(_unit_functions(self.stage, tasks, retrace))
        # No collective is inside of a branch: devices are in different branches, and would wait for
        # ever.
        outputs, unsent_outputs = jax.lax.switch(
            jnp.asarray(branch_of_owner)[device], branches, received, unsent_args
        )
        shared = [
            [_combine_owners(x, unit_numbers, len(program.units), axes) for x in values]
            for values, unit_numbers, program in zip(
                unsent_outputs, device_numbers, self.programs, strict=True
            )
        ]
        return self.join(exchange(outputs), shared)

    def branches(
        self, functions: Sequence[UnitFunction]
    ) -> tuple[list[Callable[..., tuple[Buffers, list[Arrays]]]], np.ndarray]:
        """Return `branch(received, unsent_args)` for each mixture of programs, and the index of the
        branch of each owner.
        """
        # Owners with the same mixture of programs also have the same slots: these are handed out in
        # the order of programs. So one owner's units stand for all of them, and XLA compiles a
        # branch for each mixture, not for each device.
        examples: dict[tuple[int, ...], list[_Unit]] = {}
        for units in self.units_of_owners:
            examples.setdefault(_mixture(units), units)
        indices = [list(examples).index(_mixture(units)) for units in self.units_of_owners]
        return [
            functools.partial(self.run_units, functions, units) for units in examples.values()
        ], np.array(indices)

    def pieces_for(
        self, units: Sequence[_Unit], args: list[Arrays]
    ) -> list[tuple[_Slot, jax.Array]]:
        """Return this device's pieces of the inputs of an owner's units."""
        return [
            (
                slot,
                _take_block(
                    args[unit.task][j], self.stage.tasks[unit.task].inputs[j], unit.block
                ).reshape(1, -1),
            )
            for unit in units
            for j, slot in enumerate(unit.inputs)
            if slot is not None
        ]

    def run_units(
        self,
        functions: Sequence[UnitFunction],
        units: Sequence[_Unit],
        received: Buffers,
        unsent_args: list[Arrays],
    ) -> tuple[Buffers, list[Arrays]]:
        """Return the sent and the unsent outputs of an owner with these units, from received and
        unsent inputs.
        """
        rows: list[tuple[_Slot, jax.Array]] = []
        unsent_outputs = [
            [[] for transfer in program.task.outputs if not transfer.is_sent]
            for program in self.programs
        ]
        positions = [0] * len(self.programs)
        for unit in units:
            owned_task = self.stage.tasks[unit.task]
            unsent_inputs = iter(unsent_args[unit.program])
            args = []
            for transfer, slot in zip(owned_task.inputs, unit.inputs, strict=True):
                if slot is None:
                    args.append(next(unsent_inputs)[positions[unit.program]])
                else:
                    pieces = received[slot.dtype][:, slot.start : slot.stop].reshape(
                        self.count, *slot.piece_shape
                    )
                    args.append(_assemble(pieces, transfer, self.sizes))
            positions[unit.program] += 1
            output_lists = iter(unsent_outputs[unit.program])
            for x, transfer, slot in zip(
                functions[unit.task](*args), owned_task.outputs, unit.outputs, strict=True
            ):
                if slot is None:
                    next(output_lists).append(x)
                else:
                    rows.append((slot, _split(x, transfer, self.sizes).reshape(self.count, -1)))
        padded_outputs = [
            _padded(outputs, program)
            for outputs, program in zip(unsent_outputs, self.programs, strict=True)
        ]
        return _pack_buffers([rows], self.totals[1], self.count), padded_outputs

    def join(self, returned: Buffers, shared: list[Arrays]) -> list[Arrays]:
        """Return the outputs of every task, from returned rows and from results that all devices
        share.
        """
        tasks = self.stage.tasks
        results: list[list[Arrays]] = [[[] for _ in owned_task.outputs] for owned_task in tasks]
        for owner, unit in sorted(
            ((owner, unit) for owner, units in enumerate(self.units_of_owners) for unit in units),
            # Blocks of a task are joined below in the order of the model, whoever owns them.
            key=lambda pair: pair[1].block,
        ):
            shared_values = iter(shared[unit.program])
            for j, slot in enumerate(unit.outputs):
                if slot is None:
                    # By the unit's number among all units of its program, as `_combine_owners`
                    # stacks them.
                    piece = next(shared_values)[unit.number]
                else:
                    piece = returned[slot.dtype][owner, slot.start : slot.stop].reshape(
                        slot.piece_shape
                    )
                results[unit.task][j].append(piece)
        return [
            [
                _join_blocks(pieces, transfer)
                for pieces, transfer in zip(task_results, owned_task.outputs, strict=True)
            ]
            for task_results, owned_task in zip(results, tasks, strict=True)
        ]


def _padded(outputs: list[Arrays], program: _Program) -> Arrays:
    """Return the unsent outputs of one owner's units of a program, [the most units of an owner,
    ...].
    """
    transfers = [transfer for transfer in program.task.outputs if not transfer.is_sent]
    # All branches of a switch return the same shapes, so every owner returns as many results.
    width = program.numbers.shape[1]
    return [
        jnp.stack([*values, *[jnp.zeros(transfer.shape, transfer.dtype)] * (width - len(values))])
        for values, transfer in zip(outputs, transfers, strict=True)
    ]


def _unit_functions(
    stage: OwnedStage, tasks: Sequence[OwnedTask], retrace: Retrace
) -> list[UnitFunction]:
    """Return the function of a unit of each task.

    They come from new traces, because equations belong to the mesh under which they are traced.
    """
    # An axis is bound here, and a link such as skip_anomalies would average over it.
    with global_view():
        new_traces = {cut: retrace(cut) for cut in {task.cut: None for task in tasks}}
    new_variables: dict[CutLeaves, dict[jex.Var, jex.Var]] = {}
    for cut, new_trace in new_traces.items():
        matches = match_variables(stage.traces[cut].jaxpr, new_trace.jaxpr)
        assert matches is not None, "an update whose trace differs each time"
        new_variables[cut] = matches

    def function(owned_task: OwnedTask) -> UnitFunction:
        inputs, outputs = (
            [new_variables[owned_task.cut][var] for var in variables]
            for variables in (owned_task.input_vars, owned_task.output_vars)
        )
        task_trace = new_traces[owned_task.cut]
        part = jaxpr_of_part(task_trace, owned_task.task.equations, inputs, outputs).replace(
            constvars=[]
        )
        return lambda *args: jax.core.eval_jaxpr(part, (), *args)

    return [function(owned_task) for owned_task in tasks]


def _plan_exchange(config: StrategyConfig, stage: OwnedStage) -> _Exchange:
    """Give the units of every owner their slots in the rows that devices exchange."""
    sizes = {axis: config.mesh_shape[axis] for axis in stage.axes}
    programs = {
        key: i for i, key in enumerate(dict.fromkeys(owned_task.key for owned_task in stage.tasks))
    }
    owners: list[list[_Unit]] = [[] for _ in range(math.prod(sizes.values()))]
    totals: tuple[dict[np.dtype, int], dict[np.dtype, int]] = ({}, {})
    counts = [0] * len(programs)
    # By program first: then each owner's units have the order of programs, and slots follow from
    # it.
    placed = sorted(
        (programs[stage.tasks[task].key], owner, task, block)
        for (task, block), owner in zip(stage.units, stage.owners, strict=True)
    )
    ends: list[tuple[dict[np.dtype, int], dict[np.dtype, int]]] = [({}, {}) for _ in owners]
    for program, owner, task, block in placed:
        owned_task = stage.tasks[task]
        inputs, outputs = (
            [_slot(transfer, sizes, end) for transfer in transfers]
            for transfers, end in zip(
                (owned_task.inputs, owned_task.outputs), ends[owner], strict=True
            )
        )
        owners[owner].append(_Unit(task, block, program, counts[program], inputs, outputs))
        counts[program] += 1
    for owner_ends in ends:
        for total, end in zip(totals, owner_ends, strict=True):
            for dtype, size in end.items():
                # An all-to-all sends rows of one length. The longest decides; `stage_bytes` reports
                # the padding.
                total[dtype] = max(total.get(dtype, 0), size)
    return _Exchange(stage, sizes, owners, totals)


def _mixture(units: Sequence[_Unit]) -> tuple[int, ...]:
    return tuple(unit.program for unit in units)


def _slot(transfer: Transfer, sizes: Mapping[str, int], ends: dict[np.dtype, int]) -> _Slot | None:
    if not transfer.is_sent:
        return None
    # Each device sends the piece that it has, so a slot is a value cut over the axes of owners.
    piece_shape = [
        length // size_along(sizes, axes)
        for length, axes in zip(transfer.shape, _owner_axes_of_dims(transfer, sizes), strict=True)
    ]
    slot = _Slot(transfer.dtype, ends.get(transfer.dtype, 0), tuple(piece_shape))
    ends[transfer.dtype] = slot.stop
    return slot


def _owner_axes_of_dims(transfer: Transfer, sizes: Mapping[str, int]) -> list[list[str]]:
    """Return for each dim the axes of owners that shard it."""
    spec = [*transfer.spec, *[None] * (len(transfer.shape) - len(transfer.spec))]
    return [[axis for axis in spec_axes((entry,)) if axis in sizes] for entry in spec]


def _take_block(x: jax.Array, transfer: Transfer, block: int) -> jax.Array:
    """Return the part of one block in a device's shard."""
    if transfer.dim is None:
        return x
    width = transfer.shape[transfer.dim]
    return jax.lax.slice_in_dim(x, block * width, (block + 1) * width, axis=transfer.dim)


def _join_blocks(blocks: Sequence[jax.Array], transfer: Transfer) -> jax.Array:
    return blocks[0] if transfer.dim is None else jnp.concatenate(blocks, transfer.dim)


def _pack_buffers(
    rows: Sequence[Sequence[tuple[_Slot, jax.Array]]],
    totals: Mapping[np.dtype, int],
    num_parts: int = 1,
) -> Buffers:
    """Return one buffer a dtype: each row joins its pieces [num_parts, elements] and is padded to
    the same length.
    """

    def row(pieces: Sequence[tuple[_Slot, jax.Array]], dtype: np.dtype, total: int) -> jax.Array:
        arrays = [x for slot, x in pieces if slot.dtype == dtype]
        padding = total - sum(x.shape[1] for x in arrays)
        return jnp.concatenate([*arrays, jnp.zeros((num_parts, padding), dtype)], axis=1)

    return {
        dtype: jnp.concatenate([row(pieces, dtype, total) for pieces in rows])
        for dtype, total in totals.items()
    }


def _select_unsent(
    tasks: Sequence[OwnedTask], units: Sequence[_Unit], args: list[Arrays], unit_numbers: jax.Array
) -> Arrays:
    """Return the unsent inputs of this device's units of one program, [units, ...].

    Every device has all of them.
    """
    selected = []
    for j, slot in enumerate(units[0].inputs):
        if slot is None:
            stacked = jnp.stack(
                [_take_block(args[u.task][j], tasks[u.task].inputs[j], u.block) for u in units]
            )
            selected.append(jnp.take(stacked, unit_numbers, axis=0, mode="clip"))
    return selected


def _assemble(pieces: jax.Array, transfer: Transfer, sizes: Mapping[str, int]) -> jax.Array:
    """Return a value from its pieces on all devices, [devices, piece]."""
    order = _dim_order(transfer, sizes)
    return (
        pieces.reshape(*sizes.values(), *pieces.shape[1:]).transpose(order).reshape(transfer.shape)
    )


def _split(x: jax.Array, transfer: Transfer, sizes: Mapping[str, int]) -> jax.Array:
    """Return the pieces of a value for all devices, [devices, piece]: the inverse of `_assemble`."""
    split_shape = []
    for length, axes in zip(transfer.shape, _owner_axes_of_dims(transfer, sizes), strict=True):
        axis_sizes = [sizes[axis] for axis in axes]
        split_shape += [*axis_sizes, length // math.prod(axis_sizes)]
    return x.reshape(split_shape).transpose(np.argsort(_dim_order(transfer, sizes)))


def _dim_order(transfer: Transfer, sizes: Mapping[str, int]) -> list[int]:
    """Return the dims of [axes, piece] in the order that they have in the assembled value."""
    axis_names = list(sizes)
    order = []
    for dim, axes in enumerate(_owner_axes_of_dims(transfer, sizes)):
        order += [*map(axis_names.index, axes), len(axis_names) + dim]
    return order


def _combine_owners(
    x: jax.Array, unit_numbers: jax.Array, count: int, axes: tuple[str, ...]
) -> jax.Array:
    """Return on every device the results of all units, [count, ...], from this device's results
    [own units, ...].
    """
    # A sum over devices is a copy to all: each unit's row is zero everywhere but on its owner.
    # Values that are not cut into pieces take this way.
    wide = x.astype(jnp.int32) if x.dtype == bool else x
    scattered = jnp.zeros((count, *x.shape[1:]), wide.dtype).at[unit_numbers].set(wide, mode="drop")
    return jax.lax.psum(scattered, axes).astype(x.dtype)
