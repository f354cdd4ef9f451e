"""A computation of a compiled TPU program as what its TensorCore does in turn: compute, start a transfer, wait for one, loop."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardopt.audit.collective import Collective
from shardopt.audit.hlo_text import Instruction, arrays, attributes, nbytes, operands
from shardopt.audit.program import Program
from shardopt.audit.walk import (
    Found,
    callees,
    chain_of,
    collectives_under,
    crosses_slices,
    trip_count,
    with_collectives,
)
from shardopt.pipeline import Schedule
from shardopt.planning.attention_kernels import KERNELS, splash_flops
from shardopt.planning.costs import torus_axes
from shardopt.planning.hardware import Hardware


class Compute(NamedTuple):
    """Work of the TensorCore."""

    line: Instruction
    seconds: float


class Start(NamedTuple):
    """A transfer begins: over which mesh axes, and how long it takes by itself."""

    key: str
    line: Instruction
    kind: str
    axes: tuple[str, ...]
    seconds: float


class Done(NamedTuple):
    """The TensorCore waits for the transfer of that key."""

    key: str


class Loop(NamedTuple):
    """A computation runs so many times, the branches directly in it in the first `taken` of them only."""

    computation: str
    turns: int
    taken: int


class Branch(NamedTuple):
    """Of the branches that could be taken, the dearest."""

    computation: str


Action = Compute | Start | Done | Loop | Branch


@dataclasses.dataclass
class Reader:
    """Reads computations of a program, once each; `clock` is the chip's, in which XLA estimates.

    In a loop over the ticks of `schedule` a pass is a branch, which counts in as many ticks as some stage takes it.

    `assumed` counts what the program does not tell: loops that do not say how often they turn, and by name what has no
    estimate.
    """

    program: Program
    chip: Hardware
    clock: float
    schedule: Schedule | None = None
    assumed: Counter[str] = dataclasses.field(default_factory=Counter)
    known: dict[str, tuple[Action, ...]] = dataclasses.field(default_factory=dict)
    costs: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sending = with_collectives(self.program.module)

    def read(self, name: str) -> tuple[Action, ...]:
        """Return the actions of a computation, in the order of its schedule."""
        if name not in self.known:
            self.known[name] = tuple(self._read(name))
        return self.known[name]

    def _read(self, name: str) -> Iterator[Action]:
        lines = self.program.module.computations.get(name, ())
        shapes = {line.name: line.shape for line in lines}
        under = {line.name: list(self._under(name, line)) for line in lines}
        # the last piece of a collective that is spread over fusions ends it
        last = {
            chain: line.name for line in lines for found in under[line.name] if (chain := chain_of(found.instruction))
        }
        begun: set[str] = set()
        keys: dict[str, str] = {}  # instruction -> key of the transfer that it carries on
        held: dict[str, list[Start]] = {}  # a start that has no data yet: its update brings them
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
                yield from held.pop(key, [])
                if opcode.endswith("-done") and key:
                    yield Done(key)
            else:
                starts, ends = [], []
                for found in under[line.name]:
                    chain = chain_of(found.instruction)
                    key = f"{name} {chain}" if chain else _rendezvous(line) or line.name
                    one = None if chain and chain in begun else self._start(key, found)
                    starts += [one] if one else []
                    begun |= {chain} if chain else set()
                    if last.get(chain or "") == line.name or not (chain or found.asynchronous):
                        ends.append(Done(key))
                    elif not chain:
                        keys[line.name] = key
                if line.name in keys and not operands(line):
                    held[line.name] = starts
                else:
                    yield from starts
                if not opcode.endswith("-start") and (
                    seconds := self._seconds(line, shapes, sends=bool(under[line.name]))
                ):
                    yield Compute(line, seconds)
                yield from ends

    def _under(self, name: str, line: Instruction) -> Iterator[Found]:
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
        """Return the seconds of a computation if nothing ran beside anything."""
        if name not in self.costs:
            each = []
            for one in self.read(name):
                match one:
                    case Loop(body, turns):
                        each.append(turns * self.cost(body))
                    case Branch(body):
                        each.append(self.cost(body))
                    case Compute(_, seconds) | Start(_, _, _, _, seconds):
                        each.append(seconds)
            self.costs[name] = math.fsum(each)
        return self.costs[name]

    def _start(self, key: str, found: Found) -> Start | None:
        """Return the transfer of a collective; None if no device sends to another."""
        one = self.program.collective(found)
        if one is None:
            return None
        axes = one.axes or tuple(axis for axis, size in self.program.sizes.items() if size > 1)
        return Start(key, found.instruction, found.kind, axes, self._wire_seconds(found, one))

    def _wire_seconds(self, found: Found, one: Collective) -> float:
        if crosses_slices(found.instruction):
            return one.wire_bytes / self.chip.network_bandwidth
        devices = self.program.replicas * self.program.partitions
        size = one.group_size or math.prod(self.program.sizes[axis] for axis in one.axes or self.program.sizes)
        axes = _told_axes(found.instruction) or torus_axes(size, devices, self.chip)
        axes = min(axes, max(self.chip.torus_dims, 1))
        # in an all-to-all a number goes past the devices in between, a quarter of a ring on average
        hops = max(1.0, size ** (1 / axes) / 4) if found.kind in ("all-to-all", "ragged-all-to-all") else 1.0
        return hops * one.wire_bytes / (axes * self.chip.link_bandwidth)

    def _seconds(self, line: Instruction, shapes: dict[str, str], *, sends: bool) -> float:
        """Return the seconds that the TensorCore works at an instruction."""
        found = _CYCLES.search(line.rest)
        if found and int(found[1]) < _UNKNOWN_CYCLES:
            return int(found[1]) / self.clock
        moved = nbytes(line.shape) / self.chip.memory_bandwidth
        if line.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in line.rest:
            inputs = [shapes[name] for name in operands(line) if name in shapes]
            if flops := kernel_flops(line, inputs):
                return flops / self.chip.flops
            self.assumed[f"kernel {_stem(line)} without an estimate, counted by its bytes"] += 1
            return moved + sum(map(nbytes, inputs)) / self.chip.memory_bandwidth
        if (
            sends
            or line.opcode in _FREE
            or nbytes(line.shape) <= _SMALL
            or any(word in line.rest for word in _FREE_CALLS)
        ):
            return 0.0
        self.assumed[f"{_stem(line)} without an estimate, counted by the bytes of its result"] += 1
        return 2 * moved


def kernel_flops(line: Instruction, inputs: list[str]) -> float:
    """Return the flops of a Pallas kernel: those that it states, or of splash attention `splash_flops`; else 0."""
    if stated := _STATED_FLOPS.search(line.rest):
        return float(stated[1])
    if "splash" not in line.name:
        return 0.0
    sizes = [dims for shape in inputs if len(dims := _dims(shape)) >= 3 and shape.startswith(("bf16", "f16", "f32"))]
    if not sizes:
        return 0.0
    *heads, length, width = max(sizes, key=math.prod)
    of_values = sizes[2][-1] if len(sizes) > 2 else width  # queries, keys and values come first
    products = next((count for word, count in KERNELS.items() if word in line.name), (2, 2))
    widths = {"keys": width, "values": min(of_values, width)}
    return splash_flops(*products, heads=math.prod(heads), length=length, **widths)


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**62
_STATED_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "recv", "send", "opt-barrier")
_FREE_CALLS = ('custom_call_target="AllocateBuffer"', 'custom_call_target="ConcatBitcast"')
_SMALL = 4096
"""Bytes of a register; scalars and the like have no estimate and take no time to speak of."""


def _told_axes(line: Instruction) -> int | None:
    """Return over how many axes of the torus the compiler says that a collective goes; None where it does not say."""
    if found := re.search(r'"emitter":"(\d)D', line.rest):
        return int(found[1])
    if found := re.search(r"cores:\{([\d ]+)\}", line.rest):
        return len(found[1].split())
    return 1 if "RingSumEmitter" in line.rest or "async_collective_fusion_config" in line.rest else None


def _rendezvous(line: Instruction) -> str | None:
    """Return the name under which a send to another slice and its recv find each other."""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', line.rest)
    return found[1] if found else None


def _stem(line: Instruction) -> str:
    return re.sub(r"[.\d]+$", "", line.name)


def _dims(shape: str) -> list[int]:
    return [int(dim) for dim in arrays(shape)[0].partition("[")[2].rstrip("]").split(",") if dim.isdigit()]
