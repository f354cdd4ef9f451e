"""Compiled programs, interpreted in numpy and compared with whole results."""

from collections.abc import Sequence

import numpy as np

from shardopt.hlo._hlo_text import Module, parse
from shardopt.hlo.proof._interpret import Interpreter
from shardopt.hlo.proof._interpret_shards import error_between, join


def interpret(program: str | Module, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a compiled program on all its devices in numpy.

    Args:
      program: the text of a partitioned HLO module, or the parsed module.
      inputs: for each parameter an array `[devices, ...local shape]`.

    Returns:
      For each result an array `[devices, ...local shape]`.

    Raises:
      CannotInterpretError: if it cannot interpret an instruction, with the instruction and the
        reason.
    """
    return Interpreter(parse(program) if isinstance(program, str) else program).run(inputs)


def compare(
    program: str | Module,
    inputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    outputs: Sequence[str],
    *,
    input_shardings: Sequence[str] | None = None,
) -> list[float]:
    """Return the largest error of each result of a partitioned program, relative to one device's
    largest number.

    Args:
      program: the text of a partitioned HLO module, or the parsed module.
      inputs: the whole arguments.
      expected: the whole results on one device.
      outputs: the sharding of each result, as HLO text, such as `{devices=[8,1]<=[8]}`.
      input_shardings: the sharding of each argument; by default those in the text, which XLA:TPU
        leaves out.

    Raises:
      CannotInterpretError: if it cannot interpret an instruction.
      ValueError: if copies of a shard differ between devices.
    """
    interpreter = Interpreter(parse(program) if isinstance(program, str) else program)
    results = interpreter.run(interpreter.shard(inputs, input_shardings))
    return [
        error_between(join(shards, sharding), np.asarray(whole_result))
        for shards, sharding, whole_result in zip(results, outputs, expected, strict=True)
    ]
