"""One way to lay a model out over chips: sizes of the mesh axes, placement, schedule, micro-batches."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from shardopt.pipeline import Schedule, schedules

CHUNKED = ("interleaved", "zero_bubble_lockstep")
"""Schedules that take several chunks a stage."""


class Candidate(NamedTuple):
    """What `so.make_mesh` and `so.hybrid` are told, as plain values.

    Attributes:
      replica: copies of the shards.
      data: devices that the batch is spread over, times replica.
      pipeline: stages.
      tensor: devices that share every block.
      placement: what is split over data: "ddp", "zero1", "zero2" or "fsdp".
      micro_batches: parts of a device's rows that are worked on one after another.
      schedule: name of a builder in `so.schedules`; None without a pipeline.
      chunks: virtual stages a stage.
      remat: whether the backward pass runs forwards again.
      gather_dtype: dtype in which fsdp gathers weights; None is their own.
    """

    replica: int = 1
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    placement: str = "fsdp"
    micro_batches: int = 1
    schedule: str | None = None
    chunks: int = 1
    remat: bool = False
    gather_dtype: Any = None

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size, outermost first."""
        return {"replica": self.replica, "data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}

    @property
    def num_chips(self) -> int:
        """The product of the sizes."""
        return math.prod(self.sizes.values())

    @property
    def pieces(self) -> int:
        """Into how many parts the rows of a batch are cut before one is worked on."""
        return self.replica * self.data * self.micro_batches

    def table(self) -> Schedule | None:
        """Return the schedule's table; None without a pipeline."""
        if self.schedule is None:
            return None
        return _table(self.schedule, self.pipeline, self.micro_batches, self.chunks)

    def builder(self) -> Callable[[int, int], Schedule]:
        """Return what `so.hybrid` takes as schedule."""
        make = getattr(schedules, self.schedule or "one_f_one_b")
        return functools.partial(make, num_chunks=self.chunks) if self.schedule in CHUNKED else make

    def strategy(self, rules: Any) -> dict[str, Any]:
        """Return keyword arguments of `so.hybrid`, with the tensor rules of the model where tensor is above 1."""
        gather = {"gather_dtype": self.gather_dtype} if self.placement == "fsdp" else {}
        return {
            "schedule": self.builder(),
            "micro_batches": self.micro_batches,
            "placement": self.placement,
            "remat": self.remat,
            "rules": rules if self.tensor > 1 else (),
            **gather,
        }

    def __str__(self) -> str:
        """Return `data=64 tensor=8, fsdp bfloat16, 4 micro-batches, remat`."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one chip"
        words = [axes, self.placement]
        if self.schedule is not None:
            words.append(self.schedule + (f" x {self.chunks}" if self.chunks > 1 else ""))
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        return ", ".join([*words, *(["remat"] if self.remat else [])])


@functools.lru_cache(maxsize=512)
def _table(name: str, num_stages: int, num_micro_batches: int, chunks: int) -> Schedule:
    more = {"num_chunks": chunks} if name in CHUNKED else {}
    return getattr(schedules, name)(num_stages, num_micro_batches, **more)
