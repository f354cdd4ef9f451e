"""Estimate the time of a compiled TPU program: walk its schedule with XLA's own estimates and
published link rates.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple, get_args

from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled, Lowered

from shardopt.core._errors import calling, error_text, format_error
from shardopt.core._tables import aligned, name_end
from shardopt.core._types import Devices, PyTree
from shardopt.hlo._hlo_text import Instruction
from shardopt.hlo._program import CanLower, CompiledProgram, read_program
from shardopt.hlo._source_lines import Frames, op_name_of, read_frames, source_of
from shardopt.hlo._walk import check_schedule
from shardopt.pipeline import Schedule
from shardopt.planning._aot import AotReport
from shardopt.planning._hardware import HARDWARE, Hardware, find_hardware
from step_times._links import Links
from step_times._schedule_actions import Branch, Compute, Copy, Done, Kernels, Loop, Reader, Start
from step_times._vector_work import error_bar
from step_times._vector_work import memory_share as memory_share_of


class CompiledOperation(NamedTuple):
    """The time of one instruction in a step, all its calls together.

    Attributes:
      name: name of the instruction; for a collective its kind comes first.
      seconds: seconds that the TensorCore computes it, or waits for it.
      calls: calls per step.
      waits: whether it is a collective that the TensorCore waits for.
      op_name: its name in jax, such as "jit(step)/dot_general".
      source: "file:line" of the user's code; "" if the program does not contain it.
      basis: of a Pallas kernel: "scheduled" by its final schedule, "tiles" by the whole tiles of a
        grouped product, "stated" by its flops at the chip's peak, or "bytes"; "" for other
        operations.
    """

    name: str
    seconds: float
    calls: int
    waits: bool
    op_name: str
    source: str
    basis: str = ""


class Span(NamedTuple):
    """A bar of the timeline: `where` is "compute" or "exposed" on the TensorCore, or the mesh axes
    of a transfer.
    """

    where: str
    start: float
    end: float


class StepSeconds(NamedTuple):
    """Estimated seconds of one execution of a compiled program on a device; `print` shows them.

    Attributes:
      total: compute + exposed. Without estimates `total`, `compute`, `exposed` and `hidden` are
        None.
      compute: seconds that the TensorCore computes.
      exposed: seconds that the TensorCore waits for other devices or for the host.
      hidden: seconds of transfers that overlap with computation.
      operations: the ten most expensive operations, exposed collectives included.
      spans: the timeline, ordered by start time.
      notes: assumptions of the estimate, as sentences.
      reason: why there are no estimates; None if there are.
      all_operations: all operations, the most expensive first.
      collectives: (kind, mesh axes) -> seconds of all its transfers, hidden ones too.
      error: how far measured runs were from such estimates, in words.
    """

    total: float | None
    compute: float | None
    exposed: float | None
    hidden: float | None
    operations: tuple[CompiledOperation, ...] = ()
    spans: tuple[Span, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str | None = None
    all_operations: tuple[CompiledOperation, ...] = ()
    collectives: Mapping[tuple[str, tuple[str, ...]], float] = {}
    error: str = ""

    def to_json(self) -> dict[str, object]:
        """Return a dict of plain numbers and strings, with ten operations and without the timeline."""
        operations = [operation._asdict() for operation in self.operations]
        collectives = {
            f"{kind} over {' x '.join(axes)}": time
            for (kind, axes), time in self.collectives.items()
        }
        fields = self._asdict() | {
            "operations": operations,
            "spans": len(self.spans),
            "collectives": collectives,
        }
        del fields["all_operations"]
        return fields

    def __str__(self) -> str:
        """Return the sums in one line, the most expensive operations as a table, and the
        assumptions.
        """
        if (
            self.total is None
            or self.compute is None
            or self.exposed is None
            or self.hidden is None
        ):
            return f"step time unknown: {self.reason}"
        sums = (
            f"{self.total * 1e3:.3f} ms per step, estimated ({self.error}): "
            f"{self.compute * 1e3:.3f} compute, "
            f"{self.exposed * 1e3:.3f} exposed communication ({self.hidden * 1e3:.3f} hidden)"
        )
        rows = [("ms", "share", "calls", "operation", "where")]
        for operation in self.operations:
            name = f"wait: {operation.name}" if operation.waits else operation.name
            name += f" ({operation.basis})" if operation.basis else ""
            share = operation.seconds / self.total if self.total else 0.0
            rows.append(
                (
                    f"{operation.seconds * 1e3:.3f}",
                    f"{share:.1%}",
                    str(operation.calls),
                    name,
                    _source_and_name(operation.source, operation.op_name),
                )
            )
        return "\n".join([sums, *aligned(rows, lambda column, _: column < 3), *self.notes])


@calling("step_seconds")
def step_seconds(
    program: CanLower | Lowered | Compiled | str,
    *args: PyTree,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    hardware: str | Hardware | None = None,
    schedule: Schedule | None = None,
    kernels: Kernels = "scheduled",
    memory_share: float | None = None,
) -> StepSeconds:
    """Estimate how long a compiled TPU program takes on a device, without running it.

    The estimate is for comparing two programs.

    Args:
      program: the program, as in `so.hlo.audit`.
      *args: arguments of the program, as in `so.hlo.audit`.
      mesh: the mesh, as in `so.hlo.audit`.
      hardware: the name of a chip, or a `Hardware` that describes one device; by default the chip
        of the mesh's devices.
      schedule: the schedule of a pipeline, such as `opt.config.schedule`. A pass is a branch, and
        counts in the ticks when at least one stage runs it. Without `schedule` it counts in every
        tick.
      kernels: "scheduled" takes the final schedule of the attention kernels whose schedule is
        known. "stated" takes the flops of all kernels at the chip's peak, with all cores at work.
      memory_share: the share of the HBM bandwidth that operations without products reach; by default
        that of the chip in `memory_shares.csv`.

    Returns:
      A `StepSeconds`: `.total`, `.compute`, `.exposed`, `.hidden`, `.operations`, `.to_json()`;
      `print` shows it. On other platforms `.total` is None and `.reason` says why.

    Raises:
      TypeError: in the same cases as `so.hlo.audit`.
      ValueError: in the same cases as `so.hlo.audit`.
      ValueError: if the chip of a TPU program is neither passed nor known.
      ValueError: if `memory_share` is not above 0 and at most 1, or is left out for a chip without a
        row in `memory_shares.csv`.
      ValueError: if no loop of the program runs as often as `schedule` has ticks.
      ValueError: if `kernels` is neither "scheduled" nor "stated".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> print(step_seconds(jax.jit(jnp.dot), jnp.ones((8, 8)), jnp.ones((8, 8))))
      step time unknown: the program holds no cycle estimates; only XLA:TPU writes them.

    Note:
      - The program is walked from its first instruction to its last. Products take the
        `estimated_cycles` that XLA:TPU writes on them. Loops count with their trip counts, branches
        as their most expensive one.
      - An operation without products takes the longer of its bytes at `memory_share` of the HBM
        bandwidth and its arithmetic on the vector units. Pallas kernels without products, too. What
        lies in VMEM has no bytes: the copy that brings it there takes the bandwidth that operations
        leave, and its `done` waits for it.
      - A collective takes its wire bytes over the published links. The number of torus axes comes
        from its emitter, or from the size of its mesh axis. Between slices it uses the data-centre
        network.
      - The TensorCore waits for a synchronous collective. An asynchronous one, also on the
        SparseCore, overlaps with computation, and its `done` waits for it. Transfers over the same
        mesh axis share its links equally as long as they last.
      - XLA estimates no Pallas kernels. Splash attention takes the VLIW bundles of its final
        schedule, one a cycle, in blocks and heads whose schedule is known
        (`benchmarks/kernel_schedules.py`), but at least its flops at the chip's peak. A grouped product
        takes the flops and bytes of the tiles that its kernel visits. Other kernels
        take their stated flops at the chip's peak, splash attention those of its visible tiles. No
        kernel takes less than its bytes. `CompiledOperation.basis` says which.
      - A device of v4 or v5p has two TensorCores. They share a kernel's rows and heads as far as it
        lets them.
      - A copy to or from the host takes its bytes over the published link, one each way. What a
        SparseCore does beside the TensorCore and sends nothing takes its bytes, as a copy does.
      - Not counted: the latency of collectives, the start of each operation, the HBM that
        collectives read and write, missing wrap-around links, other programs on the same links.
    """
    if kernels not in get_args(Kernels):
        problem = f"kernels must be 'scheduled' or 'stated', got {kernels!r}."
        raise ValueError(error_text(problem, fix="leave it out, or pass one of both."))
    if memory_share is not None and not 0 < memory_share <= 1:
        problem = f"memory_share must be above 0 and at most 1, got {memory_share!r}."
        raise ValueError(error_text(problem, fix="leave it out, or pass a share such as 0.7."))
    parsed = read_program(program, args, mesh=mesh)
    check_schedule(parsed.module, schedule)
    chip = (
        find_hardware(hardware).per_device()
        if hardware is not None
        else hardware_of(parsed.devices)
    )
    return walk_schedule(parsed, chip, schedule, kernels, memory_share)


def of_report(report: AotReport, schedule: Schedule | None = None) -> StepSeconds:
    """Return the seconds of a step that `so.planning.aot` has compiled."""
    chip = report.topology.partition(":")[0]
    return step_seconds(report.text, mesh=report.mesh_shape, hardware=chip, schedule=schedule)


_DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def hardware_of(devices: Devices) -> Hardware | None:
    """Return the peak rates of one of these devices; None if they are not known TPUs.

    If a chip appears as two devices, each has half of its arithmetic, memory and links.
    """
    name = _DEVICE_KINDS.get(getattr(devices[0], "device_kind", "")) if devices else None
    if name is None:
        return None
    places = {
        (getattr(device, "slice_index", 0), *getattr(device, "coords", (i,)))
        for i, device in enumerate(devices)
    }
    return HARDWARE[name].per_device(len(devices) // len(places))


def walk_schedule(
    program: CompiledProgram,
    chip: Hardware | None,
    schedule: Schedule | None = None,
    kernels: Kernels = "scheduled",
    share: float | None = None,
) -> StepSeconds:
    """Return the seconds of a parsed program; see `step_seconds`."""
    # before code generation a program for TPUs has tiles, and no estimates yet
    if "estimated_cycles" not in program.text and ":T(" not in program.text:
        return _unknown("the program holds no cycle estimates; only XLA:TPU writes them.")
    if chip is None:
        fix = "pass hardware=, such as 'v5p', or the mesh of devices that it was compiled for."
        raise ValueError(
            format_error("step_seconds", "cannot tell the chip of this program.", fix=fix)
        )
    if chip.clock is None:
        return _unknown(f"{chip.name} has no clock in which XLA estimates; only TPUs have.")
    share = memory_share_of(chip) if share is None else share
    walk = _Walk(Reader(program, chip, chip.clock, share, schedule, kernels))
    walk.run(program.module.entry)
    for key in list(walk.under_way):
        walk.wait(key)
    return walk.result(read_frames(program.text))._replace(error=error_bar(chip.name, share))


def _unknown(reason: str) -> StepSeconds:
    return StepSeconds(None, None, None, None, reason=reason)


class _Cost(NamedTuple):
    """The time of an instruction up to now.

    `kind` is the kind of a collective, `basis` that of a kernel's seconds.
    """

    line: Instruction
    kind: str | None
    basis: str = ""
    seconds: float = 0.0
    calls: int = 0


@dataclasses.dataclass
class _Walk:
    """The state of the walk.

    `now` is the clock of the TensorCore, `links` has the transfers that are sent.
    `under_way` has the transfers that nobody has waited for. `costs` has the times of instructions
    up to now.

    `idle` counts the seconds that the HBM had nothing to do for operations. Copies between HBM and
    VMEM take them in the order in which they begin. `copies` has each copy that nobody has waited
    for: the `idle` at which it ends, how often it is made, and its instruction.
    """

    reader: Reader
    now: float = 0.0
    links: Links = dataclasses.field(default_factory=Links)
    under_way: dict[str, tuple[int, Start]] = dataclasses.field(default_factory=dict)
    core: list[Span] = dataclasses.field(default_factory=list)
    idle: float = 0.0
    copied_at: float = 0.0
    copies: dict[str, tuple[float, int, Instruction]] = dataclasses.field(default_factory=dict)
    costs: dict[str, _Cost] = dataclasses.field(default_factory=dict)
    collectives: dict[tuple[str, tuple[str, ...]], float] = dataclasses.field(default_factory=dict)

    def run(self, name: str, times: int = 1, *, branches: bool = True) -> None:
        """Run a computation `times` times at once.

        Without `branches`, skip the branches directly in it.
        """
        for action in self.reader.read(name):
            match action:
                case Compute():
                    self.compute(action, times)
                case Start():
                    self.start(action)
                case Copy():
                    self.copy(action, times)
                case Done(key):
                    self.wait_for_copy(key)
                    self.wait(key)
                case Branch(body) if branches:
                    self.run(body, times)
                case Loop(body, trip_count, taken, sends=True):
                    for turn in range(trip_count):
                        self.run(body, branches=turn < taken)
                case Loop(body, trip_count):
                    self.run(body, times * trip_count)

    def start(self, action: Start) -> None:
        """Begin a transfer."""
        number = self.links.send(action.axes, action.seconds, self.now)
        self.under_way[action.key] = number, action
        key = action.kind, action.axes
        self.collectives[key] = self.collectives.get(key, 0.0) + action.seconds

    def wait(self, key: str) -> None:
        """Wait for a transfer. The wait is zero if the transfer has ended or sends nothing."""
        if key not in self.under_way:
            return
        number, action = self.under_way.pop(key)
        end = self.links.end_of(number, self.now)
        if end > self.now:
            self.idle += end - self.now
            self.spend(
                "exposed",
                end - self.now,
                self.costs.get(action.line.name, _Cost(action.line, action.kind)),
            )

    def copy(self, action: Copy, times: int) -> None:
        """Begin a copy that is made `times` times, each beside the operations of one turn."""
        self.copied_at = max(self.copied_at, self.idle) + action.seconds * times
        self.copies[action.key] = self.copied_at, times, action.line

    def wait_for_copy(self, key: str) -> None:
        """Wait until a copy had enough of the bandwidth. Nothing happens for other keys."""
        end, times, line = self.copies.pop(key, (0.0, 1, None))
        if line is not None and end > self.idle:
            seconds = (end - self.idle) / times
            self.idle = end
            self.spend(
                "compute", seconds, self.costs.get(line.name, _Cost(line, None)), times=times
            )

    def compute(self, action: Compute, times: int) -> None:
        """Compute an instruction `times` times."""
        self.idle += (action.seconds - action.memory_seconds) * times
        cost = self.costs.get(action.line.name, _Cost(action.line, None, action.basis))
        self.spend("compute", action.seconds, cost, times=times)

    def spend(self, span_name: str, seconds: float, cost: _Cost, *, times: int = 1) -> None:
        """Advance the clock of the TensorCore, and add the time to a cost."""
        end = self.now + seconds * times
        if self.core and self.core[-1].where == span_name:
            self.core[-1] = self.core[-1]._replace(end=end)
        else:
            self.core.append(Span(span_name, self.now, end))
        self.now = end
        self.costs[cost.line.name] = cost._replace(
            seconds=cost.seconds + seconds * times, calls=cost.calls + times
        )

    def result(self, frames: Frames) -> StepSeconds:
        """Return the sums as a `StepSeconds`."""
        exposed = math.fsum(cost.seconds for cost in self.costs.values() if cost.kind)
        compute = math.fsum(cost.seconds for cost in self.costs.values() if not cost.kind)
        transfers = [
            Span(" x ".join(transfer.axes), transfer.start, transfer.end)
            for transfer in self.links.ended.values()
        ]
        most_expensive = sorted(self.costs.values(), key=lambda cost: -cost.seconds)
        operations = tuple(
            CompiledOperation(
                f"{cost.kind} {cost.line.name}" if cost.kind else cost.line.name,
                cost.seconds,
                cost.calls,
                bool(cost.kind),
                op_name_of(cost.line),
                source_of(cost.line, frames),
                cost.basis,
            )
            for cost in most_expensive
        )
        return StepSeconds(
            total=compute + exposed,
            compute=compute,
            exposed=exposed,
            hidden=max(math.fsum(self.collectives.values()) - exposed, 0.0),
            operations=operations[:_MAX_OPERATIONS],
            all_operations=operations,
            collectives=self.collectives,
            spans=tuple(sorted([*self.core, *transfers], key=lambda span: span.start)),
            notes=tuple(
                f"assumed: {count} x {assumption}"
                for assumption, count in sorted(self.reader.assumed.items())
            ),
        )


_MAX_OPERATIONS = 10


def _source_and_name(source: str, name: str) -> str:
    """Return the end of the path of a source, and the end of a jax name, as far as they are known."""
    return " ".join(filter(None, ("/".join(source.split("/")[-2:]), name_end(name))))
