"""Bytes on one device at the worst moment of a step, by what they are for."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from shardopt.planning.hardware import Hardware
from shardopt.planning.layout import Layout, PlacedModel
from shardopt.planning.workload import Workload

# What a device sends in a step, by axis and purpose: the closed forms of the strategies, without compiling.


_WIDE_DTYPE = 4


class Transfer(NamedTuple):
    """Collectives of one kind and purpose.

    Attributes:
      kind: as `so.audit` names it.
      axis: mesh axis.
      what: what travels: "weights", "gradients", "activations", "outer gradients".
      bytes: whole buffers of one call, per device (see `shardopt.audit.Collective`).
      calls: a step.
      hidden: whether it can run while blocks compute, as gathers and scatters of one block can while another works.
    """

    kind: str
    axis: str
    what: str
    bytes: float
    calls: float
    hidden: bool = False

    def wire_bytes(self, sizes: dict[str, int]) -> float:
        """Return what a device sends in rings, a step: 2 (n-1)/n of an all-reduce, (n-1)/n of others."""
        n = sizes[self.axis]
        share = 1.0 if self.kind == "collective-permute" else (2 if self.kind == "all-reduce" else 1) * (n - 1) / n
        return share * self.bytes * self.calls


def traffic(workload: Workload, candidate: Layout, placed: PlacedModel, *, batch_size: int) -> tuple[Transfer, ...]:
    """Return the transfers of a step; those over axes of size 1 are left out.

    For Psi bytes of gradients that tensor and pipeline leave to a device, M micro-batches, and messages of A bytes:

    - ddp: one all-reduce of Psi over data. zero1: a reduce-scatter and an all-gather. zero2: a reduce-scatter each
      micro-batch. fsdp: each micro-batch two all-gathers of the blocks (three in a pipeline with remat), one of the
      outer parameters, and a reduce-scatter; in a pipeline outer parameters once a step. Leaves that stay whole over
      data are all-reduced once. Then one all-reduce over replica, of shards where there are shards.
    - pipeline: two permutes of A each tick, and an all-reduce of the outer gradients.
    - tensor: the all-reduces of A that the workload names, forward and backward; with remat, again those which the
      backward pass needs: all but the last of each block. And one after the embedding, one before the head's gradient
      leaves it.

    Args:
      workload: the model.
      candidate: the layout.
      placed: from `place`.
      batch_size: rows of the global batch.
    """
    found = [
        *_over_data(workload, candidate, placed),
        *_over_replica(candidate, placed),
        *_over_pipeline(workload, candidate, placed, batch_size),
        *_over_tensor(workload, candidate, batch_size),
    ]
    return tuple(one for one in found if candidate.sizes[one.axis] > 1 and one.bytes > 0 and one.calls > 0)


def by_axis(found: tuple[Transfer, ...], candidate: Layout) -> dict[str, float]:
    """Return the wire bytes a device sends in a step, by mesh axis."""
    sizes = candidate.sizes
    axes = [axis for axis in sizes if any(one.axis == axis for one in found)]
    return {axis: math.fsum(one.wire_bytes(sizes) for one in found if one.axis == axis) for axis in axes}


def _over_data(workload: Workload, candidate: Layout, placed: PlacedModel) -> list[Transfer]:
    elements, switches, m = placed.elements, placed.switches, candidate.micro_batches
    whole = elements.whole_blocks + elements.whole_outer
    split = elements.split_blocks + elements.split_outer
    if not switches.opt_state:
        return [Transfer("all-reduce", "data", "gradients", placed.itemsize * (whole + split), 1)]
    rest = Transfer("all-reduce", "data", "gradients", placed.itemsize * whole, 1)
    if not switches.params:
        calls = m if switches.grads and candidate.pipeline == 1 else 1
        return [
            rest,
            Transfer("reduce-scatter", "data", "gradients", placed.itemsize * split, calls),
            Transfer("all-gather", "data", "weights", placed.itemsize * split, 1),
        ]
    size = placed.itemsize if candidate.gather_dtype is None else jnp.dtype(candidate.gather_dtype).itemsize
    pipelined = candidate.pipeline > 1
    blocks = workload.num_blocks // candidate.pipeline
    each, passes = elements.split_blocks / blocks, 3 if pipelined and candidate.remat else 2
    once = 1 if pipelined else m
    return [
        rest,
        Transfer("all-gather", "data", "weights", size * each, passes * blocks * m, hidden=True),
        Transfer("reduce-scatter", "data", "gradients", placed.itemsize * each, blocks * m, hidden=True),
        Transfer("all-gather", "data", "outer weights", size * elements.split_outer, once),
        Transfer("reduce-scatter", "data", "outer gradients", placed.itemsize * elements.split_outer, once),
    ]


def _over_replica(candidate: Layout, placed: PlacedModel) -> list[Transfer]:
    elements, switches = placed.elements, placed.switches
    cut = candidate.data if switches.opt_state else 1
    size = (elements.split_blocks + elements.split_outer) / cut + elements.whole_blocks + elements.whole_outer
    return [Transfer("all-reduce", "replica", "gradients", placed.itemsize * size, 1)]


def _over_pipeline(workload: Workload, candidate: Layout, placed: PlacedModel, batch_size: int) -> list[Transfer]:
    table = candidate.table()
    if table is None:
        return []
    message = workload.message * batch_size / candidate.pieces
    permutes = table.num_ticks * (len(table.forward_shifts) + len(table.backward_shifts))
    return [
        Transfer("collective-permute", "pipeline", "activations", message, permutes),
        Transfer("all-reduce", "pipeline", "outer gradients", _WIDE_DTYPE * _outer(candidate, placed), 1),
    ]


def _outer(candidate: Layout, placed: PlacedModel) -> float:
    elements = placed.elements
    cut = candidate.data if placed.switches.opt_state else 1
    return elements.split_outer / cut + elements.whole_outer


def _over_tensor(workload: Workload, candidate: Layout, batch_size: int) -> list[Transfer]:
    message = workload.message * batch_size / candidate.pieces
    blocks = workload.num_blocks // candidate.pipeline * candidate.micro_batches
    forward, backward = workload.tensor_sums
    again = max(forward - 1, 0) if candidate.remat else 0
    sums = forward + backward + again
    ends = 2 * candidate.micro_batches if sums else 0
    return [Transfer("all-reduce", "tensor", "activations", message, sums * blocks + ends)]


# How long a transfer takes on the links of a machine.


def seconds(transfer: Transfer, candidate: Layout, hardware: Hardware, *, slices: int = 1) -> float:
    """Return the time of a transfer, a step, in rings at full bandwidth; the time to start one is not counted.

    Devices are laid out as `so.make_mesh` does it: tensor neighbours adjacent, pipeline next, data outside it, replica
    outermost. A group within one pod or node uses its links; a group spread over several first works within each, on
    k members, then across them, each member its k-th of the buffer over the network. On a torus a mesh axis of n of C
    chips has about D log n / log C of the D torus axes to itself, at least one.

    Args:
      transfer: what travels.
      candidate: the mesh.
      hardware: the chip.
      slices: pods that the chips are spread over evenly.
    """
    sizes = candidate.sizes
    domain = max(min(hardware.pod_chips, candidate.num_chips // slices), 1)
    axes = list(sizes)
    inner = math.prod(sizes[axis] for axis in axes[axes.index(transfer.axis) + 1 :])
    n = sizes[transfer.axis]
    near = min(n, max(domain // inner, 1))
    far = -(-n // near)
    link = hardware.link_bandwidth * rings(near, domain, hardware)
    total = transfer.bytes * transfer.calls
    if transfer.kind == "collective-permute":
        return total / (hardware.network_bandwidth if far > 1 else link)
    rounds = 2 if transfer.kind == "all-reduce" else 1
    within = rounds * (near - 1) / near * total / link
    return within + rounds * (far - 1) / far * total / near / hardware.network_bandwidth


def rings(size: int, chips: int, hardware: Hardware) -> int:
    """Return how many torus axes a mesh axis of a slice of `chips` chips has to itself; 1 on a switch."""
    if hardware.torus_dims == 0 or size == 1 or chips == 1:
        return 1
    return max(1, round(hardware.torus_dims * math.log(size) / math.log(chips)))


_WIDE = 4
"""Gradients are summed in fp32 at least."""


class Footprint(NamedTuple):
    """Bytes on one device.

    Attributes:
      params: parameters that it holds; on a TPU with what tiles add, see `planning.tiles`.
      opt_state: optimizer state that it holds, likewise.
      gradients: sums of gradients, and those of the micro-batch under way where these exist beside the sums.
      activations: what is kept from forwards to backwards, of all micro-batches under way.
      gathered: weights that are whole while one block, or the loss, is differentiated, and their gradients before they
        are scattered; with several chunks a stage, its blocks in the order in which they run.
      working: what else comes and goes at that moment, the larger of the two.
    """

    params: float
    opt_state: float
    gradients: float
    activations: float
    gathered: float
    working: float

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self)


def footprint(workload: Workload, candidate: Layout, placed: PlacedModel, *, batch_size: int) -> Footprint:
    """Return the bytes on a device.

    With k blocks on a stage, r rows in a micro-batch, and activations cut over tensor as the workload says:

    - gradients: one sum of what the placement splits; with micro-batches and no pipeline, those of one more
      micro-batch, which the backward pass makes before they are added. In a pipeline two sums, as each tick makes new
      ones of the old; outer gradients are whole there.
    - activations: k r kept, or with remat k r message, and one block's kept. Under fsdp what elementwise operations
      give is kept of one block at a time. In a pipeline `schedule.num_slots` chunks' worth of what is kept, and the
      messages that wait; with remat only the inputs of chunks, and one chunk's kept.
    - gathered (fsdp): at the loss the weights that it reads and the largest gradient of them, at a block its weights and
      gradients, at embed the gradient of the largest outer leaf.

    Args:
      workload: the model.
      candidate: the layout.
      placed: from `place`.
      batch_size: rows of the global batch.
    """
    rows = batch_size / candidate.pieces
    cut = candidate.tensor
    message, everything = workload.message * rows, workload.kept.on(cut) * rows
    lean = candidate.pipeline > 1 or placed.switches.params  # whose blocks keep no elementwise results
    kept = workload.stage_kept.on(cut) * rows if lean else everything
    loss, block, embedding = _gathered(workload, candidate, placed)
    moments = [
        (embedding, 0.0),
        (block, workload.working.on(cut) * rows + _block_again(candidate, kept, everything)),
        (loss, workload.ends_working.on(cut) * rows),
    ]
    gathered, working = max(moments, key=sum)
    return Footprint(
        params=placed.params,
        opt_state=placed.opt_state,
        gradients=_gradients(candidate, placed),
        activations=_activations(workload, candidate, message, kept, workload.deferred.on(cut) * rows),
        gathered=gathered + _reordered(candidate, placed),
        working=working,
    )


def _block_again(candidate: Layout, kept: float, everything: float) -> float:
    """Without a pipeline, what was not kept of one block is made again while it is differentiated; with remat all."""
    if candidate.pipeline > 1:
        return 0.0
    return everything if candidate.remat else everything - kept


def _gradients(candidate: Layout, placed: PlacedModel) -> float:
    elements, switches = placed.elements, placed.switches
    shards = candidate.data
    scattered = (elements.split_blocks + elements.split_outer) / shards + elements.whole_blocks + elements.whole_outer
    whole = elements.blocks + elements.outer
    if candidate.pipeline > 1:
        blocks = elements.split_blocks / shards + elements.whole_blocks if switches.grads else elements.blocks
        # the branch of a tick makes its new sums beside the old ones
        return _WIDE * (2 * (blocks + elements.outer) + (scattered if switches.opt_state else 0))
    again = candidate.micro_batches > 1
    if switches.params:
        return _WIDE * scattered * (2 if again else 1)
    if switches.grads:
        return _WIDE * (whole + (scattered if again else 0))
    return _WIDE * whole * (2 if again else 1)


def _activations(workload: Workload, candidate: Layout, message: float, kept: float, deferred: float) -> float:
    table = candidate.table()
    if table is None:
        return workload.num_blocks * (message if candidate.remat else kept)
    k = workload.num_blocks // (candidate.pipeline * candidate.chunks)
    messages = table.num_input_slots + table.num_cotangent_slots + 2
    left = table.num_deferred_slots * k * deferred
    if candidate.remat:
        return (table.num_slots + messages) * message + k * kept + left
    return table.num_slots * k * kept + messages * message + left


def _reordered(candidate: Layout, placed: PlacedModel) -> float:
    """Return the bytes of a stage's blocks in the order in which it runs them, where it stores others."""
    if candidate.chunks == 1:
        return 0.0
    elements, cut = placed.elements, candidate.data if placed.switches.params else 1
    return placed.itemsize * (elements.split_blocks / cut + elements.whole_blocks)


def _gathered(workload: Workload, candidate: Layout, placed: PlacedModel) -> tuple[float, float, float]:
    """Return the bytes of whole weights and their gradients, while the loss, one block, and embed are differentiated.

    Those that the loss reads are whole until it is differentiated; embed needs none again. Gradients are scattered
    leaf by leaf, those of a block together. A pipeline has the outer weights whole throughout.
    """
    if not placed.switches.params or candidate.data == 1:
        return 0.0, 0.0, 0.0
    size = placed.itemsize if candidate.gather_dtype is None else jnp.dtype(candidate.gather_dtype).itemsize
    block = placed.elements.split_blocks * candidate.pipeline / workload.num_blocks
    elements, pipelined = placed.elements, candidate.pipeline > 1
    outer = elements.split_outer * size if pipelined else 0.0
    loss = (outer or elements.loss_outer * size) + elements.largest_loss * _WIDE
    return loss, outer + block * (size + _WIDE), outer + elements.largest_outer * _WIDE


# How long a step takes: a roofline of every part, and which parts wait for which.


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
    candidate: Layout,
    placed: PlacedModel,
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


def _forward(workload: Workload, candidate: Layout, placed: PlacedModel, hardware: Hardware, rows: float) -> float:
    """Return the seconds of the forward of a stage's blocks on one micro-batch."""
    blocks = workload.num_blocks // candidate.pipeline
    flops = blocks * workload.block_flops * rows / candidate.tensor
    weights = placed.elements.blocks * workload.itemsize
    # what is kept is written once and read once
    activations = 2 * blocks * workload.kept.on(candidate.tensor) * rows
    return max(flops / hardware.flops, weights / hardware.memory_bandwidth) + activations / hardware.memory_bandwidth
