"""Wrong versions of a compiled program, as text: a collective is cut, dropped, doubled, moved, or
reads the wrong device.

A mutant may still compute the same; `numpy` tells, by interpreting both.
"""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardopt.hlo._collective import read_groups
from shardopt.hlo._hlo_text import Instruction, Module, arrays, attributes, operands, parse
from shardopt.hlo.proof._interpret import CannotInterpretError, Interpreter
from shardopt.hlo.proof._interpret_shards import error_between, tile_of_device
from shardopt.hlo.proof._lines import read_shape
from shardopt.hlo.proof._opened import opened

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
CHANGED = 1e-4
"""A mutant counts if a result differs by more than this, relative to the largest number of the
result.
"""


class Mutant(NamedTuple):
    """A wrong program: the kind of mutation, the instruction and the text."""

    kind: str
    instruction: str
    text: str


@dataclass(frozen=True)
class Source:
    """A program as lines that are edited."""

    text: str

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text."""
        return self.text.splitlines()

    @cached_property
    def module(self) -> Module:
        """The parsed text."""
        return parse(self.text)

    @cached_property
    def devices(self) -> int:
        """The number of devices."""
        interpreter = Interpreter(self.module)
        return interpreter.replicas * interpreter.partitions

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Instruction to its line; names are unique in a module."""
        found = ((_NAME.match(line), row) for row, line in enumerate(self.lines))
        return {match[1]: row for match, row in found if match}

    @cached_property
    def computation_of(self) -> dict[str, str]:
        """Instruction to its computation."""
        return {
            line.name: name for name, lines in self.module.computations.items() for line in lines
        }

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Every instruction that the entry computation reaches, by name."""
        reached = set()
        waiting = [self.module.entry]
        while waiting:
            name = waiting.pop()
            if name not in reached and name in self.module.computations:
                reached.add(name)
                for line in self.module.computations[name]:
                    waiting += re.findall(
                        r"%([\w.\-]+)", line.arguments.partition(", metadata=")[0]
                    )
                    waiting += [
                        value.strip("%{} ")
                        for value in attributes(line).values()
                        if "(" not in value
                    ]
        return {line.name: line for name in reached for line in self.module.computations[name]}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instruction to the instructions that read it."""
        users: dict[str, list[Instruction]] = {}
        for line in self.instructions.values():
            if line.opcode not in ("constant", "parameter", "iota"):
                for name in dict.fromkeys(operands(line)):
                    users.setdefault(name, []).append(line)
        return users

    def edited(self, edits: dict[str, list[str]], extra: str = "") -> str:
        """Return the text in which lines of some instructions are replaced, and a computation is
        added.
        """
        rows = {self.row_of[name]: lines for name, lines in edits.items()}
        out = []
        for row, line in enumerate(self.lines):
            if extra and line.startswith("ENTRY"):
                out.append(extra)
            out += rows.get(row, [line])
        return "\n".join(out) + "\n"


_NAME = re.compile(r"^\s*(?:ROOT\s+)?%?([^\s=]+) = ")


def assign(name: str, shape: str, expression: str, *, root: bool = False) -> str:
    """Return a line of HLO."""
    return f"  {'ROOT ' if root else ''}%{name} = {shape} {expression}"


def call(line: Instruction, values: list[str] | None = None, **changes: str) -> str:
    """Return an instruction's expression, with other operands and some other attributes."""
    values = operands(line) if values is None else values
    words = attributes(line) | changes
    listed = "".join(f", {key}={value}" for key, value in words.items() if key != "backend_config")
    return f"{line.opcode}({', '.join('%' + value for value in values)}){listed}"


def resized(shape: str, dims: list[int]) -> str:
    """Return the shape with other dims and the plain layout."""
    return f"{shape.partition('[')[0]}[{','.join(map(str, dims))}]"


def groups_text(groups: list[list[int]]) -> str:
    """Return replica groups as text."""
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def group_lists(source: Source, line: Instruction) -> list[list[int]]:
    """Return the groups as they are written."""
    return [
        list(group)
        for group in read_groups(attributes(line).get("replica_groups", "{}"), source.devices)
    ]


Edit = tuple[dict[str, list[str]], str] | None
Kind = Callable[[Source, Instruction, random.Random], Edit]


def _is_single(line: Instruction) -> bool:
    return not line.shape.startswith("(") and len(operands(line)) == 1


def _plain(line: Instruction) -> bool:
    return line.opcode in COLLECTIVES


def cut_group(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Split each group in two."""
    groups = group_lists(source, line) if line.opcode != "collective-permute" else []
    size = len(groups[0]) if groups else 1
    if size < 2 or size % 2:
        return None
    halves = [half for group in groups for half in (group[: size // 2], group[size // 2 :])]
    return _with_smaller_groups(source, line, halves, 2)


def _with_smaller_groups(
    source: Source, line: Instruction, groups: list[list[int]], times: int
) -> Edit:
    changed = {"replica_groups": groups_text(groups)}
    if line.opcode == "all-reduce" or (line.opcode == "all-to-all" and _is_single(line)):
        return {
            line.name: [assign(line.name, line.shape, call(line, **changed), root=line.is_root)]
        }, ""
    if not _is_single(line) or line.opcode not in ("all-gather", "reduce-scatter"):
        return None
    dims = list(read_shape(line.shape).dims)
    dim = int(attributes(line)["dimensions"].strip("{}"))
    part = f"{line.name}.part"
    if line.opcode == "all-gather":
        dims[dim] //= times
        last = f"concatenate({', '.join(['%' + part] * times)}), dimensions={{{dim}}}"
    else:
        last = f"slice(%{part}), slice={{{', '.join(f'[0:{size}]' for size in dims)}}}"
        dims[dim] *= times
    first = assign(part, resized(line.shape, dims), call(line, **changed))
    return {line.name: [first, assign(line.name, line.shape, last, root=line.is_root)]}, ""


def other_axis(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Take groups of the same size along other devices."""
    if line.opcode == "collective-permute" or not _plain(line):
        return None
    groups = group_lists(source, line)
    size = len(groups[0])
    count = len(groups) * size
    if len(groups) == 1 or size == 1 or any(len(group) != size for group in groups):
        return None
    ids = np.arange(count)
    options = [ids.reshape(-1, size), ids.reshape(size, -1).T]
    own = sorted(sorted(group) for group in groups)
    options = [option.tolist() for option in options if sorted(option.tolist()) != own]
    changed = {"replica_groups": groups_text(draw.choice(options))} if options else {}
    return (
        ({line.name: [assign(line.name, line.shape, call(line, **changed), root=line.is_root)]}, "")
        if options
        else None
    )


def drop(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Replace a collective by its operands, repeated or cut to the size of the result."""
    if not _plain(line):
        return None
    values = operands(line)
    if line.opcode in ("all-reduce", "collective-permute") or (line.opcode == "all-to-all"):
        kind = "tuple" if line.shape.startswith("(") else "copy"
        last = f"{kind}({', '.join('%' + value for value in values)})"
    elif not _is_single(line):
        return None
    else:
        operand = read_shape(source.instructions[values[0]].shape)
        result = read_shape(line.shape)
        dim = int(attributes(line)["dimensions"].strip("{}"))
        if line.opcode == "all-gather":
            times = result.dims[dim] // operand.dims[dim]
            last = f"concatenate({', '.join(['%' + values[0]] * times)}), dimensions={{{dim}}}"
        else:
            last = (
                f"slice(%{values[0]}), slice={{{', '.join(f'[0:{size}]' for size in result.dims)}}}"
            )
    return {line.name: [assign(line.name, line.shape, last, root=line.is_root)]}, ""


def drop_one(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Drop one of the arrays that travel together."""
    if line.opcode != "all-reduce" or not line.shape.startswith("("):
        return None
    readers = [
        user for user in source.users.get(line.name, []) if user.opcode == "get-tuple-element"
    ]
    if not readers:
        return None
    reader = draw.choice(readers)
    operand = operands(line)[int(attributes(reader)["index"])]
    return {
        reader.name: [assign(reader.name, reader.shape, f"copy(%{operand})", root=reader.is_root)]
    }, ""


def double(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Reduce, exchange or send twice; what was gathered or scattered is summed."""
    if not _plain(line) or (line.opcode != "all-reduce" and not _is_single(line)):
        return None
    first = f"{line.name}.first"
    lines = [assign(first, line.shape, call(line))]
    if line.opcode in ("all-to-all", "collective-permute"):
        lines.append(assign(line.name, line.shape, call(line, [first]), root=line.is_root))
        return {line.name: lines}, ""
    parts = [first]
    extra = ""
    words = attributes(line)
    if line.shape.startswith("("):
        parts = [f"{first}.{place}" for place in range(len(operands(line)))]
        shapes = arrays(line.shape)
        lines += [
            assign(part, shape, f"get-tuple-element(%{first}), index={place}")
            for place, (part, shape) in enumerate(zip(parts, shapes, strict=True))
        ]
    region = words.get("to_apply", "")
    if not region:
        if "float" not in str(read_shape(line.shape).dtype):
            return None
        region, extra = _region("add", line.shape)
    keys = ("channel_id", "replica_groups", "use_global_device_ids")
    listed = "".join(f", {key}={words[key]}" for key in keys if key in words)
    lines.append(
        assign(
            line.name,
            line.shape,
            f"all-reduce({', '.join('%' + part for part in parts)}){listed}, to_apply={region}",
            root=line.is_root,
        )
    )
    return {line.name: lines}, extra


def _region(opcode: str, shape: str) -> tuple[str, str]:
    scalar = f"{arrays(shape)[0].partition('[')[0]}[]"
    name = f"mutant_{opcode}"
    lines = [
        f"  %{name}_{letter} = {scalar} parameter({place})" for place, letter in enumerate("ab")
    ]
    lines.append(f"  ROOT %{name}_c = {scalar} {opcode}(%{name}_a, %{name}_b)")
    return (
        f"%{name}",
        f"%{name} ({name}_a: {scalar}, {name}_b: {scalar}) -> {scalar} {{\n"
        + "\n".join(lines)
        + "\n}\n",
    )


def reduce_otherwise(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Take the maximum in place of the sum, or the sum in place of another reduction."""
    region = attributes(line).get("to_apply", "").strip("%")
    if (
        line.opcode not in ("all-reduce", "reduce-scatter")
        or region not in source.module.computations
    ):
        return None
    combiner = source.module.computations[region][-1].opcode
    scalar_types = {array.partition("[")[0] for array in arrays(line.shape)}
    if len(scalar_types) > 1 or scalar_types == {"pred"}:
        return None
    name, extra = _region("maximum" if combiner == "add" else "add", line.shape)
    return {
        line.name: [assign(line.name, line.shape, call(line, to_apply=name), root=line.is_root)]
    }, extra


def move_after(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Reduce the result of a reader in place of what it reads."""
    if line.opcode != "all-reduce" or line.shape.startswith("("):
        return None
    dtype = read_shape(line.shape).dtype
    readers = [
        user
        for user in source.users.get(line.name, [])
        if _is_array(user) and read_shape(user.shape).dtype == dtype
    ]
    readers = [
        user
        for user in readers
        if user.opcode not in (*COLLECTIVES, "get-tuple-element", "parameter", "while")
    ]
    if not readers:
        return None
    reader = draw.choice(readers)
    operand = operands(line)[0]
    values = [operand if value == line.name else value for value in operands(reader)]
    before = f"{reader.name}.before"
    lines = [
        assign(before, reader.shape, call(reader, values)),
        assign(reader.name, reader.shape, call(line, [before]), root=reader.is_root),
    ]
    return {reader.name: lines}, ""


def _is_array(line: Instruction) -> bool:
    try:
        read_shape(line.shape)
    except ValueError:
        return False
    return True


def move_before(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Reduce an operand of what makes the partial sum, in place of the sum."""
    if line.opcode != "all-reduce" or line.shape.startswith("("):
        return None
    producer = source.instructions.get(operands(line)[0])
    if producer is None or producer.opcode in (
        "parameter",
        "constant",
        "get-tuple-element",
        "while",
        *COLLECTIVES,
    ):
        return None
    dtype, makers = (
        read_shape(line.shape).dtype,
        (
            [source.instructions[name] for name in operands(producer)]
            if producer.opcode != "iota"
            else []
        ),
    )
    makers = [
        maker for maker in makers if _is_array(maker) and read_shape(maker.shape).dtype == dtype
    ]
    if not makers or not _is_array(producer):
        return None
    maker = draw.choice(makers)
    moved = f"{maker.name}.moved"
    values = [moved if value == maker.name else value for value in operands(producer)]
    return {
        producer.name: [
            assign(moved, maker.shape, call(line, [maker.name])),
            assign(producer.name, producer.shape, call(producer, values), root=producer.is_root),
        ],
        line.name: [assign(line.name, line.shape, f"copy(%{producer.name})", root=line.is_root)],
    }, ""


def change_dim(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Gather, scatter or exchange along another dim."""
    if line.opcode not in ("all-gather", "reduce-scatter", "all-to-all") or not _is_single(line):
        return None
    words = attributes(line)
    if "dimensions" not in words:
        return None
    dim = int(words["dimensions"].strip("{}"))
    size = len(group_lists(source, line)[0])
    operand = list(read_shape(source.instructions[operands(line)[0]].shape).dims)
    others = [
        d
        for d, length in enumerate(operand)
        if d != dim and (line.opcode == "all-gather" or length % size == 0)
    ]
    if not others or size == 1:
        return None
    other = draw.choice(others)
    if line.opcode == "all-gather":
        operand[other] *= size
    elif line.opcode == "reduce-scatter":
        operand[other] //= size
    part = f"{line.name}.part"
    changed = assign(part, resized(line.shape, operand), call(line, dimensions=f"{{{other}}}"))
    return {
        line.name: [changed, assign(line.name, line.shape, f"reshape(%{part})", root=line.is_root)]
    }, ""


def change_order(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Swap two members of each group."""
    if not _plain(line) or line.opcode == "collective-permute":
        return None
    groups = group_lists(source, line)
    size = len(groups[0])
    if size < 2:
        return None
    a, b = draw.sample(range(size), 2)
    for group in groups:
        group[a], group[b] = group[b], group[a]
    return {
        line.name: [
            assign(
                line.name,
                line.shape,
                call(line, replica_groups=groups_text(groups)),
                root=line.is_root,
            )
        ]
    }, ""


def change_pairs(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Send backwards, leave out a pair, or send each value to the next target."""
    if line.opcode != "collective-permute":
        return None
    pairs = [list(pair) for pair in read_groups(attributes(line)["source_target_pairs"], 0)]
    if not pairs or not pairs[0]:
        return None
    targets = [target for _, target in pairs]
    options = {
        "backwards": [[b, a] for a, b in pairs],
        "one less": [
            pair for place, pair in enumerate(pairs) if place != draw.randrange(len(pairs))
        ],
        "next target": [[a, b] for (a, _), b in zip(pairs, targets[1:] + targets[:1], strict=True)],
    }
    options = {name: option for name, option in options.items() if option and option != pairs}
    if not options:
        return None
    changed = options[draw.choice(sorted(options))]
    return {
        line.name: [
            assign(
                line.name,
                line.shape,
                call(line, source_target_pairs=groups_text(changed)),
                root=line.is_root,
            )
        ]
    }, ""


def other_device(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Let one reader of the partition's id see the id of the next device."""
    if line.opcode != "partition-id" or not source.users.get(line.name):
        return None
    reader = draw.choice(source.users[line.name])
    shifted = f"{line.name}.next"
    if reader.opcode in ("tuple", "while", "conditional"):
        return None
    values = [shifted if value == line.name else value for value in operands(reader)]
    lines = [
        assign(f"{shifted}.step", "u32[]", f"constant({draw.randrange(1, source.devices)})"),
        assign(f"{shifted}.count", "u32[]", f"constant({source.devices})"),
        assign(f"{shifted}.sum", "u32[]", f"add(%{line.name}, %{shifted}.step)"),
        assign(shifted, "u32[]", f"remainder(%{shifted}.sum, %{shifted}.count)"),
        assign(reader.name, reader.shape, call(reader, values), root=reader.is_root),
    ]
    return {reader.name: lines}, ""


def shift_table(source: Source, line: Instruction, draw: random.Random) -> Edit:
    """Give each device the entry of the next one in a table with an entry per device."""
    if line.opcode != "constant" or not _is_array(line):
        return None
    shape = read_shape(line.shape)
    if shape.dims != (source.devices,) or shape.dtype.kind not in "iu" or source.devices == 1:
        return None
    numbers = line.arguments.partition(")")[0].strip("{} ").split(",")
    numbers = numbers[1:] + numbers[:1]
    return {
        line.name: [
            assign(
                line.name,
                line.shape,
                f"constant({{{', '.join(word.strip() for word in numbers)}}})",
                root=line.is_root,
            )
        ]
    }, ""


KINDS: dict[str, Kind] = {
    "cut the group": cut_group,
    "groups of another axis": other_axis,
    "drop": drop,
    "drop one of several": drop_one,
    "double": double,
    "another reduction": reduce_otherwise,
    "move after a reader": move_after,
    "move before the producer": move_before,
    "another dim": change_dim,
    "another order": change_order,
    "other pairs": change_pairs,
    "the id of another device": other_device,
    "shift a table": shift_table,
}


def synchronous(text: str) -> str:
    """Return the program without asynchronous instructions, so that mutations of a collective are
    one edit.
    """
    module = parse(text)
    changed = opened(module)
    if changed == module:
        return text
    lines = [module.header]
    for name, instructions in changed.computations.items():
        lines += ["", f"{'ENTRY ' if name == module.entry else ''}%{name} {{"]
        lines += [
            assign(i.name, i.shape, f"{i.opcode}({i.arguments}", root=i.is_root)
            for i in instructions
        ]
        lines.append("}")
    return "\n".join(lines) + "\n"


def mutants(text: str, count: int, seed: int) -> Iterator[Mutant]:
    """Yield up to `count` different mutants: kinds in turn, instructions at random."""
    source = Source(text)
    draw = random.Random(seed)
    sites = [
        line
        for line in source.instructions.values()
        if line.opcode in (*COLLECTIVES, "partition-id", "constant")
    ]
    sites.sort(key=lambda line: source.row_of[line.name])
    waiting = {
        kind: draw.sample(sites, len(sites)) for kind in draw.sample(list(KINDS), len(KINDS))
    }
    seen: set[str] = set()
    while waiting and count > 0:
        for kind in list(waiting):
            while waiting[kind]:
                line = waiting[kind].pop()
                edit = KINDS[kind](source, line, draw)
                if edit is None:
                    continue
                mutated = source.edited(*edit)
                if mutated not in seen and mutated != text and count > 0:
                    seen.add(mutated)
                    count -= 1
                    yield Mutant(kind, line.name, mutated)
                break
            if not waiting[kind]:
                del waiting[kind]


def example_inputs(
    interpreter: Interpreter, shardings: Sequence[str], seed: int = 0
) -> list[np.ndarray]:
    """Return whole arguments: moments are positive, tokens small, keys any bits."""
    draw = np.random.default_rng(seed)
    inputs = []
    devices = interpreter.replicas * interpreter.partitions
    for line, sharding in zip(interpreter.parameters, shardings, strict=True):
        shape = read_shape(line.shape)
        name = attributes(line).get("metadata", "")
        tiles = tile_of_device(sharding, len(shape.dims), devices)[-1]
        dims = [size * count for size, count in zip(shape.dims, tiles, strict=True)]
        if shape.dtype == np.uint32:
            values = draw.integers(0, 2**31, dims)
        elif shape.dtype.kind in "iub":
            values = draw.integers(0, 8, dims) if "batch" in name else draw.integers(1, 3, dims)
        else:
            low = 0.1 if "opt_state" in name or "weights" in name else -1.0
            values = draw.uniform(low, 1, dims)
        inputs.append(np.asarray(values).astype(shape.dtype))
    return inputs


class Judge:
    """Whether a mutant computes something else than its program."""

    def __init__(self, text: str, shardings: Sequence[str], seed: int = 0) -> None:
        """Interpret the program; `shardings` are those of its parameters."""
        interpreter = Interpreter(parse(text))
        self.inputs = interpreter.shard(example_inputs(interpreter, shardings, seed), shardings)
        self.results = interpreter.run(self.inputs)

    def change(self, text: str) -> float:
        """Return the largest relative change of a result.

        Infinite if the devices wait for each other forever.
        """
        try:
            results = Interpreter(parse(text)).run(self.inputs)
        except CannotInterpretError as error:
            if error.waits_forever:
                return math.inf
            raise
        return max(error_between(a, b) for a, b in zip(results, self.results, strict=True))
