"""The result of a proof: a verdict, the first wrong instruction, and the instructions that no rule
covers.
"""

from typing import Literal, NamedTuple

Verdict = Literal["proved", "derived", "agrees", "unknown", "wrong"]


class WrongInstruction(NamedTuple):
    """The first instruction that is wrong.

    Attributes:
      instruction: name of the instruction.
      opcode: its opcode.
      source: file and line of the user's program, or the name that jax gave the operation; "" if
        the text has neither.
      axes: the mesh axes along which the value is wrong; None if the mesh is unknown or the devices
        are no whole axes.
      groups: the devices concerned: each group should hold one value, or add up to one.
      missing: the error, and the step that is missing, as a sentence.
      hlo: the instructions around it, under 60 lines.
    """

    instruction: str
    opcode: str
    source: str
    axes: tuple[str, ...] | None
    groups: tuple[tuple[int, ...], ...]
    missing: str
    hlo: str

    def __str__(self) -> str:
        """Return the instruction, its place, the groups and the missing step, then the instructions
        around it.
        """
        axes = "" if not self.axes else f" over {' x '.join(self.axes)}"
        shown = ", ".join(map(str, self.groups[:4])) + (", ..." if len(self.groups) > 4 else "")
        groups = f", devices {shown}" if self.groups else ""
        lines = [f"{self.instruction} ({self.opcode}){axes}{groups}: {self.missing}"]
        lines += [f"  from {self.source}"] if self.source else []
        return "\n".join([*lines, self.hlo])


class UncoveredInstruction(NamedTuple):
    """An instruction for which no rule holds.

    Attributes:
      instruction: name of the instruction.
      opcode: its opcode.
      reason: why no rule holds, as a sentence.
    """

    instruction: str
    opcode: str
    reason: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.instruction} ({self.opcode}): {self.reason}"


MAX_SHOWN = 8
"""So many unknown instructions are printed."""


class Proof(NamedTuple):
    """The verdict on a compiled program.

    Attributes:
      verdict: "proved", "derived", "agrees", "unknown" or "wrong". Rules cover all instructions of
        a program that is "proved" or "derived". The results of the program that XLA was given are
        equal if it is "proved" or "agrees", and are not compared if it is "derived" or "unknown".
      problem: the first wrong instruction, if the verdict is "wrong".
      unknown: the instructions that no rule covers, and on which a result depends.
      num_instructions: the number of instructions of the program, in all of its computations.
      not_compared: why the results were not compared with the program that XLA was given; "" if
        they were.
      assumption: what holds for the arguments that were compared; "" if they were any.
      sums_of_constants: the instructions that sum a number which is the same on all devices, such
        as a count of rows. No rule tells whether such a sum is meant, only the comparison does.
      one_sided: the predicates of the program that XLA was given that were always true, or always
        false, for the drawn arguments. With one, a program "agrees" at most.
    """

    verdict: Verdict
    problem: WrongInstruction | None
    unknown: tuple[UncoveredInstruction, ...]
    num_instructions: int
    not_compared: str = ""
    assumption: str = ""
    sums_of_constants: tuple[str, ...] = ()
    one_sided: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the verdict, its reasons, and the problem or the first unknown instructions."""
        if self.problem is not None:
            return f"wrong: {self.problem}"
        derived = (
            f"all results of {self.num_instructions:,} instructions have their declared shardings"
        )
        if self.unknown:
            derived = (
                f"no rule covers {len(self.unknown)} of {self.num_instructions:,} instructions"
            )
        compared = (
            "Results on drawn arguments are"
            f" equal{f' where {self.assumption}' if self.assumption else ''}."
        )
        compared = f"Not compared: {self.not_compared}" if self.not_compared else compared
        lines = [f"{self.verdict}: {derived}. {compared}"]
        if self.sums_of_constants:
            settled = "open" if self.not_compared else "settled by the comparison"
            lines.append(
                f"Whether sums of constants are meant is {settled}:"
                f" {_shown(self.sums_of_constants)}."
            )
        if self.one_sided:
            lines.append(f"Only one side was taken of: {_shown(self.one_sided)}.")
        lines += [f"  {unknown}" for unknown in self.unknown[:MAX_SHOWN]]
        hidden = len(self.unknown) - MAX_SHOWN
        return "\n".join([*lines, *([f"  and {hidden} more"] if hidden > 0 else [])])


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
