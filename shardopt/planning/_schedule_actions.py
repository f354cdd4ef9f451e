"""Actions of a TPU's TensorCore in a compiled computation: compute, start a transfer, wait for a transfer, loop."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardopt.hlo._collective import Collective
from shardopt.hlo._hlo_text import Instruction, arrays, attributes, nbytes, operands
from shardopt.hlo._program import Program
from shardopt.hlo._walk import (
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
from shardopt.planning._attention_kernels import KERNELS, splash_flops
from shardopt.planning._costs import torus_axes
from shardopt.planning._hardware import Hardware


class Compute(NamedTuple):
    """Computation on the TensorCore."""

    line: Instruction
    seconds: float


class Start(NamedTuple):
    """A transfer begins, over the mesh axes `axes`; alone it takes `seconds`."""

    key: str
    line: Instruction
    kind: str
    axes: tuple[str, ...]
    seconds: float


class Done(NamedTuple):
    """The TensorCore waits for the transfer with this key."""

    key: str


class Loop(NamedTuple):
    """A computation runs `turns` times. The branches directly in it run in the first `taken` iterations only."""

    computation: str
    turns: int
    taken: int


class Branch(NamedTuple):
    """The most expensive branch of a conditional."""

    computation: str


Action = Compute | Start | Done | Loop | Branch


@dataclasses.dataclass
class Reader:
    """Translate computations of a program to actions, each computation once.

    A pass is a branch in the loop over the ticks of `schedule`. It counts in the ticks when at least one stage runs it.

    Attributes:
      program: the compiled program.
      chip: the chip that runs it.
      clock: cycles per second of the chip, the unit of XLA's estimates.
      schedule: the schedule of a pipeline.
      assumed: number of assumptions by their text: loops with unknown trip counts, instructions without an estimate.
      actions: actions by computation.
      costs: seconds by computation.
    """

    program: Program
    chip: Hardware
    clock: float
    schedule: Schedule | None = None
    assumed: Counter[str] = dataclasses.field(default_factory=Counter)
    actions: dict[str, tuple[Action, ...]] = dataclasses.field(default_factory=dict)
    costs: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sending = computations_with_collectives(self.program.module)
        if unread := unread_starts(self.program.module):
            self.assumed["SparseCore start without a collective, counted as nothing"] = len(unread)

    def read(self, name: str) -> tuple[Action, ...]:
        """Return the actions of a computation, in the order of its schedule."""
        if name not in self.actions:
            self.actions[name] = tuple(self._read(name))
        return self.actions[name]

    def _read(self, name: str) -> Iterator[Action]:
        lines = self.program.module.computations.get(name, ())
        shapes = {line.name: line.shape for line in lines}
        sites = {line.name: list(self._sites(name, line)) for line in lines}
        # a collective that is spread over fusions ends with its last piece
        last_pieces = {
            chain: line.name for line in lines for site in sites[line.name] if (chain := chain_of(site.instruction))
        }
        begun_chains: set[str] = set()
        keys: dict[str, str] = {}  # instruction -> key of the transfer that it continues
        delayed: dict[str, list[Start]] = {}  # starts without operands, which begin at their update
        for line in lines:
            opcode = line.opcode
            if opcode == "while":
                yield self._loop(name, line)
            elif opcode == "conditional":
                yield Branch(max(callees(line), key=self.cost))
            elif opcode == "call":
                yield from (Loop(callee, 1, 1) for callee in callees(line))
            elif opcode == "recv":
                keys[line.name] = _rendezvous(line) or line.name
            elif opcode.endswith(("-update", "-done")):
                key = keys.get(operands(line)[0], "")
                keys[line.name] = key
                yield from delayed.pop(key, [])
                if opcode.endswith("-done") and key:
                    yield Done(key)
            else:
                starts, ends = [], []
                for site in sites[line.name]:
                    chain = chain_of(site.instruction)
                    key = f"{name} {chain}" if chain else _rendezvous(line) or line.name
                    start = None if chain and chain in begun_chains else self._start(key, site)
                    starts += [start] if start else []
                    begun_chains |= {chain} if chain else set()
                    if last_pieces.get(chain or "") == line.name or not (chain or site.asynchronous):
                        ends.append(Done(key))
                    elif not chain:
                        keys[line.name] = key
                if line.name in keys and not operands(line):
                    delayed[line.name] = starts
                else:
                    yield from starts
                if not opcode.endswith("-start") and (
                    seconds := self._seconds(line, shapes, sends=bool(sites[line.name]))
                ):
                    yield Compute(line, seconds)
                yield from ends

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
        return Loop(attributes(line)["body"].lstrip("%"), turns, taken)

    def cost(self, name: str) -> float:
        """Return the seconds of a computation without any overlap of its actions."""
        if name not in self.costs:
            times = []
            for action in self.read(name):
                match action:
                    case Loop(body, turns):
                        times.append(turns * self.cost(body))
                    case Branch(body):
                        times.append(self.cost(body))
                    case Compute(_, seconds) | Start(_, _, _, _, seconds):
                        times.append(seconds)
            self.costs[name] = math.fsum(times)
        return self.costs[name]

    def _start(self, key: str, site: CollectiveSite) -> Start | None:
        """Return the transfer of a collective; None if no device sends to another."""
        collective = self.program.collective(site)
        if collective is None:
            return None
        axes = collective.axes or tuple(axis for axis, size in self.program.sizes.items() if size > 1)
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
        hops = max(1.0, size ** (1 / axes) / 4) if site.kind in ("all-to-all", "ragged-all-to-all") else 1.0
        return hops * collective.wire_bytes / (axes * self.chip.link_bandwidth)

    def _seconds(self, line: Instruction, shapes: dict[str, str], *, sends: bool) -> float:
        """Return the seconds that the TensorCore computes an instruction."""
        cycles = _CYCLES.search(line.rest)
        if cycles and int(cycles[1]) < _UNKNOWN_CYCLES:
            return int(cycles[1]) / self.clock
        write_seconds = nbytes(line.shape) / self.chip.memory_bandwidth
        if line.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in line.rest:
            inputs = [shapes[name] for name in operands(line) if name in shapes]
            if flops := kernel_flops(line, inputs):
                return flops / self.chip.flops
            self.assumed[f"kernel {_stem(line)} without an estimate, counted by its bytes"] += 1
            return write_seconds + sum(map(nbytes, inputs)) / self.chip.memory_bandwidth
        if (
            sends
            or line.opcode in _FREE
            or nbytes(line.shape) <= _SMALL
            or any(word in line.rest for word in _FREE_CALLS)
        ):
            return 0.0
        self.assumed[f"{_stem(line)} without an estimate, counted by the bytes of its result"] += 1
        return 2 * write_seconds


def kernel_flops(line: Instruction, inputs: list[str]) -> float:
    """Return the flops of a Pallas kernel: its stated flops, or `splash_flops` for splash attention; else 0."""
    if stated := _STATED_FLOPS.search(line.rest):
        return float(stated[1])
    if "splash" not in line.name:
        return 0.0
    sizes = [dims for shape in inputs if len(dims := _dims(shape)) >= 3 and shape.startswith(("bf16", "f16", "f32"))]
    if not sizes:
        return 0.0
    *heads, length, width = max(sizes, key=math.prod)
    value_width = sizes[2][-1] if len(sizes) > 2 else width  # queries, keys and values come first
    products = next((count for word, count in KERNELS.items() if word in line.name), (2, 2))
    widths = {"keys": width, "values": min(value_width, width)}
    return splash_flops(*products, heads=math.prod(heads), length=length, **widths)


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**62
_STATED_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "recv", "send", "opt-barrier")
_FREE_CALLS = ('custom_call_target="AllocateBuffer"', 'custom_call_target="ConcatBitcast"')
_SMALL = 4096
"""Bytes of a register. Results of at most this size, such as scalars, have no estimate and take almost no time."""


def _stated_torus_axes(line: Instruction) -> int | None:
    """Return how many torus axes a collective uses by the text of the compiler; None if the text does not say."""
    if match := re.search(r'"emitter":"(\d)D', line.rest):
        return int(match[1])
    if match := re.search(r"cores:\{([\d ]+)\}", line.rest):
        return len(match[1].split())
    return 1 if "RingSumEmitter" in line.rest or "async_collective_fusion_config" in line.rest else None


def _rendezvous(line: Instruction) -> str | None:
    """Return the name that a send to another slice and its recv have in common."""
    match = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', line.rest)
    return match[1] if match else None


def _stem(line: Instruction) -> str:
    return re.sub(r"[.\d]+$", "", line.name)


def _dims(shape: str) -> list[int]:
    return [int(dim) for dim in arrays(shape)[0].partition("[")[2].rstrip("]").split(",") if dim.isdigit()]
