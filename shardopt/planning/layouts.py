"""Every layout worth a look: divisors of the chips for the axes, and what goes with them."""

from collections.abc import Iterator, Sequence
from typing import Any

from shardopt.planning.candidate import CHUNKED, Candidate
from shardopt.planning.workload import Workload

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
) -> Iterator[Candidate]:
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
                        yield Candidate(
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
