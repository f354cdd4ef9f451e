"""Actions of a TPU's TensorCore in a compiled computation: compute, start a transfer, wait for a
transfer, loop.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from shardopt.hlo._collective import Collective
from shardopt.hlo._hlo_text import (
    Instruction,
    array_shape,
    attributes,
    elements,
    operands,
    tiled_nbytes,
)
from shardopt.hlo._program import CompiledProgram, _computation, _convolution, _dot
from shardopt.hlo._walk import (
    ON_SPARSE_CORE,
    CollectiveSite,
    callees,
    chain_of,
    collectives_under,
    computations_with_collectives,
    crosses_slices,
    trip_count,
    unread_starts,
)
from shardopt.pipeline import Schedule
from shardopt.planning._costs import torus_axes
from shardopt.planning._hardware import Hardware
from step_times._attention_kernels import (
    kernel_call,
    kernel_flops,
    scheduled_cycles,
    shared_by_cores,
)
from step_times._grouped_products import grouped_work
from step_times._links import HOST_BANDWIDTHS
from step_times._vector_work import (
    KERNELS,
    FusionReader,
    VectorUnits,
    VectorWork,
    is_in_hbm,
)

Kernels = Literal["scheduled", "stated"]
"""Where the seconds of a Pallas kernel come from: its final schedule if that is known, or the flops
that it states.
"""


class Compute(NamedTuple):
    """Computation on the TensorCore.

    `basis` says where the seconds of a Pallas kernel come from. `memory_seconds` is how long its own
    bytes take the HBM.
    """

    line: Instruction
    seconds: float
    basis: str = ""
    memory_seconds: float = 0.0


class Start(NamedTuple):
    """A transfer begins, over the mesh axes `axes` or the link to the host; alone it takes `seconds`."""

    key: str
    line: Instruction
    kind: str
    axes: tuple[str, ...]
    seconds: float


class Copy(NamedTuple):
    """A copy in the memory of a chip begins beside the TensorCore; alone it takes `seconds`."""

    key: str
    line: Instruction
    seconds: float


class Done(NamedTuple):
    """The TensorCore waits for the transfer or copy with this key."""

    key: str


class Loop(NamedTuple):
    """A computation runs `turns` times.

    The branches directly in it run in the first `taken` iterations only. `sends` says that a turn
    has transfers, which overlap with other turns.
    """

    computation: str
    turns: int
    taken: int
    sends: bool


class Branch(NamedTuple):
    """The most expensive branch of a conditional."""

    computation: str


Action = Compute | Start | Copy | Done | Loop | Branch


@dataclasses.dataclass
class Reader:
    """Translate computations of a program to actions, each computation once.

    A pass is a branch in the loop over the ticks of `schedule`. It counts in the ticks when at
    least one stage runs it.

    Attributes:
      program: the compiled program.
      chip: the chip that runs it.
      clock: cycles per second of the chip, the unit of XLA's estimates.
      memory_share: the share of the HBM bandwidth that operations without products reach.
      schedule: the schedule of a pipeline.
      kernels: where the seconds of Pallas kernels come from.
      assumed: number of assumptions by their text: loops with unknown trip counts, products
        without an estimate.
      actions: actions by computation.
      costs: seconds by computation.
    """

    program: CompiledProgram
    chip: Hardware
    clock: float
    memory_share: float
    schedule: Schedule | None = None
    kernels: Kernels = "scheduled"
    assumed: Counter[str] = dataclasses.field(default_factory=Counter)
    actions: dict[str, tuple[Action, ...]] = dataclasses.field(default_factory=dict)
    costs: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sending = computations_with_collectives(self.program.module)
        self.fusions = FusionReader(self.program.module)
        self.units = VectorUnits.of(self.chip, self.memory_share)
        module = self.program.module
        self._flops = functools.cache(lambda name, _: _computation(module, name, self._flops, None))
        self._sends = functools.cache(self._has_transfers)
        unread = unread_starts(self.program.module)
        if unread:
            self.assumed["SparseCore start without a collective, counted by its bytes"] = len(
                unread
            )

    def read(self, name: str) -> tuple[Action, ...]:
        """Return the actions of a computation, in the order of its schedule."""
        if name not in self.actions:
            self.actions[name] = tuple(self._read(name))
        return self.actions[name]

    def _read(self, name: str) -> Iterator[Action]:
        lines = self.program.module.computations.get(name, ())
        computation = _Computation(
            self,
            name,
            shapes={line.name: line.shape for line in lines},
            sites={line.name: list(self._sites(name, line)) for line in lines},
        )
        for line in lines:
            if line.opcode == "while":
                yield self._loop(name, line)
            elif line.opcode == "conditional":
                yield Branch(max(callees(line), key=self.cost))
            elif line.opcode == "call":
                yield from (Loop(callee, 1, 1, self._sends(callee)) for callee in callees(line))
            else:
                yield from computation.actions(line)

    def _sites(self, name: str, line: Instruction) -> Iterator[CollectiveSite]:
        if line.opcode not in ("while", "conditional", "call"):
            yield from collectives_under(self.program.module, name, line, self.sending)

    def _loop(self, name: str, line: Instruction) -> Loop:
        turns = trip_count(self.program.module, name, line)
        if turns is None:
            self.assumed["loops that do not tell how often they turn, counted once"] += 1
            turns = 1
        taken = turns
        if self.schedule is not None and turns == self.schedule.num_ticks:
            taken = max(len(np.unique(ticks)) for ticks in self.schedule.ticks.passes.values())
        body = attributes(line)["body"].lstrip("%")
        return Loop(body, turns, taken, self._sends(body))

    def _has_transfers(self, name: str) -> bool:
        """Return whether a computation sends something to another device or to the host."""
        return name in self.sending or any(
            _is_host_copy(line) or any(map(self._sends, callees(line)))
            for line in self.program.module.computations.get(name, ())
        )

    def cost(self, name: str) -> float:
        """Return the seconds of a computation without any overlap of its actions."""
        if name not in self.costs:
            times = []
            for action in self.read(name):
                match action:
                    case Loop(body, turns, _, _):
                        times.append(turns * self.cost(body))
                    case Branch(body):
                        times.append(self.cost(body))
                    case Compute(_, seconds) | Start(_, _, _, _, seconds):
                        times.append(seconds)
            self.costs[name] = math.fsum(times)
        return self.costs[name]

    def start(self, key: str, site: CollectiveSite) -> Start | None:
        """Return the transfer of a collective; None if no device sends to another."""
        collective = self.program.collective(site)
        if collective is None:
            return None
        axes = collective.axes or tuple(
            axis for axis, size in self.program.sizes.items() if size > 1
        )
        return Start(key, site.instruction, site.kind, axes, self._wire_seconds(site, collective))

    def _wire_seconds(self, site: CollectiveSite, collective: Collective) -> float:
        if crosses_slices(site.instruction):
            return collective.wire_bytes / self.chip.network_bandwidth
        devices = self.program.replicas * self.program.partitions
        size = collective.group_size or math.prod(
            self.program.sizes[axis] for axis in collective.axes or self.program.sizes
        )
        axes = _stated_torus_axes(site.instruction) or torus_axes(size, devices, self.chip)
        axes = min(axes, max(self.chip.torus_dims, 1))
        # in an all-to-all a number passes the devices in between, a quarter of a ring on average
        hops = (
            max(1.0, size ** (1 / axes) / 4)
            if site.kind in ("all-to-all", "ragged-all-to-all")
            else 1.0
        )
        return hops * collective.wire_bytes / (axes * self.chip.link_bandwidth)

    def compute(self, line: Instruction, shapes: dict[str, str], *, sends: bool) -> Compute:
        """Return the computation of an instruction on the TensorCore.

        Products, and operations that send, take the cycles that XLA estimates. All others take what
        `VectorUnits` says, kernels too.
        """
        if (
            line.opcode == "custom-call"
            and 'custom_call_target="tpu_custom_call"' in line.arguments
        ):
            return self._kernel(line, shapes)
        if line.opcode in _FREE or any(word in line.arguments for word in _FREE_CALLS):
            return Compute(line, 0.0)
        work = self.fusions.work(line, shapes)
        nbytes = self.fusions.moved_bytes(line, shapes)
        seconds = self.units.seconds(nbytes, work)
        memory_seconds = self.units.seconds(nbytes, VectorWork(0))
        has_product = self.fusions.has_product(line)
        if has_product or sends:
            cycles = self._estimated_cycles(line)
            if cycles is None and has_product:
                self.assumed[
                    "product without an estimate, counted by its flops at the peak or its bytes"
                ] += 1
                seconds = max(seconds, self._product_seconds(line, shapes))
            else:
                seconds = (cycles or 0) / self.clock
        return Compute(line, seconds, memory_seconds=min(memory_seconds, seconds))

    def _product_seconds(self, line: Instruction, shapes: dict[str, str]) -> float:
        """Return the seconds of the flops of an operation of XLA at the chip's peak."""
        if line.opcode == "fusion":
            flops = self._flops(callees(line)[0], True).total
        else:
            flops = (_dot if line.opcode == "dot" else _convolution)(line, shapes)
        return flops / (self.chip.flops * (2 if self.fusions.multiplies_eight_bits(line) else 1))

    def _estimated_cycles(self, line: Instruction) -> int | None:
        """Return the cycles that XLA writes on an instruction; None if it writes none."""
        match = _CYCLES.search(line.arguments)
        return int(match[1]) if match and int(match[1]) < _UNKNOWN_CYCLES else None

    def copy(self, line: Instruction) -> Copy | Start | None:
        """Return a copy that begins with an instruction, or any other work of a SparseCore; None for
        other instructions.

        A copy to or from the host is a transfer over its link.
        """
        moved = self._copied_bytes(line)
        if not moved:
            return None
        if not _is_host_copy(line):
            return Copy(line.name, line, self.units.seconds(moved, VectorWork(0)))
        if self.chip.name not in HOST_BANDWIDTHS:
            self.assumed["copy to or from the host of unknown bandwidth, counted as nothing"] += 1
            return None
        result, _ = _result_and_inputs(line)
        return Start(
            line.name,
            line,
            "copy",
            ("from the host" if is_in_hbm(result) else "to the host",),
            moved / HOST_BANDWIDTHS[self.chip.name],
        )

    def _copied_bytes(self, line: Instruction) -> int:
        """Return the bytes that a copy beside the TensorCore reads from HBM and writes to it."""
        on_sparse_core = ON_SPARSE_CORE in line.arguments and line.opcode.endswith("-start")
        if not on_sparse_core and not _COPIES.search(line.opcode):
            return 0
        if callees(line):
            return sum(map(self._moved_in, callees(line)))
        result, inputs = _result_and_inputs(line)
        if not inputs:
            return 0
        source = inputs[0]
        if line.opcode.startswith("dynamic-update-slice"):
            result = inputs[1]  # an update in place moves what it brings
        return tiled_nbytes(result) * (is_in_hbm(result) + is_in_hbm(source))

    def _moved_in(self, name: str) -> int:
        """Return the bytes that the instructions of a computation move in HBM."""
        lines = self.program.module.computations.get(name, ())
        shapes = {line.name: line.shape for line in lines}
        moved = 0
        for line in lines:
            if line.opcode != "fusion" and callees(line):
                moved += sum(map(self._moved_in, callees(line)))
            elif line.opcode not in _FREE:
                moved += self.fusions.moved_bytes(line, shapes)
        return moved

    def _kernel(self, line: Instruction, shapes: dict[str, str]) -> Compute:
        """Return the computation of a Pallas kernel: by its final schedule, or by its flops at the
        chip's peak and its bytes; without products by the rule for all operations.
        """
        inputs = [shapes[name] for name in operands(line) if name in shapes]
        memory_seconds = self.units.seconds(
            self.fusions.moved_bytes(line, shapes), self._kernel_work(line, inputs)
        )
        grouped = grouped_work(line, inputs)
        if grouped:
            share = shared_by_cores(self.chip.cores, grouped.parallel) * self.chip.cores
            memory_seconds = self.units.seconds(grouped.nbytes, VectorWork(0))
            seconds = max(share * grouped.flops / self.chip.flops, memory_seconds)
            return Compute(line, seconds, "tiles", memory_seconds)
        call = kernel_call(line, inputs, self.chip.name)
        flops_seconds = kernel_flops(line, inputs) / self.chip.flops
        if self.chip.name in _TWICE_AS_FAST.get(line.name.partition("_")[0], ()):
            flops_seconds /= 2
        if call and self.kernels == "scheduled":
            # a kernel whose work cannot be divided among the cores of a device leaves all but one
            # idle
            share = shared_by_cores(self.chip.cores, call.parallel)
            flops_seconds *= share * self.chip.cores
            cycles = scheduled_cycles(self.chip.name, call)
            if cycles:
                # the bundles do not contain the stalls of a matrix unit that is asked for more than
                # its peak
                seconds = max(share * cycles / self.clock, flops_seconds, memory_seconds)
                return Compute(line, seconds, "scheduled", memory_seconds)
        if flops_seconds:
            seconds = max(flops_seconds, memory_seconds)
            return Compute(line, seconds, "stated", memory_seconds)
        return Compute(line, memory_seconds, "bytes", memory_seconds)

    def _kernel_work(self, line: Instruction, inputs: list[str]) -> VectorWork:
        """Return the arithmetic of a kernel without products; none if its name is not known."""
        names = [name for name in KERNELS if name in line.name]
        if not names:
            if not kernel_flops(line, inputs):
                self.assumed[f"kernel {_stem(line)}, whose arithmetic is not known"] += 1
            return VectorWork(0)
        size = max(math.prod(array_shape(shape)) for shape in inputs)
        return VectorWork(*(size * count for count in KERNELS[names[0]]))


@dataclasses.dataclass
class _Computation:
    """The instructions of a computation that compute, and that begin, continue or end a transfer.

    Attributes:
      reader: the reader of the program.
      name: the name of the computation.
      shapes: instruction -> the shape of its result.
      sites: instruction -> its collectives.
      last_pieces: chain -> its last piece, with which a collective that is spread over fusions ends.
      begun_chains: chains that have begun.
      keys: instruction -> the key of the transfer that it continues.
      delayed: starts without operands, which begin at their update.
    """

    reader: Reader
    name: str
    shapes: dict[str, str]
    sites: dict[str, list[CollectiveSite]]
    begun_chains: set[str] = dataclasses.field(default_factory=set)
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    delayed: dict[str, list[Start | Copy]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last_pieces = {
            chain: line
            for line, sites in self.sites.items()
            for site in sites
            if (chain := chain_of(site.instruction))
        }

    def actions(self, line: Instruction) -> Iterator[Action]:
        """Yield the actions of an instruction."""
        if line.opcode == "recv":
            self.keys[line.name] = _rendezvous(line) or line.name
        elif line.opcode.endswith(("-update", "-done")):
            yield from self._continue(line)
        else:
            yield from self._begin(line)

    def _continue(self, line: Instruction) -> Iterator[Action]:
        key = self.keys.get(operands(line)[0], "")
        self.keys[line.name] = key
        yield from self.delayed.pop(key, [])
        if line.opcode.endswith("-done") and key:
            yield Done(key)

    def _begin(self, line: Instruction) -> Iterator[Action]:
        sites = self.sites[line.name]
        starts: list[Start | Copy | None] = []
        ends = []
        for site in sites:
            chain = chain_of(site.instruction)
            key = f"{self.name} {chain}" if chain else _rendezvous(line) or line.name
            if chain is None or chain not in self.begun_chains:
                starts.append(self.reader.start(key, site))
            if chain:
                self.begun_chains.add(chain)
            if self._ends(line, site, chain):
                ends.append(Done(key))
            elif not chain:
                self.keys[line.name] = key
        if not sites:
            copy = self.reader.copy(line)
            starts = [copy]
            if copy:
                self.keys[line.name] = copy.key
        begun = [start for start in starts if start]
        if line.name in self.keys and not operands(line):
            self.delayed[line.name] = begun
        else:
            yield from begun
        if not line.opcode.endswith("-start"):
            compute = self.reader.compute(line, self.shapes, sends=bool(sites))
            if compute.seconds:
                yield compute
        yield from ends

    def _ends(self, line: Instruction, site: CollectiveSite, chain: str | None) -> bool:
        """Return whether the transfer of a collective ends with this instruction."""
        if chain:
            return self.last_pieces[chain] == line.name
        return not site.asynchronous


_TWICE_AS_FAST = {"int8": ("v5e", "v5p", "v6e"), "fp8": ("tpu7x",)}
"""Chips that multiply 8 bits twice as fast as bfloat16, by the pages that
`shardopt.planning._hardware` names.
"""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**62
_COPIES = re.compile(r"^(copy|slice|dynamic-slice|dynamic-update-slice|async)-start$")
_FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "recv",
    "send",
    "opt-barrier",
)
_FREE_CALLS = ('custom_call_target="AllocateBuffer"', 'custom_call_target="ConcatBitcast"')


def _stated_torus_axes(line: Instruction) -> int | None:
    """Return how many torus axes a collective uses by the text of the compiler.

    None if the text does not say.
    """
    match = re.search(r'"emitter":"(\d)D', line.arguments)
    if match:
        return int(match[1])
    match = re.search(r"cores:\{([\d ]+)\}", line.arguments)
    if match:
        return len(match[1].split())
    return (
        1
        if "RingSumEmitter" in line.arguments or "async_collective_fusion_config" in line.arguments
        else None
    )


def _rendezvous(line: Instruction) -> str | None:
    """Return the name that a send to another slice and its recv have in common."""
    match = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', line.arguments)
    return match[1] if match else None


def _result_and_inputs(line: Instruction) -> tuple[str, tuple[str, ...]]:
    """Return the shapes of a start: a copy has its result first, an asynchronous slice its inputs."""
    first, *others = elements(line.shape)
    return (others[0], elements(first)) if first.startswith("(") else (first, tuple(others))


def _is_host_copy(line: Instruction) -> bool:
    """Return whether a copy begins whose result or input lies in the memory of the host."""
    return bool(_COPIES.search(line.opcode)) and "S(5)" in line.shape


def _stem(line: Instruction) -> str:
    return re.sub(r"[.\d]+$", "", line.name)
