"""The cost model: closed forms for the traffic, the memory, the flops and the time of a training
step on one device.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from shardopt.nn._attention import choose_method
from shardopt.nn._embedding import exchange_bytes
from shardopt.pipeline._messages import rounds_to_schedule
from shardopt.planning._hardware import Hardware
from shardopt.planning._layout import ElementCounts, ParallelLayout, PlacedModel

_FP32_BYTES = 4
"""Bytes of fp32; gradients are summed in fp32 or wider."""


class StepTransfer(NamedTuple):
    """Collectives of one kind and purpose.

    Attributes:
      kind: the kind of collective, as in `so.hlo.audit`.
      axis: mesh axis; the first one if a collective runs over several axes at once.
      what: content of the buffers: "weights", "gradients", "activations", "blocks", "outer
        gradients".
      bytes: whole buffers of one call, per device (see `shardopt.hlo.Collective`).
      calls: calls per step.
      hidden: whether it can run while blocks compute, as the gathers and scatters of fsdp can.
      also: the other axes if a collective runs over several axes at once.
    """

    kind: str
    axis: str
    what: str
    bytes: float
    calls: float
    hidden: bool = False
    also: tuple[str, ...] = ()

    def wire_bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes that a device sends per step in a ring: 2 (n-1)/n of an all-reduce,
        (n-1)/n of others.
        """
        n = self.group_size(sizes)
        share = 1.0 if self.kind == "collective-permute" else self.rounds * (n - 1) / n
        return share * self.bytes * self.calls

    def group_size(self, sizes: Mapping[str, int]) -> int:
        """Return how many devices take part in one call."""
        return math.prod(sizes[axis] for axis in (self.axis, *self.also))

    @property
    def rounds(self) -> int:
        """How often the buffer goes around the ring: twice in an all-reduce."""
        return 2 if self.kind == "all-reduce" else 1


def traffic(placed: PlacedModel, *, batch_size: int) -> tuple[StepTransfer, ...]:
    """Return the transfers of a step, without transfers over axes of size 1.

    Psi is the bytes of gradients on a device after tensor and pipeline have split the model. M is
    the number of micro-batches. A is the bytes of the activations between two blocks.

    - ddp: one all-reduce of Psi over data.
    - zero1: a reduce-scatter and an all-gather over data.
    - zero2: a reduce-scatter per micro-batch, and an all-gather. A pipeline scatters the outer
      gradients once per step.
    - fsdp: per micro-batch two all-gathers of the blocks (three in a pipeline with remat and
      several blocks a stage), one all-gather of the outer parameters, and a reduce-scatter. In a
      pipeline the outer parameters are gathered once per step. Tables of `so.nn.embedding` are not
      gathered if the exchange of rows sends fewer bytes.
    - data, all placements: leaves that stay replicated are all-reduced once. Gathers are in
      `gather_dtype`, reduce-scatters in `scatter_dtype`, all other transfers in the dtype of the
      parameters. Weights that `BlockModel.rounded` names are gathered in 8 bits;
      their scales are not counted.
    - replica: one all-reduce, of shards if the gradients are sharded.
    - pipeline: two permutes of A per tick, and an all-reduce of the outer gradients, under ddp over
      data and pipeline at once. With several chunks per stage, permutes move blocks to the stages
      that run them, and gradients back.
    - context: the transfers over data go over data and context together. Keys and values travel as
      in the method that `so.nn.attention` chooses: once forward (twice with remat) and once
      backward.
    - expert: gradients of expert leaves are summed over data alone, all others over data and expert
      together. The K copies of each token go to their experts and back, forward and backward; with
      remat they go there once more. These all-to-alls are assumed to be balanced.
    - tensor: the all-reduces of A that the workload counts, forward and backward. With remat, all
      forward ones but the last of each block run again. The embedding adds one, and the gradient of
      the head adds one.
    """
    rows = batch_size / placed.layout.pieces
    boundary = placed.workload.boundary_bytes * rows
    transfers = [
        *_over_data(placed),
        *_table_transfers(placed, rows),
        _over_replica(placed),
        *_over_pipeline(placed, boundary),
        *_over_context(placed, rows),
        *_over_expert(placed, rows),
        _over_tensor(placed, boundary),
    ]
    sizes = placed.layout.sizes
    return tuple(
        transfer
        for transfer in transfers
        if transfer.group_size(sizes) > 1 and transfer.bytes > 0 and transfer.calls > 0
    )


def by_axis(transfers: tuple[StepTransfer, ...], sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the wire bytes a device sends in a step, by mesh axis."""
    axes = [axis for axis in sizes if any(transfer.axis == axis for transfer in transfers)]
    return {
        axis: math.fsum(
            transfer.wire_bytes(sizes) for transfer in transfers if transfer.axis == axis
        )
        for axis in axes
    }


def _over_data(placed: PlacedModel) -> list[StepTransfer]:
    elements = placed.elements
    without_experts = placed._replace(elements=elements._replace(expert_blocks=0))
    expert_elements = ElementCounts(sharded_blocks=elements.expert_blocks)
    other_axes = tuple(axis for axis in placed.layout.shards.names[1:] if axis != "expert")
    transfers = _gathers_and_sums(without_experts, placed.layout.shards.names[1:])
    return transfers + _gathers_and_sums(placed._replace(elements=expert_elements), other_axes)


def _gathers_and_sums(placed: PlacedModel, other_axes: tuple[str, ...]) -> list[StepTransfer]:
    """Return the gathers of weights and the sums of gradients over data and `other_axes` together."""
    elements = placed.elements
    layout = placed.layout
    size = placed.itemsize
    replicated = elements.replicated_blocks + elements.replicated_outer
    sharded = elements.sharded_blocks + elements.sharded_outer
    m = layout.micro_batches
    pipelined = layout.pipeline > 1
    scattered = placed.scattered_itemsize
    outer_calls = 1 if pipelined else m

    def over_data(
        kind: str, content: str, size: float, calls: float = 1, *, hidden: bool = False
    ) -> StepTransfer:
        return StepTransfer(kind, "data", content, size, calls, hidden, other_axes)

    if not placed.shards.opt_state and pipelined:
        outer_gradients = over_data("all-reduce", "outer gradients", _FP32_BYTES * elements.outer())
        return [
            over_data("all-reduce", "gradients", size * elements.blocks()),
            outer_gradients._replace(also=(*other_axes, "pipeline")),
        ]
    if not placed.shards.opt_state:
        return [over_data("all-reduce", "gradients", size * (replicated + sharded))]
    replicated_sum = over_data("all-reduce", "gradients", size * replicated)
    if not placed.shards.params:
        block_sums, outer_sums = (m, outer_calls) if placed.shards.grads else (1, 1)
        return [
            replicated_sum,
            over_data(
                "reduce-scatter", "gradients", scattered * elements.sharded_blocks, block_sums
            ),
            over_data(
                "reduce-scatter", "outer gradients", scattered * elements.sharded_outer, outer_sums
            ),
            over_data("all-gather", "weights", size * sharded),
        ]
    # every pass gathers every block of every micro-batch
    blocks = placed.num_blocks
    # a backward pass runs its blocks forward again; if a stage has one block, XLA removes both
    # loops, and gathers it once
    gathers_again = pipelined and layout.remat and blocks > 1
    passes = 3 if gathers_again else 2
    block_elements = elements.sharded_blocks / blocks
    calls = blocks * m
    gathered = placed.gathered_itemsize
    outer = elements.sharded_outer - elements.tables
    rounded = elements.rounded_blocks / blocks
    weight_bytes = gathered * (block_elements - rounded) + rounded
    return [
        replicated_sum,
        over_data("all-gather", "weights", weight_bytes, passes * calls, hidden=True),
        over_data("reduce-scatter", "gradients", scattered * block_elements, calls, hidden=True),
        over_data("all-gather", "outer weights", gathered * outer, outer_calls),
        over_data("reduce-scatter", "outer gradients", scattered * outer, outer_calls),
    ]


def _table_transfers(placed: PlacedModel, rows: float) -> list[StepTransfer]:
    """Return the transfers of lookups in tables that are sharded by columns, as `so.nn.embedding`
    chooses them.
    """
    elements = placed.elements.tables
    size = placed.workload.itemsize
    m = placed.layout.micro_batches
    other_axes = placed.layout.shards.names[1:]
    exchange = _exchange_bytes(placed, rows)
    if exchange is not None:
        id_bytes, row_bytes = exchange
        return [
            StepTransfer("all-gather", "data", "ids", id_bytes, m, also=other_axes),
            StepTransfer("all-to-all", "data", "embedding rows", row_bytes, m, also=other_axes),
        ]
    return [
        StepTransfer("all-gather", "data", "outer weights", size * elements, m, also=other_axes),
        StepTransfer(
            "reduce-scatter",
            "data",
            "outer gradients",
            placed.scattered_itemsize * elements,
            m,
            also=other_axes,
        ),
    ]


def _exchange_bytes(placed: PlacedModel, rows: float) -> tuple[float, float] | None:
    """Return the bytes of (ids, rows) that one micro-batch exchanges.

    None if tables are gathered or there is none.
    """
    workload = placed.workload
    elements = placed.elements.tables
    if not elements:
        return None
    ids = workload.table_ids * rows
    width = workload.table_numbers / workload.table_ids
    exchange = exchange_bytes(
        ids, width, devices=placed.layout.shards.size, itemsize=workload.itemsize
    )
    return (
        exchange
        if sum(exchange) < elements * (workload.itemsize + placed.scattered_itemsize)
        else None
    )


def _over_replica(placed: PlacedModel) -> StepTransfer:
    # gradients are scattered before
    num_shards = placed.layout.shards.size if placed.shards.opt_state else 1
    return StepTransfer(
        "all-reduce", "replica", "gradients", placed.itemsize * placed.elements.total(num_shards), 1
    )


def _over_pipeline(placed: PlacedModel, boundary: float) -> list[StepTransfer]:
    table = placed.layout.table()
    if table is None:
        return []
    permutes = table.num_ticks * sum(
        shift > 0 for shift in (*table.forward_shifts, *table.backward_shifts)
    )
    shards = placed.shards
    elements = placed.elements
    data = placed.layout.shards.size
    # one stage stores a block and another stage runs it: weights travel there, and gradients travel
    # back
    chunk = placed.itemsize / placed.layout.chunks
    weights = elements.blocks(data if shards.params else 1)
    gradients = elements.blocks(data if shards.grads else 1)
    transfers = [
        StepTransfer("collective-permute", "pipeline", "activations", boundary, permutes),
        StepTransfer(
            "collective-permute",
            "pipeline",
            "blocks",
            chunk * (weights + gradients),
            rounds_to_schedule(table),
        ),
    ]
    if shards.opt_state:  # else they are summed over data and pipeline at once
        transfers.append(
            StepTransfer(
                "all-reduce", "pipeline", "outer gradients", _FP32_BYTES * elements.outer(data), 1
            )
        )
    return transfers


def _over_context(placed: PlacedModel, rows: float) -> list[StepTransfer]:
    """Return the transfers of attention between positions, by the method that `so.nn.attention`
    chooses.
    """
    layout = placed.layout
    attention = placed.workload.attention
    C = placed.layout.context
    if attention is None or C == 1:
        return []
    keys = 2 * attention.keys * rows / layout.tensor
    queries = 2 * attention.queries * rows / layout.tensor
    gradients = keys * _FP32_BYTES / placed.workload.itemsize
    calls = placed.num_blocks * layout.micro_batches
    forwards = 1 if layout.remat is False or layout.saves("attention") else 2
    kv_heads = attention.kv_heads / layout.tensor
    heads = {
        "heads": kv_heads * queries / keys,
        "kv_heads": kv_heads,
        "itemsize": placed.workload.itemsize,
    }
    method = choose_method(placed.workload.tokens, C, C - 1, **heads)
    if method == "all_to_all":
        return [
            StepTransfer("all-to-all", "context", "heads", keys + queries, (forwards + 1) * calls)
        ]
    if method == "all_gather":
        return [
            StepTransfer(
                "all-gather", "context", "keys and values", C * keys, (forwards + 1) * calls
            ),
            StepTransfer(
                "reduce-scatter", "context", "gradients of keys and values", C * gradients, calls
            ),
        ]
    hops = (C - 1) * calls
    return [
        StepTransfer(
            "collective-permute",
            "context",
            "keys and values",
            keys,
            (forwards + 1) * hops,
            hidden=True,
        ),
        StepTransfer(
            "collective-permute",
            "context",
            "gradients of keys and values",
            gradients,
            hops,
            hidden=True,
        ),
    ]


def _over_expert(placed: PlacedModel, rows: float) -> list[StepTransfer]:
    """Return the transfers of tokens to their experts and back, with equal loads on all devices."""
    experts = placed.workload.experts
    layout = placed.layout
    if experts is None or layout.expert == 1:
        return []
    # tokens to experts and results back; remat repeats the first alone
    forwards = 2 if layout.remat is False or layout.saves("dispatched") else 3
    calls = placed.num_blocks * layout.micro_batches
    return [
        StepTransfer(
            "all-to-all",
            "expert",
            "tokens",
            experts.top_k * experts.tokens * rows,
            (forwards + 2) * calls,
        )
    ]


def _over_tensor(placed: PlacedModel, boundary: float) -> StepTransfer:
    recompute = placed.recompute
    sums = sum(placed.workload.tensor_sums) + (0 if recompute is None else recompute.tensor_sums)
    m = placed.layout.micro_batches
    return StepTransfer(
        "all-reduce",
        "tensor",
        "activations",
        boundary,
        sums * placed.num_blocks * m + (2 * m if sums else 0),
    )


class Footprint(NamedTuple):
    """Bytes on one device at the worst moment of a step, by purpose.

    Attributes:
      params: parameters that the device holds; on a TPU with the padding of tiles.
      opt_state: optimizer state that the device holds; on a TPU with the padding of tiles.
      gradients: sums of gradients, and gradients of the current micro-batch if they exist next to
        the sums.
      activations: residuals from forward to backward, of all micro-batches that are not finished.
      gathered: gathered weights while one block, or the loss, is differentiated, and their
        gradients before the reduce-scatter. With several chunks per stage, also a copy of its
        blocks in the order of execution.
      working: other temporary bytes at the worst moment.
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


def footprint(placed: PlacedModel, *, batch_size: int) -> Footprint:
    """Return the bytes on a device.

    There are k blocks on a stage and r rows in a micro-batch. Tensor shards activations as the
    workload says.

    Args:
      placed: the model under a layout.
      batch_size: rows of the global batch.

    - gradients: one sum, sharded by the placement. With micro-batches and no pipeline, also the
      gradients of one micro-batch before they are added. In a pipeline two sums, because each tick
      makes new sums from the old ones; outer gradients are replicated there.
    - activations: k r residuals. With remat k r block inputs, values that are saved by name, and
      the residuals of one block. Elementwise results are stored for one block at a time.
    - activations in a pipeline: the residuals of `schedule.num_slots` chunks, and the messages that
      wait. With remat only the inputs of chunks; the residuals of one chunk are among its working
      bytes, after the loss.
    - gathered (fsdp), at the loss: the weights that it reads and the largest of their gradients.
    - gathered (fsdp), at a block: its weights and gradients.
    - gathered (fsdp), at embed: the gradient of the largest outer leaf.
    """
    workload = placed.workload
    layout = placed.layout
    rows = batch_size / layout.pieces
    tensor = layout.tensor
    all_residuals = workload.residuals.on(tensor) * rows
    residuals = workload.stage_residuals.on(tensor) * rows
    recompute = placed.recompute
    boundary = workload.boundary_bytes * rows
    saved = 0.0 if recompute is None else recompute.kept.on(tensor) * rows
    # without a pipeline, a block recomputes the residuals that were not stored, while it is
    # differentiated
    recomputed = (
        0.0 if layout.pipeline > 1 else all_residuals - (residuals if recompute is None else saved)
    )
    loss, block, embedding = _gathered_bytes(placed, rows)
    # a sum over tensor reads one buffer and writes another
    sum_buffers = 2 * boundary if tensor > 1 else 0.0
    moments = [
        (embedding, 0.0),
        (
            block,
            workload.working.on(tensor) * rows
            + recomputed
            + sum_buffers
            + _chunk_residuals(placed, residuals),
        ),
        (loss, workload.ends_working.on(tensor) * rows),
    ]
    gathered, working = max(moments, key=sum)
    deferred = workload.deferred.on(tensor) * rows
    return Footprint(
        params=placed.params,
        opt_state=placed.opt_state,
        gradients=_gradient_bytes(placed),
        activations=_activation_bytes(
            placed, boundary, boundary + saved if layout.remat else residuals, residuals, deferred
        ),
        gathered=gathered + _reordered_bytes(placed),
        working=working,
    )


def _gradient_bytes(placed: PlacedModel) -> float:
    elements = placed.elements
    shards = placed.shards
    data = placed.layout.shards.size
    scattered = elements.total(data)
    if placed.layout.pipeline > 1:
        blocks = elements.blocks(data if shards.grads else 1)
        # the branch of a tick writes its new sums to another buffer than the old sums
        sums = 2 * (blocks + elements.outer())
        return _FP32_BYTES * (sums + (scattered if shards.opt_state else 0))
    has_micro_batches = placed.layout.micro_batches > 1
    if shards.grads and not shards.params:
        return _FP32_BYTES * (elements.total() + (scattered if has_micro_batches else 0))
    return (
        _FP32_BYTES
        * (scattered if shards.params else elements.total())
        * (2 if has_micro_batches else 1)
    )


def _activation_bytes(
    placed: PlacedModel, boundary: float, block_bytes: float, residuals: float, deferred: float
) -> float:
    layout = placed.layout
    table = placed.layout.table()
    if table is None:
        return placed.num_blocks * block_bytes
    blocks_per_chunk = placed.workload.num_blocks // (layout.pipeline * layout.chunks)
    waiting_messages = (
        table.num_input_slots + table.num_cotangent_slots + 2 * table.ticks.message_ticks
    )
    deferred_bytes = table.num_deferred_slots * blocks_per_chunk * deferred
    slot_bytes = boundary if layout.remat else blocks_per_chunk * residuals
    return table.num_slots * slot_bytes + waiting_messages * boundary + deferred_bytes


def _chunk_residuals(placed: PlacedModel, residuals: float) -> float:
    """Return the residuals that a stage computes again before it differentiates a chunk, after the
    loss.
    """
    layout = placed.layout
    return (
        placed.num_blocks // layout.chunks * residuals
        if layout.remat and layout.pipeline > 1
        else 0.0
    )


def _reordered_bytes(placed: PlacedModel) -> float:
    """Return the bytes of a copy of a stage's blocks in the order of execution.

    0 if it stores them in that order.
    """
    if placed.layout.chunks == 1:
        return 0.0
    return placed.itemsize * placed.elements.blocks(
        placed.layout.shards.size if placed.shards.params else 1
    )


def _gathered_bytes(placed: PlacedModel, rows: float) -> tuple[float, float, float]:
    """Return the bytes of gathered weights and their gradients while (loss, one block, embed) are
    differentiated.

    The weights that the loss reads stay gathered until the loss is differentiated. The backward
    pass of embed gathers nothing. Outer gradients are scattered leaf by leaf, the gradients of a
    block together. The gradient of an expert leaf overwrites its gathered weight. Products read
    gathered weights from their bucket. A bucket of gradients exists next to its leaves after the
    last product of the block, when the gathered weights are gone. In a pipeline the outer weights
    are gathered during the whole step.
    """
    if not placed.shards.params or placed.layout.shards.size == 1:
        return 0.0, 0.0, 0.0
    elements = placed.elements
    layout = placed.layout
    size = placed.gathered_itemsize
    stage = elements.sharded_blocks + elements.expert_blocks
    outer = elements.sharded_outer * size if layout.pipeline > 1 else 0.0
    grad = _FP32_BYTES if layout.scatter_dtype is None else max(size, placed.scattered_itemsize)
    loss = (outer or elements.loss_outer * size) + elements.largest_loss * grad
    largest = (
        elements.largest_outer
        if _exchange_bytes(placed, rows)
        else max(elements.largest_outer, elements.tables)
    )
    rounded = elements.rounded_blocks
    weights = size * (stage - rounded) + rounded
    grads = grad * (stage - elements.data_sharded_experts)
    return loss, outer + (weights + grads) / placed.num_blocks, outer + largest * grad


class StepTime(NamedTuple):
    """Seconds of a step, by cause.

    Attributes:
      compute: inner products, and the memory traffic of the operations between them.
      tensor: sums over tensor, which blocks wait for.
      data: the part of gathers and reductions over data and replica that does not overlap with
        computation.
      pipeline: permutes between stages, and the outer gradients.
      bubble: idle time of the lockstep schedule.
      update: the optimizer, bound by memory bandwidth.
      context: the part of the transfers of keys and values that does not overlap with computation.
      expert: transfers of tokens to their experts and back.
    """

    compute: float
    tensor: float
    data: float
    pipeline: float
    bubble: float
    update: float
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self)


def step_time(
    placed: PlacedModel,
    transfers: tuple[StepTransfer, ...],
    hardware: Hardware,
    *,
    batch_size: int,
    slices: int = 1,
) -> StepTime:
    """Return the time of a step if every part runs at the published peak of its bottleneck.

    No factor is fitted to a run, so real machines are slower.

    - A forward pass takes flops / peak, or the bytes of its weights / bandwidth if that is longer.
      Then the operations between inner products write and read activations, which takes their bytes
      / bandwidth.
    - A backward pass takes twice as long, and with remat also the forward operations that run
      again.
    - The loss writes and reads its logits. The gradients of a micro-batch are written and read in
      fp32; with several micro-batches their sum is, too.
    - Transfers that can hide overlap with computation on chips that support it (`hardware.hides`).
      The longer counts.
    - In a pipeline a tick takes as long as its busiest stage, the loss included. With messages that
      are sent ahead, a stage waits for its neighbours alone.
    """
    layout = placed.layout
    times = {transfer: seconds(transfer, layout, hardware, slices=slices) for transfer in transfers}
    exposed = defaultdict[str, float](float)
    hidden = 0.0
    for transfer, time in times.items():
        if transfer.hidden and transfer.kind in hardware.hides:
            hidden += time
        else:
            exposed[transfer.axis] += time
    tensor = exposed["tensor"]
    pipeline = exposed["pipeline"]
    passes = pass_seconds(placed, transfers, hardware, batch_size=batch_size, slices=slices)
    # state and parameters are read and written, gradients (fp32) read
    update_bytes = (
        2 * (placed.params + placed.opt_state) + _FP32_BYTES * placed.params / placed.itemsize
    )
    # the time of the ends is averaged over the stages; the others idle while the last stage
    # computes them
    compute = layout.micro_batches * passes.compute
    bubble = 0.0
    table = layout.table()
    if table is not None:
        size = len(table.ticks.stage_of)
        share = 1 / layout.chunks
        pass_times = {
            "forward": passes.forward * share,
            "backward": [
                *[passes.backward * share] * (size - 1),
                passes.backward * share + passes.ends,
            ],
            "weight": passes.weight * share,
        }
        sends_ahead = table.ticks.message_ticks > 1
        # messages overlap with the passes: the time that stages wait for them is idle time
        if sends_ahead:
            pipeline -= sum(time for transfer, time in times.items() if _is_message(transfer))
        table_seconds = table.program_time(
            **pass_times, communication=passes.communication if sends_ahead else 0.0
        )
        bubble = max(table_seconds - compute - tensor, 0.0)
    data = exposed["data"] + exposed["replica"] + max(hidden - compute, 0.0)
    update = update_bytes / hardware.memory_bandwidth
    return StepTime(
        compute, tensor, data, pipeline, bubble, update, exposed["context"], exposed["expert"]
    )


class PassSeconds(NamedTuple):
    """Seconds of the passes of a pipeline stage (or of a device without a pipeline) for one
    micro-batch.

    Attributes:
      forward: forward pass of all its blocks.
      backward: gradient of its input, with the forward operations that run again.
      weight: gradient of its weights.
      ends: loss and outer gradients, which the last stage computes in addition.
      communication: one message from a stage to the next.
      compute: all passes without sums over tensor, and the average of the ends over the stages.
    """

    forward: float
    backward: float
    weight: float
    ends: float
    communication: float
    compute: float


def pass_seconds(
    placed: PlacedModel,
    transfers: tuple[StepTransfer, ...],
    hardware: Hardware,
    *,
    batch_size: int,
    slices: int = 1,
) -> PassSeconds:
    """Return the times of passes, with the assumptions of `step_time`."""
    workload = placed.workload
    layout = placed.layout
    rows = batch_size / layout.pieces
    tensor = sum(
        seconds(transfer, layout, hardware, slices=slices)
        for transfer in transfers
        if transfer.axis == "tensor"
    )
    tensor_wait = tensor / layout.micro_batches / 3
    forward = _forward_seconds(placed, hardware, rows)
    logits = 2 * workload.ends_working.on(layout.tensor) * rows / hardware.memory_bandwidth
    grads, outer_grads = _gradient_seconds(placed, hardware)
    ends = 3 * workload.ends_flops * rows / layout.tensor / hardware.flops + logits + outer_grads
    recompute = placed.recompute
    recomputed = (
        0.0 if recompute is None else forward * recompute.flops / max(workload.block_flops, 1.0)
    )
    messages = [transfer._replace(calls=1) for transfer in transfers if _is_message(transfer)]
    return PassSeconds(
        forward=forward + tensor_wait,
        backward=forward + recomputed + tensor_wait,
        weight=forward + grads + tensor_wait,
        ends=ends,
        communication=sum(
            seconds(message, layout, hardware, slices=slices) for message in messages
        ),
        compute=3 * forward + recomputed + grads + ends / layout.pipeline,
    )


def _is_message(transfer: StepTransfer) -> bool:
    return transfer.axis == "pipeline" and transfer.what == "activations"


def _forward_seconds(placed: PlacedModel, hardware: Hardware, rows: float) -> float:
    """Return the seconds of the forward of a stage's blocks on one micro-batch."""
    workload = placed.workload
    tensor = placed.layout.tensor
    flops = placed.num_blocks * workload.block_flops * rows / tensor
    weights = placed.elements.blocks() * workload.itemsize
    # residuals are written once and read once
    activations = 2 * placed.num_blocks * workload.stage_residuals.on(tensor) * rows
    return (
        max(flops / hardware.flops, weights / hardware.memory_bandwidth)
        + activations / hardware.memory_bandwidth
    )


def _gradient_seconds(placed: PlacedModel, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of memory traffic of a micro-batch's gradients: (blocks of a stage, outer
    parameters).

    Gradients are written and read. With several micro-batches their sum is read and written too; if
    the placement shards gradients, only the shards are summed.
    """
    elements = placed.elements
    layout = placed.layout
    pipelined = layout.pipeline > 1
    has_micro_batches = layout.micro_batches > 1
    shards = layout.shards.size if placed.shards.grads else 1
    blocks = elements.blocks() + (elements.blocks(shards) if has_micro_batches else 0)
    outer = elements.outer() + (
        elements.outer(1 if pipelined else shards) if has_micro_batches else 0
    )
    element_seconds = 2 * _FP32_BYTES / hardware.memory_bandwidth
    return element_seconds * blocks, element_seconds * outer


def seconds(
    transfer: StepTransfer, layout: ParallelLayout, hardware: Hardware, *, slices: int = 1
) -> float:
    """Return the seconds of a transfer per step, in rings at full bandwidth.

    Latency is not counted.

    Devices are ordered as in `so.make_mesh`: tensor neighbours are adjacent, pipeline comes next,
    then data, replica is outermost. A group within one pod or node uses its links. A group over
    several pods or nodes first works within each, on k members. Then each member sends its k-th of
    the buffer over the network. `torus_axes` gives the links of a torus.
    """
    sizes = layout.sizes
    domain = max(min(hardware.pod_chips, layout.num_chips // slices), 1)
    axes = list(sizes)
    inner = math.prod(
        sizes[axis] for axis in axes[axes.index(transfer.axis) + 1 :] if axis not in transfer.also
    )
    n = transfer.group_size(sizes)
    members = min(n, max(domain // inner, 1))
    domains = -(-n // members)
    link = hardware.link_bandwidth * torus_axes(members, domain, hardware)
    total = transfer.bytes * transfer.calls
    if transfer.kind == "collective-permute":
        return total / (hardware.network_bandwidth if domains > 1 else link)
    within = transfer.rounds * (members - 1) / members * total / link
    return (
        within
        + transfer.rounds * (domains - 1) / domains * total / members / hardware.network_bandwidth
    )


def torus_axes(size: int, chips: int, hardware: Hardware) -> int:
    """Return how many torus axes a mesh axis of `size` devices uses alone, in a slice of `chips`
    chips; 1 on a switch.

    A mesh axis of n of C chips uses D log n / log C of the D torus axes, rounded down, but at least
    one.
    """
    if hardware.torus_dims == 0 or size == 1 or chips == 1:
        return 1
    return max(1, math.floor(hardware.torus_dims * math.log(size) / math.log(chips) + 1e-9))
