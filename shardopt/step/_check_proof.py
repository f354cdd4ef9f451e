"""The option `verify`: a compiled program is proved before it runs."""

import warnings

from jax.stages import Compiled, Lowered

from shardopt.config._config import StrategyConfig
from shardopt.core._errors import format_error
from shardopt.hlo.proof import prove


class WrongProgramError(RuntimeError):
    """A compiled program is proved to be wrong."""


def check_proof(config: StrategyConfig, compiled: Compiled, lowered: Lowered) -> None:
    """Raise an error if a compiled program is wrong; warn if it is neither derived nor compared.

    Raises:
      WrongProgramError: if the program is wrong.
    """
    proof = prove(compiled, mesh=config.mesh, lowered=lowered)
    if proof.verdict == "wrong":
        fix = (
            "report the instructions to XLA, and disable the pass that made them"
            " (compiler_options=); or leave out verify."
        )
        lines = str(proof.problem).splitlines()
        raise WrongProgramError(
            f"{format_error(config.strategy, 'XLA compiled a wrong program.', lines[:1], fix)}\n"
            + "\n".join(lines[1:])
        )
    if proof.verdict == "unknown":
        problem = (
            f"verify proves all but {len(proof.unknown)} of {proof.num_instructions:,} instructions"
            " of a program."
        )
        fix = "read what so.audit(opt.step, state, batch).prove() lists, or leave out verify."
        warnings.warn(
            format_error(config.strategy, problem, [str(proof.unknown[0])], fix), stacklevel=2
        )
