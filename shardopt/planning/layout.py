"""One way to lay a model out over chips: sizes of the mesh axes, placement, schedule, micro-batches."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from shardopt.pipeline import Schedule, schedules
from shardopt.planning.workload import Workload

CHUNKED = ("interleaved", "zero_bubble_lockstep")
"""Schedules that take several chunks a stage."""


class Layout(NamedTuple):
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
        make = getattr(schedules, self.schedule or "eager_one_f_one_b")
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


# Every layout worth a look: divisors of the chips for the axes, and what goes with them.


MAX_TENSOR = 64
MAX_PIPELINE = 64
MAX_MICRO_BATCHES = 64


def layouts(
    workload: Workload,
    *,
    chips: int,
    batch_size: int,
    slices: int,
    replicas: Sequence[int],
    placements: Sequence[str],
    schedules: Sequence[str],
    remat: Sequence[bool],
    gather_dtype: Any,
) -> Iterator[Layout]:
    """Yield the layouts of `chips` chips whose sizes divide what they have to.

    Tensor and pipeline take powers of two (or the chips' own small divisors) up to 64, stages divide the blocks, data
    takes the rest. Micro-batches are powers of two that leave a device at least a row; a pipeline gets at least as many as stages.
    """
    for tensor in _divisors(chips // slices, MAX_TENSOR if any(workload.tensor_sums) else 1):
        for pipeline in _divisors(chips // slices // tensor, MAX_PIPELINE):
            if workload.num_blocks % pipeline:
                continue
            rest = chips // tensor // pipeline
            for replica in replicas:
                data = rest // replica
                if rest % replica or batch_size % rest:
                    continue
                sizes = {"replica": replica, "data": data, "pipeline": pipeline, "tensor": tensor}
                rows = batch_size // rest
                for micro_batches, placement, schedule, again in _ways(
                    workload, sizes, rows, placements, schedules, remat
                ):
                    for chunks in _chunks(workload, pipeline, micro_batches, schedule):
                        yield Layout(
                            **sizes,
                            placement=placement,
                            micro_batches=micro_batches,
                            schedule=schedule,
                            chunks=chunks,
                            remat=again,
                            gather_dtype=gather_dtype if placement == "fsdp" else None,
                        )


def _ways(
    workload: Workload,
    sizes: dict[str, int],
    rows: int,
    placements: Sequence[str],
    schedules: Sequence[str],
    remat: Sequence[bool],
) -> Iterator[tuple[int, str, str | None, bool]]:
    pipeline = sizes["pipeline"]
    for micro_batches in _powers(rows, MAX_MICRO_BATCHES):
        if pipeline > 1 and micro_batches < pipeline:
            continue
        for placement in placements if sizes["data"] > 1 else ("ddp",):
            for schedule in schedules if pipeline > 1 else (None,):
                for again in remat:
                    yield micro_batches, placement, schedule, again


def _chunks(workload: Workload, pipeline: int, micro_batches: int, schedule: str | None) -> list[int]:
    if schedule not in CHUNKED:
        return [1]
    several = [2] if workload.num_blocks % (2 * pipeline) == 0 and micro_batches % pipeline == 0 else []
    return several if schedule == "interleaved" else [1, *several]


def _divisors(count: int, most: int) -> list[int]:
    """Powers of two that divide a count, and its other divisors up to 8."""
    return [n for n in range(1, min(count, most) + 1) if count % n == 0 and (n & (n - 1) == 0 or n <= 8)]


def _powers(count: int, most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most and count % (1 << i) == 0]
