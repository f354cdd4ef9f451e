"""How long a compiled TPU program takes: its schedule, walked with XLA's own estimates and published links."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled, Lowered

from shardopt.audit.hlo_text import Instruction
from shardopt.audit.program import CanLower, Program, read_program
from shardopt.audit.source_lines import Frames, op_name_of, read_frames, source_of
from shardopt.audit.walk import check_schedule
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.pipeline import Schedule
from shardopt.planning.hardware import Hardware, find_hardware, hardware_of
from shardopt.planning.schedule_actions import Branch, Compute, Done, Loop, Reader, Start


class Operation(NamedTuple):
    """What one instruction costs in a step, all its turns together.

    Attributes:
      name: of the instruction; of a collective its kind as well.
      seconds: that the TensorCore works at it, or waits for it.
      calls: how often it runs.
      waits: whether it is a collective that the TensorCore waits for.
      op_name: what jax calls it, such as "jit(step)/dot_general".
      source: "file:line" of the line that made it; "" where the program does not tell.
    """

    name: str
    seconds: float
    calls: int
    waits: bool
    op_name: str
    source: str


class Span(NamedTuple):
    """A bar of the timeline: `where` is "compute" or "exposed" on the TensorCore, else the mesh axes of a transfer."""

    where: str
    start: float
    end: float


class StepSeconds(NamedTuple):
    """Seconds of one execution of a compiled program on a device, estimated; `print` shows them.

    Attributes:
      total: compute + exposed; None where there are no estimates, as are the three below.
      compute: that the TensorCore works.
      exposed: that it waits for other devices.
      hidden: that something is sent beside its work.
      operations: the ten dearest, exposed collectives among them.
      spans: the timeline, in the order in which the bars begin.
      notes: what had to be assumed, in sentences.
      reason: why there are no estimates; None where there are.
    """

    total: float | None
    compute: float | None
    exposed: float | None
    hidden: float | None
    operations: tuple[Operation, ...] = ()
    spans: tuple[Span, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return plain numbers and words, without the timeline."""
        return self._asdict() | {"operations": [one._asdict() for one in self.operations], "spans": len(self.spans)}

    def __str__(self) -> str:
        """Return the sums in one line, the dearest operations as a table, and what had to be assumed."""
        if self.total is None or self.compute is None or self.exposed is None or self.hidden is None:
            return f"step time unknown: {self.reason}"
        head = (
            f"{self.total * 1e3:.3f} ms per step, estimated: {self.compute * 1e3:.3f} compute, "
            f"{self.exposed * 1e3:.3f} exposed communication ({self.hidden * 1e3:.3f} hidden)"
        )
        rows = [("ms", "share", "calls", "operation", "where")]
        for one in self.operations:
            name = f"wait: {one.name}" if one.waits else one.name
            share = one.seconds / self.total if self.total else 0.0
            rows.append((f"{one.seconds * 1e3:.3f}", f"{share:.1%}", str(one.calls), name, _where(one)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                [*(cell.rjust(w) for cell, w in zip(row[:3], widths[:3], strict=True)), row[3].ljust(widths[3]), row[4]]
            )
            for row in rows
        ]
        return "\n".join([head, *(line.rstrip() for line in lines), *self.notes])


def _where(one: Operation) -> str:
    """The end of the path and the end of the jax name tell most."""
    file = "/".join(one.source.split("/")[-2:])
    return " ".join(
        part for part in (file, one.op_name if len(one.op_name) <= 60 else f"...{one.op_name[-57:]}") if part
    )


def step_seconds(
    program: CanLower | Lowered | Compiled | str,
    *args: PyTree,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    hardware: str | Hardware | None = None,
    schedule: Schedule | None = None,
) -> StepSeconds:
    """Estimate how long a compiled TPU program takes on a device, without running it.

    The schedule is walked from its first instruction to its last. XLA:TPU writes `estimated_cycles` on what its TensorCore
    runs: they are added up, loops as often as they turn, of a branch the dearest. A collective takes its wire bytes over
    the published links that its emitter uses, of as many axes of the torus as it says, or as a mesh axis of its size has.
    Where it is synchronous the TensorCore waits; where it is asynchronous, on the SparseCore too, it runs beside, and its
    done waits for it. Transfers over the same mesh axis follow each other. Between slices it is the data-centre network.

    What it is good for is comparing two programs. Not counted: the time to start a collective, copies between HBM and
    the cores' own memory, missing wrap-around links, other programs on the same links. Pallas kernels, which have no
    estimate, take the flops or bytes that they state at the chip's peak; splash attention those of a causal mask.

    Args:
      program: as in `so.audit`; so are args and mesh.
      *args: likewise.
      mesh: likewise.
      hardware: a chip by name, or a `Hardware` that describes one device; by default that of the mesh's devices.
      schedule: of the pipeline that the program is, such as `opt.config.schedule`: a pass, which is a branch, counts in the
        ticks in which some stage takes it. Without it at every tick.

    Returns:
      A `StepSeconds`: `.total`, `.compute`, `.exposed`, `.hidden`, `.operations`, `.to_json()`; `print` shows it. On other
      platforms `.total` is None and `.reason` says why.

    Raises:
      TypeError: as `so.audit` does.
      ValueError: likewise, and if it is a TPU program and no chip is given or known, or no loop of it turns as often as
        `schedule` has ticks.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> print(step_seconds(jax.jit(jnp.dot), jnp.ones((8, 8)), jnp.ones((8, 8))))
      step time unknown: the program holds no cycle estimates; only XLA:TPU writes them.
    """
    found = read_program("step_seconds", program, args, mesh=mesh)
    check_schedule("step_seconds", found.module, schedule)
    chip = find_hardware("step_seconds", hardware) if hardware is not None else hardware_of(found.devices)
    return walk_schedule(found, chip, schedule)


def walk_schedule(program: Program, chip: Hardware | None, schedule: Schedule | None = None) -> StepSeconds:
    """Return the seconds of a program that has been read; see `step_seconds`."""
    if "estimated_cycles" not in program.text:
        return _unknown("the program holds no cycle estimates; only XLA:TPU writes them.")
    if chip is None:
        fix = "pass hardware=, such as 'v5p', or the mesh of devices that it was compiled for."
        raise ValueError(format_error("step_seconds", "cannot tell the chip of this program.", fix=fix))
    if chip.clock is None:
        return _unknown(f"{chip.name} has no clock in which XLA estimates; only TPUs have.")
    walk = _Walk(Reader(program, chip, chip.clock, schedule))
    walk.run(program.module.entry)
    for key in list(walk.under_way):
        walk.wait(key)
    return walk.result(read_frames(program.text))


def _unknown(reason: str) -> StepSeconds:
    return StepSeconds(None, None, None, None, reason=reason)


class _Cost(NamedTuple):
    """What an instruction has cost so far; `kind` is that of a collective."""

    line: Instruction
    kind: str | None
    seconds: float = 0.0
    calls: int = 0


@dataclasses.dataclass
class _Walk:
    """The clock of the TensorCore, until when the links of each mesh axis are busy, and what has been added up."""

    reader: Reader
    now: float = 0.0
    links: dict[str, float] = dataclasses.field(default_factory=dict)
    under_way: dict[str, tuple[float, Start]] = dataclasses.field(default_factory=dict)
    core: list[Span] = dataclasses.field(default_factory=list)
    transfers: list[Span] = dataclasses.field(default_factory=list)
    costs: dict[str, _Cost] = dataclasses.field(default_factory=dict)

    def run(self, name: str, times: int = 1, *, branches: bool = True) -> None:
        """Run a computation, with or without the branches directly in it; several times at once where nothing is sent."""
        for action in self.reader.read(name):
            match action:
                case Compute(line, seconds):
                    self.spend("compute", seconds, line, times=times)
                case Start():
                    self.start(action)
                case Done(key):
                    self.wait(key)
                case Branch(body) if branches:
                    self.run(body, times)
                case Loop(body, turns, taken) if body in self.reader.sending:
                    for turn in range(turns):
                        self.run(body, branches=turn < taken)
                case Loop(body, turns):
                    self.run(body, times * turns)

    def start(self, action: Start) -> None:
        """Begin a transfer as soon as the links of its mesh axes are free."""
        begin = max([self.now, *(self.links.get(axis, 0.0) for axis in action.axes)])
        end = begin + action.seconds
        self.links.update(dict.fromkeys(action.axes, end))
        self.under_way[action.key] = end, action
        self.transfers.append(Span(" x ".join(action.axes), begin, end))

    def wait(self, key: str) -> None:
        """Wait for a transfer; one that is over, or that sends nothing, takes no time."""
        end, action = self.under_way.pop(key, (0.0, None))
        if action is not None and end > self.now:
            self.spend("exposed", end - self.now, action.line, kind=action.kind)

    def spend(self, where: str, seconds: float, line: Instruction, *, times: int = 1, kind: str | None = None) -> None:
        """Let time of the TensorCore pass."""
        end = self.now + seconds * times
        if self.core and self.core[-1].where == where:
            self.core[-1] = self.core[-1]._replace(end=end)
        else:
            self.core.append(Span(where, self.now, end))
        self.now = end
        before = self.costs.get(line.name, _Cost(line, kind))
        self.costs[line.name] = before._replace(seconds=before.seconds + seconds * times, calls=before.calls + times)

    def result(self, frames: Frames) -> StepSeconds:
        """Return the sums."""
        exposed = math.fsum(cost.seconds for cost in self.costs.values() if cost.kind)
        compute = math.fsum(cost.seconds for cost in self.costs.values() if not cost.kind)
        dearest = sorted(self.costs.values(), key=lambda cost: -cost.seconds)[:_SHOWN]
        return StepSeconds(
            total=compute + exposed,
            compute=compute,
            exposed=exposed,
            hidden=max(math.fsum(one.end - one.start for one in self.transfers) - exposed, 0.0),
            operations=tuple(
                Operation(
                    f"{cost.kind} {cost.line.name}" if cost.kind else cost.line.name,
                    cost.seconds,
                    cost.calls,
                    bool(cost.kind),
                    op_name_of(cost.line),
                    source_of(cost.line, frames),
                )
                for cost in dearest
            ),
            spans=tuple(sorted([*self.core, *self.transfers], key=lambda one: one.start)),
            notes=tuple(f"assumed: {count} x {what}" for what, count in sorted(self.reader.assumed.items())),
        )


_SHOWN = 10
