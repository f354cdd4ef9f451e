"""Units of work at their owners: inputs go there by one all-to-all, each device runs its own, outputs come back by another."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from shardopt.collectives import all_to_all
from shardopt.core.trace import Trace
from shardopt.engine.blockwise import match_variables
from shardopt.engine.config import StrategyConfig
from shardopt.engine.owned_tasks import Moved, OwnedStage, OwnedTask, closed_part, owner_axes
from shardopt.mesh import spec_axes

Buffers = dict[np.dtype, jax.Array]
Function = Callable[..., list[jax.Array]]


class _Slot(NamedTuple):
    """Where a piece of a value stands in the row that its owner exchanges with each device."""

    dtype: np.dtype
    start: int
    piece: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.piece)


class _Unit(NamedTuple):
    """A unit at its owner: its task, block, number among those of its program, and slots (None: not moved)."""

    task: int
    block: int
    program: int
    number: int
    inputs: list[_Slot | None]
    outputs: list[_Slot | None]


class TraceAgain(Protocol):
    """`trace(single=...)`."""

    def __call__(self, *, single: bool) -> Trace:
        """Return the trace of the update, from shapes alone: of the model, or of one that has a single block."""
        ...


def run_stage(
    config: StrategyConfig, stage: OwnedStage, trace: TraceAgain, args: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    """Return the outputs of every task, those `here` after the others, given its inputs; in the global view."""
    there, here = args[: len(stage.tasks)], args[len(stage.tasks) :]
    made = [_run_here(config, stage, one, trace, some) for one, some in zip(stage.here, here, strict=True)]
    return [*_run_there(config, stage, trace, there), *made] if there else made


def _run_here(
    config: StrategyConfig, stage: OwnedStage, one: OwnedTask, trace: TraceAgain, args: list[jax.Array]
) -> list[jax.Array]:
    """Run a task where its blocks are: one after another, so that each is computed as if it were alone."""

    def local(args: list[jax.Array]) -> list[jax.Array]:
        (run,) = _functions(stage, [one], trace)
        blocks = [
            run(*(_block(x, moved, block) for x, moved in zip(args, one.inputs, strict=True)))
            for block in range(one.blocks)
        ]
        return [_joined(pieces, moved) for *pieces, moved in zip(*blocks, one.outputs, strict=True)]

    specs, out_specs = ([moved.spec for moved in some] for some in (one.inputs, one.outputs))
    return jax.shard_map(local, mesh=config.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(args)


def _run_there(
    config: StrategyConfig, stage: OwnedStage, trace: TraceAgain, args: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    sizes = {axis: config.mesh_shape[axis] for axis in owner_axes(config)}
    local = _local(stage, trace, sizes)
    specs = [[moved.spec for moved in one.inputs] for one in stage.tasks]
    out_specs = [[moved.spec for moved in one.outputs] for one in stage.tasks]
    return jax.shard_map(local, mesh=config.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(args)


def stage_bytes(config: StrategyConfig, stage: OwnedStage) -> tuple[int, int]:
    """Return what each device sends to owners and back, and how much of it is padding: all rows are as long as the longest."""
    sizes = {axis: config.mesh_shape[axis] for axis in owner_axes(config)}
    owned, totals = _owned_units(stage, sizes, _programs(stage))
    row = sum(total * dtype.itemsize for some in totals for dtype, total in some.items())
    slots = [slot for units in owned for unit in units for slot in (*unit.inputs, *unit.outputs) if slot is not None]
    carried = sum(math.prod(slot.piece) * slot.dtype.itemsize for slot in slots)
    count = math.prod(sizes.values())
    return (count - 1) * row, (count - 1) * (count * row - carried) // count


def _programs(stage: OwnedStage) -> dict[str, int]:
    return {key: i for i, key in enumerate(dict.fromkeys(one.key for one in stage.tasks))}


def _local(
    stage: OwnedStage, trace: TraceAgain, sizes: Mapping[str, int]
) -> Callable[[list[list[jax.Array]]], list[list[jax.Array]]]:
    """Return what each device does.

    Devices whose units are of the same programs run the same branch; those of one program differ in their numbers only.
    """
    axes, count, tasks = tuple(sizes), math.prod(sizes.values()), stage.tasks
    programs = _programs(stage)
    owned, totals = _owned_units(stage, sizes, programs)
    mixtures = {mixture: i for i, mixture in enumerate(dict.fromkeys(map(_mixture, owned)))}
    examples = [next(units for units in owned if _mixture(units) == mixture) for mixture in mixtures]
    branch_of = np.array([mixtures[_mixture(units)] for units in owned])
    of_program = [[] for _ in programs]
    for unit in sorted((unit for units in owned for unit in units), key=lambda unit: unit.number):
        of_program[unit.program].append(unit)
    most = [max(sum(unit.program == i for unit in units) for units in owned) for i in range(len(programs))]
    # the numbers of each owner's units; those that it lacks are one too many
    numbers = [np.full((count, width), len(units)) for width, units in zip(most, of_program, strict=True)]
    for owner, units in enumerate(owned):
        for i in range(len(programs)):
            found = [unit.number for unit in units if unit.program == i]
            numbers[i][owner, : len(found)] = found

    def local(args: list[list[jax.Array]]) -> list[list[jax.Array]]:
        me = jax.lax.axis_index(axes)
        mine = [jnp.asarray(table)[me] for table in numbers]
        sent = _buffers(
            [
                [
                    (slot, _block(args[unit.task][j], tasks[unit.task].inputs[j], unit.block).reshape(1, -1))
                    for unit in units
                    for j, slot in enumerate(unit.inputs)
                    if slot is not None
                ]
                for units in owned
            ],
            totals[0],
        )
        received = {dtype: all_to_all(x, axes, 0, 0) for dtype, x in sent.items()}
        given = [_given(tasks, units, args, which) for units, which in zip(of_program, mine, strict=True)]
        run = _functions(stage, tasks, trace)
        branches = [_branch(tasks, run, units, sizes, most, totals[1]) for units in examples]
        made, small = jax.lax.switch(jnp.asarray(branch_of)[me], branches, received, given)
        back = {dtype: all_to_all(x, axes, 0, 0) for dtype, x in made.items()}
        shared = [
            [_from_all(x, which, len(units), axes) for x in some]
            for some, which, units in zip(small, mine, of_program, strict=True)
        ]
        results: list[list[list[jax.Array]]] = [[[] for _ in one.outputs] for one in tasks]
        for owner, unit in sorted(
            ((owner, unit) for owner, units in enumerate(owned) for unit in units), key=lambda pair: pair[1].block
        ):
            found = iter(shared[unit.program])
            for j, slot in enumerate(unit.outputs):
                if slot is None:
                    piece = next(found)[unit.number]
                else:
                    piece = back[slot.dtype][owner, slot.start : slot.stop].reshape(slot.piece)
                results[unit.task][j].append(piece)
        return [
            [_joined(pieces, moved) for pieces, moved in zip(some, one.outputs, strict=True)]
            for some, one in zip(results, tasks, strict=True)
        ]

    return local


def _functions(stage: OwnedStage, tasks: Sequence[OwnedTask], trace: TraceAgain) -> list[Function]:
    """Return the function of a unit of each of these tasks, from traces made here: their equations are of the mesh under trace."""
    old = {True: stage.single, False: stage.whole}
    here = {cut: trace(single=cut) for cut in {one.cut for one in tasks}}
    same: dict[bool, dict[jex.Var, jex.Var]] = {}
    for cut, new in here.items():
        planned = old[cut]
        found = None if planned is None else match_variables(planned.jaxpr, new.jaxpr)
        assert found is not None, "an update whose trace differs each time"
        same[cut] = found

    def function(one: OwnedTask) -> Function:
        reads, makes = ([same[one.cut][var] for var in some] for some in (one.reads, one.makes))
        part = closed_part(here[one.cut], one.task.equations, reads, makes)
        return lambda *args: jax.core.eval_jaxpr(part, (), *args)

    return [function(one) for one in tasks]


def _owned_units(
    stage: OwnedStage, sizes: Mapping[str, int], programs: Mapping[str, int]
) -> tuple[list[list[_Unit]], tuple[dict[np.dtype, int], dict[np.dtype, int]]]:
    """Return the units of every owner, those of one program together, and how long the rows are that it exchanges."""
    owners: list[list[_Unit]] = [[] for _ in range(math.prod(sizes.values()))]
    totals: tuple[dict[np.dtype, int], dict[np.dtype, int]] = ({}, {})
    counts = [0] * len(programs)
    placed = sorted(
        (programs[stage.tasks[task].key], owner, task, block)
        for (task, block), owner in zip(stage.units, stage.owners, strict=True)
    )
    ends: list[tuple[dict[np.dtype, int], dict[np.dtype, int]]] = [({}, {}) for _ in owners]
    for program, owner, task, block in placed:
        one = stage.tasks[task]
        inputs, outputs = (
            [_slot(moved, sizes, end) for moved in some]
            for some, end in zip((one.inputs, one.outputs), ends[owner], strict=True)
        )
        owners[owner].append(_Unit(task, block, program, counts[program], inputs, outputs))
        counts[program] += 1
    for both in ends:
        for total, end in zip(totals, both, strict=True):
            for dtype, size in end.items():
                total[dtype] = max(total.get(dtype, 0), size)
    return owners, totals


def _mixture(units: Sequence[_Unit]) -> tuple[int, ...]:
    return tuple(unit.program for unit in units)


def _slot(moved: Moved, sizes: Mapping[str, int], ends: dict[np.dtype, int]) -> _Slot | None:
    if not moved.moves:
        return None
    pieces = [
        length // math.prod(sizes[axis] for axis in entry)
        for length, entry in zip(moved.shape, _entries(moved, sizes), strict=True)
    ]
    slot = _Slot(moved.dtype, ends.get(moved.dtype, 0), tuple(pieces))
    ends[moved.dtype] = slot.stop
    return slot


def _entries(moved: Moved, sizes: Mapping[str, int]) -> list[list[str]]:
    """Return the axes that owners are along by the dims that they shard."""
    spec = [*moved.spec, *[None] * (len(moved.shape) - len(moved.spec))]
    return [[axis for axis in spec_axes((entry,)) if axis in sizes] for entry in spec]


def _block(x: jax.Array, moved: Moved, block: int) -> jax.Array:
    """Return what a device has of one block."""
    if moved.dim is None:
        return x
    width = moved.shape[moved.dim]
    return jax.lax.slice_in_dim(x, block * width, (block + 1) * width, axis=moved.dim)


def _joined(blocks: Sequence[jax.Array], moved: Moved) -> jax.Array:
    return blocks[0] if moved.dim is None else jnp.concatenate(blocks, moved.dim)


def _buffers(rows: Sequence[Sequence[tuple[_Slot, jax.Array]]], totals: Mapping[np.dtype, int]) -> Buffers:
    """Return pieces [n, elements] side by side, filled up to equal lengths, and below each other: a buffer a dtype."""

    def row(pieces: Sequence[tuple[_Slot, jax.Array]], dtype: np.dtype, total: int) -> jax.Array:
        some = [x for slot, x in pieces if slot.dtype == dtype]
        left = total - sum(x.shape[1] for x in some)
        return jnp.concatenate([*some, jnp.zeros((some[0].shape[0] if some else 1, left), dtype)], axis=1)

    return {dtype: jnp.concatenate([row(pieces, dtype, total) for pieces in rows]) for dtype, total in totals.items()}


def _given(
    tasks: Sequence[OwnedTask], units: Sequence[_Unit], args: list[list[jax.Array]], which: jax.Array
) -> list[jax.Array]:
    """Return what the units of one program are given on every device: those of this one's units, [units, ...]."""
    found = []
    for j, slot in enumerate(units[0].inputs):
        if slot is None:
            stacked = jnp.stack([_block(args[u.task][j], tasks[u.task].inputs[j], u.block) for u in units])
            found.append(jnp.take(stacked, which, axis=0, mode="clip"))
    return found


def _branch(
    tasks: Sequence[OwnedTask],
    functions: Sequence[Function],
    units: Sequence[_Unit],
    sizes: Mapping[str, int],
    most: Sequence[int],
    totals: Mapping[np.dtype, int],
) -> Callable[[Buffers, list[list[jax.Array]]], tuple[Buffers, list[list[jax.Array]]]]:
    """Return what an owner of such units does with what it received, and was given."""
    count = math.prod(sizes.values())
    examples = {one.key: one for one in tasks}

    def run(received: Buffers, given: list[list[jax.Array]]) -> tuple[Buffers, list[list[jax.Array]]]:
        rows: list[tuple[_Slot, jax.Array]] = []
        small: list[list[list[jax.Array]]] = [
            [[] for moved in one.outputs if not moved.moves] for one in examples.values()
        ]
        turns = [0] * len(most)
        for unit in units:
            one, others, args = tasks[unit.task], iter(given[unit.program]), []
            for moved, slot in zip(one.inputs, unit.inputs, strict=True):
                if slot is None:
                    args.append(next(others)[turns[unit.program]])
                else:
                    pieces = received[slot.dtype][:, slot.start : slot.stop].reshape(count, *slot.piece)
                    args.append(_assembled(pieces, moved, sizes))
            turns[unit.program] += 1
            rest = iter(small[unit.program])
            for x, moved, slot in zip(functions[unit.task](*args), one.outputs, unit.outputs, strict=True):
                if slot is None:
                    next(rest).append(x)
                else:
                    rows.append((slot, _taken_apart(x, moved, sizes).reshape(count, -1)))
        filled = [
            [
                jnp.stack([*found, *[jnp.zeros(moved.shape, moved.dtype)] * (width - len(found))])
                for found, moved in zip(some, (m for m in one.outputs if not m.moves), strict=True)
            ]
            for some, one, width in zip(small, examples.values(), most, strict=True)
        ]
        if units:
            return _buffers([rows], totals), filled
        return {dtype: jnp.zeros((count, total), dtype) for dtype, total in totals.items()}, filled

    return run


def _assembled(pieces: jax.Array, moved: Moved, sizes: Mapping[str, int]) -> jax.Array:
    """Return a value from its pieces on all devices, [devices, piece]."""
    order = _order(moved, sizes)
    return pieces.reshape(*sizes.values(), *pieces.shape[1:]).transpose(order).reshape(moved.shape)


def _taken_apart(x: jax.Array, moved: Moved, sizes: Mapping[str, int]) -> jax.Array:
    """Return the pieces of all devices, [devices, piece]: the inverse."""
    cut = []
    for length, entry in zip(moved.shape, _entries(moved, sizes), strict=True):
        own = [sizes[axis] for axis in entry]
        cut += [*own, length // math.prod(own)]
    return x.reshape(cut).transpose(np.argsort(_order(moved, sizes)))


def _order(moved: Moved, sizes: Mapping[str, int]) -> list[int]:
    """Return the dims of [axes, piece] as they follow each other in the whole."""
    axes, order = list(sizes), []
    for dim, entry in enumerate(_entries(moved, sizes)):
        order += [*map(axes.index, entry), len(axes) + dim]
    return order


def _from_all(x: jax.Array, which: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """Return on every device what the owners made, [units, ...], of [own units, ...]."""
    wide = x.astype(jnp.int32) if x.dtype == bool else x
    own = jnp.zeros((count, *x.shape[1:]), wide.dtype).at[which].set(wide, mode="drop")
    return jax.lax.psum(own, axes).astype(x.dtype)
