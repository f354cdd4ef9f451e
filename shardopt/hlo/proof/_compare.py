"""A compiled program and the program that XLA was given, interpreted on the same arguments and
compared.

Both are computed in double precision without rounding in between. So they differ by 1e-14 if the
compiled program is right, also where its types are short, and by more than `TOLERANCE` if it is
not.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jax.sharding import Sharding
from jax.stages import Lowered

from shardopt.hlo._collective import Groups
from shardopt.hlo._hlo_text import Instruction, Module, arrays, parse
from shardopt.hlo._source_lines import op_name_of
from shardopt.hlo.proof._cublas import TARGETS
from shardopt.hlo.proof._folded import errors_of_folding
from shardopt.hlo.proof._interpret import CannotInterpretError, Interpreter
from shardopt.hlo.proof._interpret_shards import error_between, join
from shardopt.hlo.proof._lines import array_shape, read_shape
from shardopt.hlo.proof._locate import LocatedFault, Recorded, locate, recorded
from shardopt.hlo.proof._reference import ReferenceInterpreter
from shardopt.hlo.proof._shardings import sharding_text
from shardopt.hlo.proof._text import lowered_text

TOLERANCE = 1e-6
"""Results are equal up to so much of their largest number."""
SMALLEST = 1e-3
"""A result whose numbers are smaller than this may be zero up to rounding, and is compared with
this.
"""
MAX_NUMBERS = 1 << 28
"""A program is interpreted if it computes at most so many numbers, on all devices together and in
all turns of loops.
"""
DRAWS = (1.0, 0.05)
"""Arguments are drawn so often, each time with numbers of this size: clipping takes both of its
branches.
"""


class ResultDifference(NamedTuple):
    """A result that differs.

    Attributes:
      instruction: the first wrong instruction; None if it is not found.
      reason: the mistake, as a sentence.
      groups: the devices over which a sum is missing.
    """

    instruction: Instruction | None
    reason: str
    groups: Groups = ()


class Comparison(NamedTuple):
    """The outcome of a comparison on drawn arguments.

    Attributes:
      difference: a result that differs; None if none does.
      refusal: why nothing was compared, as a sentence; "" if all results were.
      assumption: what holds for the arguments that were compared; "" if they were any.
    """

    difference: ResultDifference | None
    refusal: str = ""
    assumption: str = ""


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
        return ReferenceInterpreter(parse(text), exact=True, limit=MAX_NUMBERS)

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
        for equal in [
            Equal(),
            *(Equal(chosen, params) for params in (False, True) for chosen in sets),
        ]:
            self.interpreter.uneven = False
            self._results[0] = self.interpreter.run(self._drawn(0, equal))
            if not self.interpreter.uneven:
                return equal
        return None

    def arguments(self, draw: int) -> list[np.ndarray]:
        """Return whole arguments: moments are positive, tokens small, keys any bits."""
        return self._drawn(draw, self.equal or Equal())

    def _drawn(self, draw: int, equal: Equal) -> list[np.ndarray]:
        source, values = np.random.default_rng(1 + draw), []
        for line in self.interpreter.parameters:
            shape, name = read_shape(line.shape), op_name_of(line)
            if shape.dtype == np.uint32:
                value = source.integers(0, 2**31, shape.dims)
            elif shape.dtype.kind in "iub":
                value = (
                    source.integers(0, 8, shape.dims)
                    if "batch" in name
                    else source.integers(1, 3, shape.dims)
                )
            elif "opt_state" in name or "weights" in name:
                value = source.uniform(0.1, 1, shape.dims)
            else:
                value = source.uniform(-1, 1, shape.dims) * DRAWS[draw]
            value = np.asarray(value).astype(shape.dtype)
            for axis in (
                equal.axes if "batch" not in name and (equal.params or "params" not in name) else ()
            ):
                value = self.interpreter.with_equal_pieces(value, line, axis)
            values.append(value)
        return values

    def results(self, draw: int) -> list[np.ndarray]:
        """Return the whole results."""
        if draw not in self._results:
            self._results[draw] = self.interpreter.run(self.arguments(draw))
        return self._results[draw]

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
    interpreter = Interpreter(module, exact=True, limit=MAX_NUMBERS)
    devices = interpreter.replicas * interpreter.partitions
    try:
        if refusal := _refusal(interpreter, reference):
            return Comparison(None, refusal)
        ranks = [len(array_shape(line.shape)) for line in interpreter.parameters]
        into = [
            sharding_text(sharding, rank, devices)
            for sharding, rank in zip(inputs, ranks, strict=True)
        ]
        for draw in range(len(DRAWS)):
            expected = reference.results(draw)
            if not all(map(_tells, expected)):
                return Comparison(None, "for drawn arguments, a result is not finite.")
            arguments = interpreter.shard(reference.arguments(draw), into)
            try:
                results = interpreter.run(arguments)
            except CannotInterpretError as error:
                if error.waits_forever:
                    return Comparison(ResultDifference(error.instruction, f"{error.reason}."))
                raise
            errors = [
                _error(shards, sharding_text(sharding, target.ndim, devices), target)
                for shards, sharding, target in zip(results, outputs, expected, strict=True)
            ]
            index = int(np.argmax(errors)) if errors else 0
            if errors and errors[index] > TOLERANCE:
                rounding = errors_of_folding(
                    module, reference.interpreter.module, arguments, results
                )
                if all(
                    error <= TOLERANCE + bound
                    for error, bound in zip(errors, rounding, strict=True)
                ):
                    continue
                site = locate(interpreter, arguments, reference.values(draw), index, sizes)
                return Comparison(_described(index, errors[index], site))
    except CannotInterpretError as error:
        return Comparison(None, str(error).removeprefix("interpret: "))
    axes = " x ".join(reference.equal.axes if reference.equal else ())
    return Comparison(None, assumption=f"pieces of the state are equal over {axes}" if axes else "")


def _described(result: int, error: float, site: LocatedFault | None) -> ResultDifference:
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
    if site.groups:
        step = (
            f"it reads {site.reads} as if it were whole, and the sum of {site.reads} over these"
            " devices is not taken"
        )
    else:
        step = "its operands are values of the program that XLA was given, and its result is none"
    return ResultDifference(site.instruction, f"{step}: {reason}.", site.groups)


def _refusal(interpreter: Interpreter, reference: Reference) -> str:
    lines = (
        line for computation in interpreter.module.computations.values() for line in computation
    )
    numbers = sum(math.prod(array_shape(array)) for line in lines for array in _computed(line))
    numbers *= interpreter.replicas * interpreter.partitions
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

    Those of cuBLAS after the first one are workspaces.
    """
    shapes = arrays(line.shape)
    return shapes[:1] if any(target in line.rest for target in TARGETS) else shapes


def _tells(result: np.ndarray) -> bool:
    """Return whether a result can be compared: its numbers are finite; a metric may be infinite."""
    return result.dtype.kind != "f" or bool(
        np.isfinite(result).all() or (result.ndim == 0 and np.isinf(result))
    )


def _error(shards: np.ndarray, sharding: str, expected: np.ndarray) -> float:
    """Return the error of a result; infinite if copies differ."""
    try:
        return error_between(join(shards, sharding), expected, smallest=SMALLEST)
    except ValueError:
        return np.inf
