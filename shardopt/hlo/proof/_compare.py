"""A compiled program and the program that XLA was given, interpreted on the same arguments and
compared.

Both are computed in double precision without rounding in between. So they differ by 1e-14 if the
compiled program is right, also where its types are short, and by more than `TOLERANCE` if it is
not.
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.stages import Lowered

from shardopt.hlo._hlo_text import Instruction, Module, array_shape, arrays, parse
from shardopt.hlo._source_lines import op_name_of
from shardopt.hlo.proof._cublas import TARGETS
from shardopt.hlo.proof._draws import STEERED, Arguments, Sides
from shardopt.hlo.proof._interpret import CannotInterpretError, Interpreter
from shardopt.hlo.proof._interpret_shards import error_between, join
from shardopt.hlo.proof._lines import read_shape
from shardopt.hlo.proof._locate import Recorded, ResultDifference, locate, recorded
from shardopt.hlo.proof._reference import ReferenceInterpreter
from shardopt.hlo.proof._shardings import sharding_text
from shardopt.hlo.proof._text import lowered_text

TOLERANCE = 1e-6
"""Results are equal up to so much of their largest number."""
SMALLEST = 1e-3
"""A result whose numbers are smaller than this may be zero up to rounding, and is compared with
this.
"""
MAX_NUMBERS = 1 << 29
"""A program is interpreted if it computes at most so many numbers, on all devices together and in
all turns of loops.
"""
MOST_CHANGED = 16
"""So many choices of a draw are made otherwise, to see whether they matter."""
NOT_ROUNDED = 1e-6
"""An update is compared relative to itself, if it is more than this part of its largest number."""


class Comparison(NamedTuple):
    """The outcome of a comparison on drawn arguments.

    Attributes:
      difference: a result that differs; None if none does.
      refusal: why nothing was compared, as a sentence; "" if all results were.
      assumption: what holds for the arguments that were compared; "" if they were any.
      one_sided: the predicates of the program that XLA was given that had one value in all runs.
    """

    difference: ResultDifference | None
    refusal: str = ""
    assumption: str = ""
    one_sided: tuple[str, ...] = ()


class Equal(NamedTuple):
    """Mesh axes over which the pieces of some arguments hold equal numbers, as the state of a run
    does.

    Attributes:
      axes: the mesh axes; empty if all numbers are drawn.
      params: whether the parameters are such arguments too.
    """

    axes: tuple[str, ...] = ()
    params: bool = False


@dataclass(frozen=True)
class Reference:
    """The program that XLA was given, with its results for drawn arguments.

    Attributes:
      program: the program, or its HLO text.
    """

    program: Lowered | str
    _results: dict[int, list[np.ndarray]] = field(default_factory=dict)
    _values: dict[int, Recorded] = field(default_factory=dict)

    @functools.cached_property
    def interpreter(self) -> ReferenceInterpreter:
        """The interpreter of the program."""
        text = self.program if isinstance(self.program, str) else lowered_text(self.program)
        return ReferenceInterpreter(parse(text), limit=MAX_NUMBERS)

    @functools.cached_property
    def equal(self) -> Equal | None:
        """The pieces that have to be equal, so that devices that should hold copies do.

        None if none helps.
        """
        axes = [
            axis
            for sizes in self.interpreter.meshes.values()
            for axis, size in sizes.items()
            if size > 1
        ]
        sets = [
            chosen
            for count in range(1, len(axes) + 1)
            for chosen in itertools.combinations(axes, count)
        ]
        # The weakest assumption first: nothing equal, then few axes, then the parameters too.
        for equal in [
            Equal(),
            *(Equal(chosen, params) for params in (False, True) for chosen in sets),
        ]:
            self.interpreter.uneven = False
            self.interpreter.run(self._drawn(0, equal))
            if not self.interpreter.uneven:
                return equal
        return None

    @functools.cached_property
    def drawn(self) -> Arguments:
        """Return the source of the drawn arguments."""
        return Arguments(self.interpreter.module, self.interpreter.parameters)

    def arguments(self, draw: int) -> list[np.ndarray]:
        """Return whole arguments."""
        return self._drawn(draw, self.equal or Equal())

    def _drawn(self, draw: int, equal: Equal) -> list[np.ndarray]:
        values = []
        for line, drawn in zip(self.interpreter.parameters, self.drawn.draw(draw), strict=True):
            value = drawn
            name = op_name_of(line)
            has_copies = "batch" not in name and (equal.params or "params" not in name)
            for axis in equal.axes if has_copies else ():
                value = self.interpreter.with_equal_pieces(value, line, axis)
            values.append(value)
        return values

    def results(self, draw: int) -> list[np.ndarray]:
        """Return the whole results."""
        if draw not in self._results:
            arguments = self.arguments(draw)
            self.interpreter.watch = self.sides.watch
            self._results[draw] = self.interpreter.run(arguments)
            self.interpreter.watch = None
        return self._results[draw]

    @functools.cached_property
    def sides(self) -> Sides:
        """The sides of its choices that the draws took."""
        return Sides(self.interpreter.module)

    @functools.cached_property
    def draws(self) -> tuple[int, ...]:
        """The draws that are compared: all results are finite.

        Further ones are added while a choice of the program is always made in the same way.
        """
        count = self.drawn.num_draws
        draws: list[int] = []
        taken = self.sides.taken
        for draw in range(count + len(STEERED)):
            # Each further draw must take a side of some choice that no draw before it took.
            if draw >= count and not (draws and self.sides.one_sided):
                break
            before = {choice: set(sides) for choice, sides in taken.items()}
            results = self.results(draw)
            reached = [choice for choice in taken if taken[choice] != before[choice]]
            is_finite = all(map(_tells, results))
            if not is_finite:
                # Only some results are compared, so a side counts if one of these depends on it.
                reached = self._that_matter(reached, draw) if draw >= count else []
                taken |= {choice: before[choice] for choice in taken if choice not in reached}
            if reached or (is_finite and draw < count):
                draws.append(draw)
        return tuple(draws)

    def _that_matter(self, choices: Sequence[tuple[str, str]], draw: int) -> list[tuple[str, str]]:
        """Return the first choices, as many as are tried, that decide a finite result of a draw."""
        return [choice for choice in choices[:MOST_CHANGED] if self._matters(choice, draw)]

    def _matters(self, choice: tuple[str, str], draw: int) -> bool:
        """Return whether a finite result of a draw is another one if a choice is made otherwise."""
        self.interpreter.changed = choice
        changed_results = self.interpreter.run(self.arguments(draw))
        self.interpreter.changed = None
        return any(
            _tells(result) and not np.array_equal(result, changed)
            for result, changed in zip(self.results(draw), changed_results, strict=True)
        )

    def values(self, draw: int) -> Recorded:
        """Return the value of each instruction."""
        if draw not in self._values:
            self._values[draw] = recorded(self.interpreter, self.arguments(draw))
        return self._values[draw]


def compare(
    module: Module,
    reference: Reference,
    inputs: Sequence[Sharding | str],
    outputs: Sequence[Sharding | str],
    sizes: Mapping[str, int],
) -> Comparison:
    """Return the comparison of a compiled program with the program that XLA was given.

    Args:
      module: the compiled program.
      reference: the program that XLA was given.
      inputs: the sharding of each argument of the compiled program.
      outputs: the sharding of each of its results.
      sizes: mesh axis to size, to name the devices over which a sum is missing.
    """
    interpreter = Interpreter(module, limit=MAX_NUMBERS)
    try:
        refusal = _refusal(interpreter, reference)
        if refusal:
            return Comparison(None, refusal)
        into = [
            sharding_text(sharding, len(array_shape(line.shape)), interpreter.num_devices)
            for line, sharding in zip(interpreter.parameters, inputs, strict=True)
        ]
        if not reference.draws:
            return Comparison(None, "for drawn arguments, a result is not finite.")
        for draw in reference.draws:
            difference = _difference(interpreter, reference, draw, into, outputs, sizes)
            if difference is not None:
                return Comparison(difference)
    except CannotInterpretError as error:
        return Comparison(None, str(error).removeprefix("interpret: "))
    axes = " x ".join(reference.equal.axes if reference.equal else ())
    assumption = f"pieces of the state are equal over {axes}" if axes else ""
    return Comparison(None, "", assumption, reference.sides.one_sided)


def _difference(
    interpreter: Interpreter,
    reference: Reference,
    draw: int,
    inputs: Sequence[str],
    outputs: Sequence[Sharding | str],
    sizes: Mapping[str, int],
) -> ResultDifference | None:
    """Return the result that differs most for drawn arguments; None if all are equal."""
    expected = reference.results(draw)
    global_arguments = reference.arguments(draw)
    scales = [_scale(target, global_arguments) for target in expected]
    arguments = interpreter.shard(global_arguments, inputs)
    try:
        results = interpreter.run(arguments)
    except CannotInterpretError as error:
        if not error.waits_forever:
            raise
        return ResultDifference(error.instruction, f"{error.reason}.")
    errors = [
        _error(shards, sharding_text(sharding, target.ndim, interpreter.num_devices), target, scale)
        if _tells(target)
        else 0.0
        for shards, sharding, target, scale in zip(results, outputs, expected, scales, strict=True)
    ]
    if all(error <= TOLERANCE for error in errors):
        return None
    reference_module = reference.interpreter.module
    # Only now, because it interprets the program once more for each folded constant.
    rounding = errors_of_folding(interpreter.module, reference_module, arguments, results, scales)
    if all(error <= TOLERANCE + bound for error, bound in zip(errors, rounding, strict=True)):
        return None
    index = int(np.argmax(errors))
    site = locate(interpreter, arguments, reference.values(draw), index, sizes)
    return _described(index, errors[index], site)


def _described(result: int, error: float, site: ResultDifference | None) -> ResultDifference:
    reason = (
        f"result {result} differs from that of the program that XLA was given by {error:.1e} of its"
        " largest number"
    )
    if math.isinf(error):
        reason = (
            f"devices that should hold copies of result {result} hold different numbers, or numbers"
            " that are not finite"
        )
    if site is None:
        return ResultDifference(None, f"{reason}.")
    return site._replace(reason=f"{site.reason}: {reason}.")


def _refusal(interpreter: Interpreter, reference: Reference) -> str:
    lines = interpreter.module.instructions
    numbers = sum(math.prod(array_shape(array)) for line in lines for array in _computed(line))
    numbers *= interpreter.num_devices
    if numbers > MAX_NUMBERS:
        return f"its instructions compute {numbers:,} numbers, too many to interpret."
    counts = len(reference.interpreter.parameters), len(interpreter.parameters)
    if counts[0] != counts[1]:
        return (
            f"the program that XLA was given has {counts[0]} arguments, and the compiled program"
            f" has {counts[1]}."
        )
    if reference.equal is None:
        return "for drawn arguments, devices that should hold copies hold different numbers."
    return ""


def _computed(line: Instruction) -> list[str]:
    """Return the arrays that an instruction computes.

    The arrays of cuBLAS after the first one are workspaces.
    """
    shapes = arrays(line.shape)
    return shapes[:1] if any(target in line.arguments for target in TARGETS) else shapes


def _tells(result: np.ndarray) -> bool:
    """Return whether a result can be compared: its numbers are finite; a metric may be infinite."""
    return result.dtype.kind != "f" or bool(
        np.isfinite(result).all() or (result.ndim == 0 and np.isinf(result))
    )


def _error(shards: np.ndarray, sharding: str, expected: np.ndarray, scale: float) -> float:
    """Return the error of a result; infinite if copies differ."""
    try:
        return error_between(join(shards, sharding), expected, scale)
    except ValueError:
        return np.inf


def _scale(expected: np.ndarray, arguments: Sequence[np.ndarray]) -> float:
    """Return the number that errors of a result are divided by. If the result updates an argument
    of its shape, this is its largest change, else its largest number.
    """
    if expected.dtype.kind != "f" or not expected.size:
        return SMALLEST
    size = np.abs(expected, where=np.isfinite(expected), out=np.zeros(expected.shape)).max()
    size = max(float(size), SMALLEST)
    changes = [
        float(np.abs(expected - argument).max())
        for argument in arguments
        if argument.shape == expected.shape and argument.dtype.kind in "fV"
    ]
    # A wrong gradient may change a parameter by 1e-3 of its size. Relative to the change it is
    # large.
    return max(min([size, *changes]), NOT_ROUNDED * size)


SHORT = {jnp.dtype("bfloat16"): 2.0**-8, np.dtype(np.float16): 2.0**-11}
"""The spacing of short floats, relative to a number."""
_FLOAT = re.compile(r"(bf16|f16|f32)\[\]")


def folded_constants(module: Module, written: Module) -> dict[float, float]:
    """Return the short constants of a compiled program that are not written in its source, with
    their spacing.

    XLA replaces the product of two constants in bf16 by the rounded product. Whole numbers are
    exact.
    """
    types, numbers = _constants(written)
    if not types & {"bf16", "f16"}:
        return {}
    new = {number for number in _constants(module)[1] - numbers if not number.is_integer()}
    spacings = {
        number: [s for dtype, s in SHORT.items() if float(dtype.type(number)) == number]
        for number in new
    }
    return {number: max(spacing) for number, spacing in spacings.items() if spacing}


def _constants(module: Module) -> tuple[set[str], set[float]]:
    types = set()
    numbers = set()
    for line in module.instructions:
        types.add(line.shape.partition("[")[0])
        if line.opcode == "constant" and _FLOAT.match(line.shape):
            number = float(line.arguments.partition(")")[0])
            numbers.add(float(read_shape(line.shape).dtype.type(number)))
    return types, numbers


def errors_of_folding(
    module: Module,
    written: Module,
    arguments: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    scales: Sequence[float],
) -> list[float]:
    """Return how far each result moves if each folded constant moves by its spacing."""
    errors = [0.0] * len(results)
    for number, spacing in folded_constants(module, written).items():
        moved = Interpreter(module, moved={number: number * (1 + spacing)}).run(arguments)
        errors = [
            error + error_between(a, b, scale)
            for error, a, b, scale in zip(errors, moved, results, scales, strict=True)
        ]
    return errors
