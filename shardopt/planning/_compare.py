"""`compare`: predicted and measured times, of each kind of collective and of the most expensive
operations.
"""

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled, Lowered

from shardopt.core._errors import calling, error_text
from shardopt.core._tables import aligned, source_and_name
from shardopt.core._types import PyTree
from shardopt.hlo._hlo_text import Instruction, operands
from shardopt.hlo._program import CanLower, audit, read_program
from shardopt.hlo._source_lines import op_name_of, read_frames, source_of
from shardopt.planning._aot import AotReport
from shardopt.planning._profile import Measured, ProfiledProgram, read_profile
from shardopt.planning._search import Plans, Prediction

_CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")
"""Their time is the time of the operations inside."""


class ComparedCollective(NamedTuple):
    """All collectives of one kind over the same mesh axes, in one step of a device.

    Attributes:
      kind: the kind, as in `so.hlo.audit`.
      axes: the mesh axes; None if they are not whole axes.
      predicted: seconds; None without a prediction.
      measured: seconds, waits for other devices included; None if the profile has none.
      calls: measured calls.
    """

    kind: str
    axes: tuple[str, ...] | None
    predicted: float | None
    measured: float | None
    calls: float


class ComparedOperation(NamedTuple):
    """An operation in one step of a device.

    Attributes:
      name: the name of its instruction.
      predicted: seconds; None without a prediction.
      measured: seconds.
      calls: measured calls.
      op_name: its name in jax, such as "jit(step)/dot_general".
      source: "file:line" of the user's code; "" if the program does not contain it.
    """

    name: str
    predicted: float | None
    measured: float
    calls: float
    op_name: str
    source: str


class ProfileComparison(NamedTuple):
    """A profile next to a plan; `print` shows it. All times are of one step and one device.

    Attributes:
      program: the name of the program.
      predicted: seconds of a step; None without a prediction.
      measured: seconds of all operations together. Operations that run at the same time count each.
      collectives: the longest first.
      operations: the ten most expensive operations, collectives included.
      unmatched: operations of the profile that the program does not have, and other programs, each
        with its time; collectives of the program that the profile does not have.
    """

    program: str
    predicted: float | None
    measured: float
    collectives: tuple[ComparedCollective, ...]
    operations: tuple[ComparedOperation, ...]
    unmatched: tuple[str, ...]

    def __str__(self) -> str:
        """Return both tables, and what has no match."""
        heading = ("predicted ms", "measured ms", "ratio", "calls")
        collective_rows = [
            (
                *_cells(x.predicted, x.measured, x.calls),
                x.kind,
                " x ".join(x.axes or ()) or "mixed axes",
            )
            for x in self.collectives
        ]
        operation_rows = [
            (
                *_cells(x.predicted, x.measured, x.calls),
                x.name,
                source_and_name(x.source, x.op_name),
            )
            for x in self.operations
        ]
        step = f"{self.program}: operations of {self.measured * 1e3:.3f} ms measured"
        step += (
            "" if self.predicted is None else f", a step of {self.predicted * 1e3:.3f} ms predicted"
        )
        lines = [step + " (per step and device)"]
        lines += ["", *_table([(*heading, "collective", "axes"), *collective_rows])]
        lines += ["", *_table([(*heading, "operation", "where"), *operation_rows])]
        lines += (
            ["", "without a match:", *(f"  {text}" for text in self.unmatched)]
            if self.unmatched
            else []
        )
        return "\n".join(lines)


@calling("compare")
def compare(
    profile: str | os.PathLike[str],
    plan: AotReport | Plans | Prediction,
    program: CanLower | Lowered | Compiled | str | None = None,
    *args: PyTree,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
) -> ProfileComparison:
    """Compare a recorded profile with a plan: predicted and measured times of collectives and of
    operations.

    Args:
      profile: the folder of a jax profile, such as "profile" of `so.fit(profile=...)`; of several
        recordings the newest is read. Or an `.xplane.pb` file.
      plan: `so.planning.aot(...)`, which predicts each operation on TPU, or `so.plan(...)` or one
        of its predictions, which predict collectives. Of `so.plan(...)` the fastest layout with the
        mesh of the program is taken.
      program: the program that ran, as in `so.hlo.audit`: `opt.step`. It says which collective an
        operation is. By default the program of `so.planning.aot`.
      *args: arguments of the program, as in `so.hlo.audit`: `state, batch`.
      mesh: the mesh, as in `so.hlo.audit`.

    Returns:
      A `ProfileComparison`: `.collectives`, `.operations`, `.unmatched`; `print` shows it.

    Raises:
      TypeError: if `plan` is of another type, or in the same cases as `so.hlo.audit`.
      ValueError: if one of these is true:

        - the folder has no profile, or the profile has no run of the program;
        - `program` is missing, and `plan` is not of `so.planning.aot`;
        - no layout of `so.plan(...)` has the mesh of the program;
        - in the same cases as `so.hlo.audit`.

    Note:
      - The time of a collective is measured on the device: the wait for the slowest device counts.
        An asynchronous one counts where the device starts it and where it waits for it. The
        prediction is of the transfer alone.
      - The prediction of `so.plan` is for other operations than the compiler chooses: a
        reduce-scatter may run as an all-reduce. Both then stand in the table, each without its
        counterpart.
      - On simulated CPU devices, times say how the machine is loaded, and nothing about a network.
    """
    text_or_program, mesh = _program_of(plan, program, mesh)
    parsed = read_program(text_or_program, args, mesh=mesh)
    audited = audit(parsed.text, mesh=parsed.sizes)
    name = audited.name
    programs = read_profile(Path(profile))
    if name not in programs:
        others = ", ".join(sorted(programs)) or "none"
        fix = "pass the program that ran while the profile was recorded, or record a step of it."
        raise ValueError(
            error_text(f"the profile has no run of {name}. It has: {others}.", fix=fix)
        )
    measured = programs[name]
    instructions = {x.name: x for lines in parsed.module.computations.values() for x in lines}
    kinds = {x.name: (x.kind, x.axes) for x in audited.collectives}
    kinds |= {
        x.name: kinds[start]
        for x in instructions.values()
        if (start := _start_of(x, kinds)) and x.name not in kinds
    }
    total, of_collectives, of_operations = _predicted(plan, parsed.sizes)
    frames = read_frames(parsed.text)
    own_times = {
        op: time
        for op, time in measured.operations.items()
        if op not in instructions or instructions[op].opcode not in _CONTAINERS
    }
    most_expensive = sorted(own_times, key=lambda op: -own_times[op].seconds)[:10]
    return ProfileComparison(
        name,
        total,
        math.fsum(time.seconds for time in own_times.values()),
        _collectives(own_times, kinds, of_collectives),
        tuple(
            ComparedOperation(
                op,
                of_operations.get(op),
                *own_times[op],
                op_name_of(instructions[op]) if op in instructions else "",
                source_of(instructions[op], frames) if op in instructions else "",
            )
            for op in most_expensive
        ),
        _unmatched(name, programs, instructions, kinds),
    )


def _program_of(
    plan: AotReport | Plans | Prediction,
    program: CanLower | Lowered | Compiled | str | None,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None,
) -> tuple[CanLower | Lowered | Compiled | str, Mesh | AbstractMesh | Mapping[str, int] | None]:
    if not isinstance(plan, AotReport | Plans | Prediction):
        fix = "pass what so.planning.aot or so.plan returns, or one of its predictions, so.plan(...).best."
        raise TypeError(error_text(f"plan must be a plan, got {type(plan).__name__}.", fix=fix))
    if program is not None:
        return program, mesh
    if not isinstance(plan, AotReport):
        problem = "without the program, operations of the profile cannot be told apart."
        raise ValueError(
            error_text(problem, fix="pass it: compare(profile, plan, opt.step, state, batch).")
        )
    return plan.text, plan.mesh_shape


def _start_of(line: Instruction, kinds: Mapping[str, object]) -> str | None:
    """Return the collective that an instruction ends, such as an all-gather-done.

    None if it ends none.
    """
    if not line.opcode.endswith("-done"):
        return None
    return next(
        (
            name
            for operand in operands(line)
            if (name := operand.rpartition("%")[2].strip()) in kinds
        ),
        None,
    )


_Kind = tuple[str, tuple[str, ...] | None]


def _predicted(
    plan: AotReport | Plans | Prediction, sizes: Mapping[str, int]
) -> tuple[float | None, dict[_Kind, float], dict[str, float]]:
    """Return the predicted seconds of a step, of the collectives by kind and axes, and of
    operations by name.
    """
    if isinstance(plan, AotReport):
        step = plan.step_seconds
        operations = {
            operation.name.rpartition(" ")[2]: operation.seconds
            for operation in step.all_operations
        }
        collectives: dict[_Kind, float] = {kind: time for kind, time in step.collectives.items()}  # noqa: C416
        return step.total, collectives, operations
    prediction = plan if isinstance(plan, Prediction) else _layout_of(plan, sizes)
    collectives = defaultdict(float)
    for transfer, seconds in zip(prediction.transfers, prediction.transfer_seconds, strict=True):
        used = {axis for axis in (transfer.axis, *transfer.also) if prediction.mesh[axis] > 1}
        collectives[transfer.kind, tuple(axis for axis in prediction.mesh if axis in used)] += (
            seconds
        )
    return prediction.time.total, dict(collectives), {}


def _layout_of(plans: Plans, sizes: Mapping[str, int]) -> Prediction:
    def above_one(mesh):
        return {axis: size for axis, size in mesh.items() if size > 1}

    for prediction in plans.ranked:
        if above_one(prediction.mesh) == above_one(sizes):
            return prediction
    problem = f"no layout of the plan has the mesh of the program, {above_one(sizes)}."
    raise ValueError(
        error_text(problem, fix="plan for this mesh: so.planning.predict(workload, layout, ...).")
    )


def _collectives(
    times: Mapping[str, Measured], kinds: Mapping[str, _Kind], predicted: Mapping[_Kind, float]
) -> tuple[ComparedCollective, ...]:
    measured: dict[_Kind, list[Measured]] = defaultdict(list)
    for name, kind in kinds.items():
        if name in times:
            measured[kind].append(times[name])
    rows = [
        ComparedCollective(
            *kind,
            predicted.get(kind),
            math.fsum(time.seconds for time in measured[kind]) if kind in measured else None,
            math.fsum(time.calls for time in measured[kind]) if kind in measured else 0.0,
        )
        for kind in {**predicted, **measured}
    ]
    return tuple(sorted(rows, key=lambda row: -max(row.measured or 0.0, row.predicted or 0.0)))


def _unmatched(
    name: str,
    programs: Mapping[str, ProfiledProgram],
    instructions: Mapping[str, Instruction],
    collectives: Mapping[str, _Kind],
) -> tuple[str, ...]:
    operations = programs[name].operations
    others = sorted(
        (
            (module, math.fsum(x.seconds for x in other.operations.values()))
            for module, other in programs.items()
        ),
        key=lambda pair: -pair[1],
    )
    return (
        *(
            f"{op}: {x.seconds * 1e3:.3f} ms, not in the program"
            for op, x in operations.items()
            if op not in instructions
        ),
        *(
            f"{op}: {kind} of the program, not in the profile"
            for op, (kind, _) in collectives.items()
            if op not in operations
        ),
        *(
            f"{module}: {seconds * 1e3:.3f} ms a run, another program"
            for module, seconds in others
            if module != name
        ),
    )


def _cells(
    predicted: float | None, measured: float | None, calls: float
) -> tuple[str, str, str, str]:
    def text(seconds):
        return "-" if seconds is None else f"{seconds * 1e3:.4g}"

    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
    return text(predicted), text(measured), ratio, f"{calls:g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return aligned(rows, lambda column, _: column < 4)
