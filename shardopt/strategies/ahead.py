"""Compiling before the first call, so that what the compiler took is given back before the program needs its own."""

from typing import Any

import jax
from jax.core import Tracer

from shardopt.core.host_memory import give_back


class Ahead:
    """A jitted function, the same in all but one thing: its first call compiles, gives host memory back, then runs.

    Called as it is, jax would compile and run in one go: what compiling took and what the step takes, one on top of
    the other, would be the most that the process ever holds. jax keeps what was compiled ahead, and runs just that.
    """

    def __init__(self, jitted: Any):
        self.jitted, self.lower = jitted, jitted.lower
        self._compiled = False

    def __call__(self, *args: Any) -> Any:
        """Return what the jitted function returns."""
        if not self._compiled and not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            compile_ahead(self.jitted, *args)
            self._compiled = True
        return self.jitted(*args)


def compile_ahead(jitted: Any, *args: Any) -> Any:
    """Return a jitted function compiled for arguments, host memory given back."""
    lowered = jitted.lower(*args)
    give_back()  # what initialisation took, and smaller programs
    compiled = lowered.compile()
    give_back()
    return compiled
