"""How replicas that train by themselves synchronize."""

from typing import NamedTuple

import optax

from shardopt.core._reducer import Reducer


class SyncConfig(NamedTuple):
    """How replicas that train by themselves synchronize.

    See `diloco` for the meaning of each field.

    Attributes:
      outer: the outer optimizer.
      sync_every: H, the steps between two synchronizations of the same fragment.
      warmup_steps: for so many first steps, gradients are averaged over replicas.
      fragments: P, the number of parts of the model that are synchronized at different steps.
      delay: steps between sending a fragment and applying it.
      mix: the share of its own parameters that a replica keeps, from 0 to 1.
      reducer: how outer gradients cross the wire; None for an exact mean.
    """

    outer: optax.GradientTransformation
    sync_every: int
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    reducer: Reducer | None = None

    @property
    def stride(self) -> int:
        """The number of steps between the synchronizations of two consecutive fragments."""
        return self.sync_every // self.fragments
