"""`prove`: the derivation for a whole program, from the shardings of its arguments to the shardings
of its results.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, Sharding
from jax.stages import Compiled, Lowered

from shardopt.core import calling, value_error
from shardopt.hlo._hlo_text import (
    Instruction,
    Module,
    array_shape,
    arrays,
    entry_parameters,
    parse,
    root_of,
    sizes_of_program,
)
from shardopt.hlo.proof._aliases import faults_of_aliases
from shardopt.hlo.proof._compare import Comparison, Reference, compare
from shardopt.hlo.proof._computations import Derivation, flat
from shardopt.hlo.proof._interpret_shards import written_shardings
from shardopt.hlo.proof._lines import read_lines
from shardopt.hlo.proof._locate import ResultDifference, is_collective
from shardopt.hlo.proof._opened import opened
from shardopt.hlo.proof._proof import Proof, UncoveredInstruction, Verdict
from shardopt.hlo.proof._report import describe
from shardopt.hlo.proof._shardings import known_mesh, mesh_sizes, sharded
from shardopt.hlo.proof._text import full_text, text_of
from shardopt.hlo.proof._value import (
    INPUT,
    DerivedValue,
    Fault,
    Hidden,
    RuleError,
    unify,
    without_known_devices,
)


@dataclass(frozen=True)
class Source:
    """A compiled program and the facts about it that a proof needs.

    Attributes:
      text: its text, with all constants.
      inputs: the shardings of its arguments; None if they are unknown.
      outputs: the shardings of its results; None if they are unknown.
      lowered: the program that XLA was given, or its HLO text; None if it is unknown.
    """

    text: str
    inputs: Sequence[Sharding | str] | None = None
    outputs: Sequence[Sharding | str] | None = None
    lowered: Lowered | Reference | str | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Return a short text: the text of a program is long."""
        return f"Source({len(self.text):,} characters)"


def source_of(
    compiled: Compiled, lowered: Lowered | str | None = None, text: str | None = None
) -> Source:
    """Return the source of a compiled program; `text` is its text, if it is read already."""
    inputs, outputs = (
        tuple(jax.tree.leaves(s)) for s in (compiled.input_shardings, compiled.output_shardings)
    )
    text = text or text_of(compiled, lowered if isinstance(lowered, Lowered) else None) or ""
    return Source(full_text(compiled, text), inputs, outputs, lowered)


@calling("prove")
def prove(
    program: Lowered | Compiled | Source | str,
    *,
    inputs: Sequence[Sharding | str] | None = None,
    outputs: Sequence[Sharding | str] | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    lowered: Lowered | Reference | str | None = None,
) -> Proof:
    """Prove that a partitioned program computes the program that XLA was given.

    The proof derives for every value which pieces, copies or terms of a sum the devices hold. And
    it interprets both programs on the same arguments.

    Args:
      program: a lowered program, which is compiled; a compiled program; or the text of an
        optimised, partitioned HLO module.
      inputs: one sharding per parameter of the entry computation, flat: a jax sharding, or the text
        of an HLO sharding such as `{devices=[8,1]<=[8]}` or `{replicated}`. By default the
        `Compiled` or the text states them.
      outputs: one sharding per array of the result, flat. By default the `Compiled` states them.
      mesh: names and sizes of the axes, for the report. By default the mesh of the first
        `NamedSharding`.
      lowered: the program that XLA was given, if `program` is compiled already: a `Lowered`, or its
        HLO text.

    Returns:
      A `Proof`: `.verdict`, `.problem`, `.unknown`; `print` shows it.

    Raises:
      ValueError: if a text comes without the shardings of its parameters or results, or with
        another number of them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> import shardopt as so
      >>> mesh = so.make_mesh(data=8)
      >>> total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
      >>> rows = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
      >>> prove(total.lower(rows)).verdict
      'proved'
      >>> prove(total.lower(rows).compile()).verdict  # without the program that XLA was given
      'derived'

    Note:
      A "proved" program is derived, and its results are equal. A "derived" program was not
      compared. That is less: a sum of constants that was dropped leaves no trace in a compiled
      program. A program that "agrees" has equal results, and instructions that no rule covers, or
      a choice of which no draw took both sides. If a rule objects and the results are equal, it is
      "unknown", and so is a program that is neither derived nor compared. `docs/compiled_proof.md` says more.
    """
    source = _whole_source(program, inputs, outputs, lowered)
    text = source.text
    inputs = source.inputs
    outputs = source.outputs
    sizes = mesh_sizes(known_mesh(mesh, (*(inputs or ()), *(outputs or ()))))
    # Two witnesses: `_derive` follows shardings by rules, `compare` interprets numbers. Neither
    # uses the other; see docs/notes/compiled_proof.md.
    written = parse(text)
    module = opened(written)
    parameters = entry_parameters(module)
    if inputs is None or (len(inputs) != len(parameters) and not isinstance(program, str)):
        inputs = written_shardings(parameters, math.prod(sizes_of_program(module)))
    derived_faults, sums_of_constants = _derive(module, inputs, outputs)
    # These lines are of the module as XLA wrote it: a report names no line of an opened fusion.
    instructions = written.instructions
    # where a donated argument is overwritten before it is read
    faults = {*derived_faults, *_faults_of_memory(written, instructions)}
    comparison = Comparison(None, "the program that XLA was given is unknown.")
    is_settled = False
    if source.lowered is not None:
        assert outputs is not None
        reference = source.lowered
        if not isinstance(reference, Reference):
            reference = Reference(reference)
        comparison = compare(module, reference, inputs, outputs, sizes)
        is_settled = not comparison.refusal
        if is_settled and comparison.difference is None:
            # A rule that objects says more than results that agree: the drawn arguments may not
            # reach what differs.
            is_settled = not any(fault.wrong for fault in faults)
            faults = {fault._replace(wrong=False) for fault in faults}
            faults |= _faults_of_range(reference, instructions)
    wrong = _first_wrong(faults, comparison.difference, instructions, root_of(written))
    problem = None if wrong is None else describe(wrong, written, instructions, text, sizes)
    unknown = _uncovered(faults, instructions)
    is_open = bool(unknown or comparison.one_sided)
    return Proof(
        "wrong" if problem else _VERDICTS[is_open, is_settled],
        problem,
        unknown,
        len(instructions),
        comparison.refusal,
        comparison.assumption,
        sums_of_constants,
        comparison.one_sided,
    )


_VERDICTS: dict[tuple[bool, bool], Verdict] = {
    (False, True): "proved",
    (False, False): "derived",
    (True, True): "agrees",
    (True, False): "unknown",
}
"""(whether an instruction is not covered or a branch not taken, whether results were compared and
no rule objects) -> the verdict."""


def _uncovered(
    faults: Set[Fault], instructions: Sequence[Instruction]
) -> tuple[UncoveredInstruction, ...]:
    """Return the instructions that no rule covers, each with one reason."""
    reasons = {fault.order: fault.reason for fault in sorted(faults) if not fault.wrong}
    return tuple(
        UncoveredInstruction(instructions[place].name, instructions[place].opcode, reason)
        for place, reason in reasons.items()
    )


def _faults_of_memory(module: Module, instructions: Sequence[Instruction]) -> set[Fault]:
    """Return where a donated argument is overwritten before it is read."""
    faults = faults_of_aliases(module)
    return {Fault(True, _place(line, instructions), reason) for line, reason in faults}


def _place(instruction: Instruction, instructions: Sequence[Instruction]) -> int:
    return [line.name for line in instructions].index(instruction.name)


def _faults_of_range(reference: Reference, instructions: Sequence[Instruction]) -> Set[Fault]:
    """Return the casts to float16 in a program that was given without that type: they overflow."""
    given = reference.interpreter.module.instructions
    if any(line.shape.startswith("f16[") for line in given):
        return set()
    reason = (
        "it rounds to float16, whose largest number is 65504, where the given program does not."
    )
    return {
        Fault(False, place, reason)
        for place, line in enumerate(instructions)
        if line.opcode in ("convert", "reduce-precision") and line.shape.startswith("f16[")
    }


def _whole_source(
    program: Lowered | Compiled | Source | str,
    inputs: Sequence[Sharding | str] | None,
    outputs: Sequence[Sharding | str] | None,
    lowered: Lowered | Reference | str | None,
) -> Source:
    """Return the arguments of `prove`; statements of the program replace None."""
    if isinstance(program, Lowered):
        program, lowered = program.compile(), program
    if isinstance(program, Compiled):
        program = source_of(program, None if isinstance(lowered, Reference) else lowered)
    if isinstance(program, str):
        return Source(program, inputs, outputs, lowered)
    return Source(
        program.text,
        inputs or program.inputs,
        outputs or program.outputs,
        lowered or program.lowered,
    )


def _derive(
    module: Module, inputs: Sequence[Sharding | str], outputs: Sequence[Sharding | str] | None
) -> tuple[Set[Fault], tuple[str, ...]]:
    """Derive the results from the arguments; return where no rule holds or a value is wrong, and
    the names of sums of constants, as in `Proof`.

    Raises:
      ValueError: if there is another number of shardings than of parameters or of results.
    """
    parameters = entry_parameters(module)
    devices = math.prod(sizes_of_program(module))
    if len(inputs) != len(parameters):
        problem = (
            f"the program has {len(parameters)} parameters, and {len(inputs)} shardings were"
            " passed."
        )
        raise value_error(problem, fix="pass one sharding per parameter of the entry computation.")
    arguments = tuple(
        sharded(sharding, array_shape(line.shape), devices)
        for line, sharding in zip(parameters, inputs, strict=True)
    )
    computations = read_lines(module)
    walk = Derivation(computations, *sizes_of_program(module))
    result = walk.run(module.entry, arguments)
    root = next(line for line in computations[module.entry] if line.is_root)
    results = list(zip(flat(result), arrays(root.shape), strict=True))
    if outputs is None or len(outputs) != len(results):
        count = "none" if outputs is None else str(len(outputs))
        problem = f"the program has {len(results)} results, and {count} shardings were passed."
        raise value_error(problem, fix="pass outputs=, one sharding per array of the result.")
    faults: set[Fault] = set()
    for index, ((value, shape), sharding) in enumerate(zip(results, outputs, strict=True)):
        faults |= _faults_of_result(
            value, sharded(sharding, array_shape(shape), devices), index, root.order
        )
    return faults, tuple(walk.sums_of_constants)


def _first_wrong(
    faults: Set[Fault],
    difference: ResultDifference | None,
    instructions: Sequence[Instruction],
    root: Instruction,
) -> Fault | None:
    """Return the fault to report: the first one that a rule finds, or the one that the comparison
    finds.
    """
    by_rule = min((fault for fault in faults if fault.wrong), default=None)
    if difference is None:
        return by_rule
    # a rule knows which collective is wrong; else it names a later reader, and the comparison the
    # first one
    is_named = by_rule is not None and is_collective(instructions[by_rule.order])
    if by_rule is not None and (is_named or difference.instruction is None):
        return by_rule
    place = _place(difference.instruction or root, instructions)
    return Fault(True, place, difference.reason, difference.groups)


def _faults_of_result(
    value: DerivedValue, declared: DerivedValue, index: int, root: int
) -> frozenset[Fault]:
    """Return why a result does not have its declared sharding."""
    if value.faults:
        return value.faults
    if value.parts:
        return frozenset(
            [Fault(False, root, f"result {index} is a bucket of pieces with different layouts.")]
        )
    # Zero is a shard, a copy and a term of every sum, so it has any sharding.
    if value.zero:
        return frozenset()
    value = without_known_devices(value)
    try:
        value, unified = unify(value, declared)
    except RuleError as problem:
        reason = problem.reason.replace(
            "its operands hold", "what is derived and what is declared are"
        )
        fault = Fault(problem.is_wrong, root, f"result {index}: {reason}", problem.groups)
        return frozenset([fault])
    expected = {(h.at, h.count) for h in unified.hidden}
    # Left over are terms of sums, choices by device, and elements of dims that are not declared.
    extra = [h for h in value.hidden if (h.at, h.count) not in expected or h.kind != "dim"]
    return frozenset(
        _left_over(h, index, root, declared=(h.at, h.count) in expected) for h in extra
    )


def _left_over(hidden: Hidden, index: int, root: int, *, declared: bool) -> Fault:
    origin = root if hidden.origin < 0 else hidden.origin
    if declared and hidden.kind != "device":
        reason = (
            f"result {index} has one element of a dim on each of these devices, which use terms of"
            " a sum over them: either they train apart, or a reduction is missing. The program"
            " alone does not tell."
        )
        return Fault(False, origin, reason)
    if hidden.kind == "dim" and hidden.origin == INPUT:
        reason = (
            f"result {index} is declared to be the same on devices that hold different elements of"
            " an argument: right only if these elements are equal."
        )
        return Fault(False, root, reason)
    reasons = {
        "own": "it uses the term of each device as if it were the whole sum, which is never taken.",
        "dim": (
            f"result {index} is declared to be the same on devices that hold different elements."
        ),
        "device": f"result {index} depends on the number of the device.",
    }
    partial = (
        f"result {index} is a partial {hidden.kind}: the reduction over these devices is missing."
    )
    return Fault(True, origin, reasons.get(hidden.kind, partial), _groups_of(hidden))


def _groups_of(hidden: Hidden) -> tuple[tuple[int, ...], ...]:
    members: dict[int, list[int]] = {}
    for device, coordinate in enumerate(hidden.at.array.tolist()):
        members.setdefault(coordinate, []).append(device)
    # one device of each coordinate makes a group
    columns = zip(*members.values(), strict=False)
    return tuple(map(tuple, columns))
