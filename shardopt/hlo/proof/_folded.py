"""Constants that XLA computed in bf16 or fp16: they are known up to a rounding, and so are the
results that they are in.
"""

import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from shardopt.hlo._hlo_text import Module
from shardopt.hlo.proof._interpret import Interpreter
from shardopt.hlo.proof._interpret_shards import error_between
from shardopt.hlo.proof._lines import read_shape

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
    types, numbers = set(), set()
    for line in (line for lines in module.computations.values() for line in lines):
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
