"""When each pass of each micro-batch runs: the tables that a schedule is made of."""

from typing import NamedTuple

import numpy as np

Table = tuple[tuple[int, ...], ...]
"""Integers [V, M]: one row a virtual stage, one column a micro-batch."""


class Ticks(NamedTuple):
    """The ticks of every pass, for V virtual stages and M micro-batches.

    Attributes:
      num_stages: S, the stages that work side by side.
      stage_of: [V], the stage on which each virtual stage lives. The model runs through the virtual stages in order.
      forward: [V, M], the tick of each forward pass.
      backward: [V, M], the tick of each backward pass; of the gradient of the input alone where `weight` is given.
      weight: [V, M], the tick of each gradient of the weights; None where `backward` computes that as well.
    """

    num_stages: int
    stage_of: tuple[int, ...]
    forward: Table
    backward: Table
    weight: Table | None = None

    @property
    def num_virtual_stages(self) -> int:
        """V: stages times chunks."""
        return len(self.stage_of)

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return len(self.forward[0])

    @property
    def num_chunks(self) -> int:
        """How many virtual stages live on each stage."""
        return self.num_virtual_stages // self.num_stages

    @property
    def num_ticks(self) -> int:
        """The last tick, plus one."""
        return 1 + max(int(when.max()) for when in self.passes.values())

    @property
    def chunk_of(self) -> tuple[int, ...]:
        """[V]: where each virtual stage stands among those of its stage, counted from 0."""
        seen: dict[int, int] = {}
        chunks = []
        for stage in self.stage_of:
            chunks.append(seen.get(stage, 0))
            seen[stage] = chunks[-1] + 1
        return tuple(chunks)

    @property
    def passes(self) -> dict[str, np.ndarray]:
        """The tables by kind, in the order in which one tick runs them: forward, backward, weight."""
        tables = {"forward": self.forward, "backward": self.backward, "weight": self.weight}
        return {kind: np.asarray(table) for kind, table in tables.items() if table is not None}

    @property
    def last_use(self) -> np.ndarray:
        """[V, M]: the tick after which nobody needs the activation of that forward pass."""
        return np.asarray(self.backward if self.weight is None else self.weight)


def source(kind: str, v: int, m: int, num_virtual_stages: int) -> tuple[str, int, int] | None:
    """Return the pass (kind, virtual stage, micro-batch) whose result this one waits for; None at the very start."""
    if kind == "forward":
        return ("forward", v - 1, m) if v > 0 else None
    if kind == "backward":
        return ("backward", v + 1, m) if v < num_virtual_stages - 1 else ("forward", v, m)
    return ("backward", v, m)


def as_table(array: np.ndarray) -> Table:
    """Return nested tuples of Python integers: hashable, comparable, immutable."""
    return tuple(tuple(row) for row in array.tolist())
