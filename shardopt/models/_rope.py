"""Rotary positions as data: the frequency of each component pair, by the kinds that open models
use.
"""

import dataclasses
import math
from typing import Literal, get_args

import numpy as np

from shardopt.core import format_error

Kind = Literal["default", "linear", "llama3", "yarn", "longrope"]


def not_positive(config: object, *names: str) -> list[str]:
    """Return a problem for each of these numbers that is not positive."""
    return [
        f"{name} must be positive, got {getattr(config, name)}"
        for name in names
        if getattr(config, name) <= 0
    ]


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary positions of a block. Immutable and hashable.

    Attributes:
      base: the longest wavelength, divided by 2 pi.
      kind: how frequencies are changed for longer rows than a model was first trained on. The kind
        "linear" divides all by `factor`. The kinds "llama3" and "yarn" divide low ones, each with a
        smooth transition of its own. The kind "longrope" divides each by a number of its own, and
        by other numbers in rows that are longer than `length`.
      dims: how many dims of a head rotate, the first ones; None rotates all.
      interleaved: whether a pair is components 2i and 2i + 1, not i and i + dims / 2.
      factor: how many times longer the rows are.
      length: positions of the first training, for all kinds but "default" and "linear".
      slow: turns within `length` below which a frequency is divided by the whole factor:
        `low_freq_factor`, `beta_slow`.
      fast: turns within `length` above which a frequency stays: `high_freq_factor`, `beta_fast`.
      truncate: whether "yarn" rounds the bounds of its transition to whole pairs.
      attention_factor: the factor of rotated queries and keys.
      short: "longrope" divides the frequencies by these numbers in rows of at most `length`
        positions.
      long: "longrope" divides by these in longer rows.

    Raises:
      ValueError: if the kind is unknown, or a number is not positive.
    """

    base: float = 10_000.0
    kind: Kind = "default"
    dims: int | None = None
    interleaved: bool = False
    factor: float = 1.0
    length: int = 8192
    slow: float = 1.0
    fast: float = 4.0
    truncate: bool = True
    attention_factor: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            fix = f"use one of {', '.join(get_args(Kind))}."
            raise ValueError(format_error("Rope", f"unknown kind {self.kind!r}.", fix=fix))
        names = ("base", "factor", "length", "slow", "fast", "attention_factor")
        problems = not_positive(self, *names)
        if problems:
            raise ValueError(format_error("Rope", "a number cannot be used.", problems))

    def frequencies(self, head_dim: int, row_length: int = 1) -> np.ndarray:
        """Return the angle of each pair between neighbouring positions, [dims / 2], in float64.

        References:
          "linear": Chen et al., "Extending Context Window of Large Language Models via Positional
          Interpolation", 2023; "yarn": Peng, Quesnelle, Fan and Shippole, "YaRN", 2023, section
          3.2; "longrope": Ding et al., "LongRoPE", 2024; "llama3": Llama 3.1's reference code.
        """
        dims = head_dim if self.dims is None else self.dims
        plain = self.base ** (-np.arange(0, dims, 2) / dims)
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "longrope":
            return plain / np.asarray(self.long if row_length > self.length else self.short)
        if self.kind == "llama3":
            turns = self.length * plain / (2 * math.pi)
            stays = np.clip((turns - self.slow) / (self.fast - self.slow), 0, 1)
        else:
            stays = 1 - self._ramp(dims)
        return plain * stays + plain / self.factor * (1 - stays)

    def _ramp(self, dims: int) -> np.ndarray:
        """Return for each pair the share of the whole factor in yarn: 0 for fast ones, 1 for slow
        ones.
        """

        def pair_of(turns: float) -> float:
            return dims * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        first = pair_of(self.fast)
        last = pair_of(self.slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, dims - 1)
        return np.clip((np.arange(dims // 2) - first) / (last - first or 0.001), 0, 1)
