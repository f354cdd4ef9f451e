"""A check of compiled programs, for the option `check` of a strategy: each program is proved."""

import warnings

from jax.stages import Compiled, Lowered

from shardopt.core import WrongProgramError, error_text
from shardopt.hlo.proof import prove


def check_proved(compiled: Compiled, lowered: Lowered) -> None:
    """Raise an error if a compiled program is wrong; warn if it is neither derived nor compared.

    Pass it to a strategy: `so.fsdp(tx, mesh, loss_fn, check=so.hlo.check_proved)`. Each program is
    then proved by `so.hlo.prove` when it is compiled, before it runs.

    Args:
      compiled: the program.
      lowered: the same program as it was given to XLA.

    Raises:
      WrongProgramError: if the program is wrong.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> def loss(w, batch):
      ...     return jnp.mean((batch * w) ** 2)
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(), loss, check=so.hlo.check_proved)
      >>> state, metrics = opt.step(opt.init(jnp.ones(())), jnp.ones(16))
      >>> float(metrics["loss"])
      1.0
    """
    proof = prove(compiled, lowered=lowered)
    if proof.verdict == "wrong":
        fix = (
            "report the instructions to XLA, and disable the pass that made them"
            " (compiler_options=); or leave out check."
        )
        first_line, *other_lines = str(proof.problem).splitlines()
        message = error_text("XLA compiled a wrong program.", [first_line], fix)
        raise WrongProgramError("\n".join([message, *other_lines]))
    if proof.verdict == "unknown":
        problem = (
            f"check_proved proves all but {len(proof.unknown)} of {proof.num_instructions:,}"
            " instructions of a program."
        )
        fix = "read what so.hlo.audit(opt.step, state, batch).prove() lists, or leave out check."
        warnings.warn(error_text(problem, [str(proof.unknown[0])], fix), stacklevel=2)
