"""The fifth slot of a step: conditions that a compiled program must satisfy."""

from typing import Protocol

from jax.stages import Compiled, Lowered


class ProgramCheck(Protocol):
    """A function that refuses a compiled program, such as `so.hlo.check_proved`.

    A strategy calls it once for each program, before the program runs for the first time.
    """

    def __call__(self, compiled: Compiled, lowered: Lowered) -> None:
        """Return nothing, or raise an error.

        Args:
          compiled: the program.
          lowered: the same program as it was given to XLA.
        """
        ...
