"""How long a step takes: a roofline of every part, and which parts wait for which."""

from typing import NamedTuple

from shardopt.planning.candidate import Candidate
from shardopt.planning.footprint import Footprint
from shardopt.planning.hardware import Hardware
from shardopt.planning.links import seconds
from shardopt.planning.placed import Placed
from shardopt.planning.traffic import Transfer
from shardopt.planning.workload import Workload


class StepTime(NamedTuple):
    """Seconds of a step, by what the device does or waits for.

    Attributes:
      compute: inner products, and the memory traffic of what is between them.
      tensor: sums over tensor, which blocks wait for.
      data: gathers and reductions over data and replica beyond what hides behind computation.
      pipeline: messages between stages, and the outer gradients.
      bubble: idle time of the lockstep schedule.
      update: the optimizer, bound by memory bandwidth.
    """

    compute: float
    tensor: float
    data: float
    pipeline: float
    bubble: float
    update: float

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self)


def step_time(
    workload: Workload,
    candidate: Candidate,
    placed: Placed,
    held: Footprint,
    transfers: tuple[Transfer, ...],
    hardware: Hardware,
    *,
    batch_size: int,
    slices: int = 1,
) -> StepTime:
    """Return the time of a step if every part ran at the published peak of what bounds it.

    It is made of first principles: no factor is fitted to a run, so machines are slower. A forward takes flops / peak, or
    the bytes of its weights / bandwidth if that is more; then what stands between inner products writes and reads
    activations, which takes their bytes / bandwidth. A backward is twice that, and with remat what the forward has to
    run again. Transfers that can hide run beside the computation, and what is longer counts. In a pipeline each tick
    takes as long as its busiest stage, the loss included.

    Args:
      workload: the model.
      candidate: the layout.
      placed: from `place`.
      held: from `footprint`.
      transfers: from `traffic`.
      hardware: the chip.
      batch_size: rows of the global batch.
      slices: pods that the chips are spread over.
    """
    micro, rows = candidate.micro_batches, batch_size / candidate.pieces
    times = {one: seconds(one, candidate, hardware, slices=slices) for one in transfers}
    hidden = sum(time for one, time in times.items() if one.hidden)
    exposed = sum(time for one, time in times.items() if not one.hidden and one.axis in ("data", "replica"))
    tensor = sum(time for one, time in times.items() if one.axis == "tensor")
    pipeline = sum(time for one, time in times.items() if one.axis == "pipeline")
    forward = _forward(workload, candidate, placed, hardware, rows)
    ends = 3 * workload.ends_flops * rows / candidate.tensor / hardware.flops
    again = forward * workload.again_flops / max(workload.block_flops, 1.0) if candidate.remat else 0.0
    passes = 3 * forward + again
    # state and parameters are read and written, gradients (fp32) read
    moved = 2 * (held.params + held.opt_state) + 4 * placed.params / placed.itemsize
    update = moved / hardware.memory_bandwidth
    table = candidate.table()
    if table is None:
        compute = micro * (passes + ends)
        return StepTime(compute, tensor, exposed + max(hidden - compute, 0.0), pipeline, 0.0, update)
    share = 1 / candidate.chunks
    waiting = tensor / (micro * candidate.chunks)
    spent = table.program_time(
        forward=forward * share + waiting / 3,
        backward=(forward + again) * share + ends + waiting / 3,
        weight=forward * share + waiting / 3,
    )
    compute = micro * passes + micro * ends / candidate.pipeline
    return StepTime(
        compute, tensor, exposed + max(hidden - compute, 0.0), pipeline, max(spent - compute - tensor, 0.0), update
    )


def _forward(workload: Workload, candidate: Candidate, placed: Placed, hardware: Hardware, rows: float) -> float:
    """Return the seconds of the forward of a stage's blocks on one micro-batch."""
    blocks = workload.num_blocks // candidate.pipeline
    flops = blocks * workload.block_flops * rows / candidate.tensor
    weights = placed.elements.blocks * workload.itemsize
    # what is kept is written once and read once
    activations = 2 * blocks * workload.kept.on(candidate.tensor) * rows
    return max(flops / hardware.flops, weights / hardware.memory_bandwidth) + activations / hardware.memory_bandwidth
