"""The cost model: what a device sends, holds and computes in a training step, and how long it takes, in closed form."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from shardopt.collectives import SMALL_BUCKET_BYTES
from shardopt.nn.attention import choose_method
from shardopt.nn.embedding import exchange_bytes
from shardopt.pipeline.messages import rounds_to_schedule
from shardopt.planning.hardware import Hardware
from shardopt.planning.layout import Elements, Layout, PlacedModel
from shardopt.planning.workload import Workload

_WIDE = 4
"""Bytes of fp32, in which gradients are summed at least."""


class Transfer(NamedTuple):
    """Collectives of one kind and purpose.

    Attributes:
      kind: as `so.audit` names it.
      axis: mesh axis; where a sum is taken over several at once, the first of them.
      what: what travels: "weights", "gradients", "activations", "blocks", "outer gradients".
      bytes: whole buffers of one call, per device (see `shardopt.audit.Collective`).
      calls: per step.
      hidden: whether it can run while blocks compute, as the gathers and scatters of fsdp can.
      also: the other axes of such a sum.
    """

    kind: str
    axis: str
    what: str
    bytes: float
    calls: float
    hidden: bool = False
    also: tuple[str, ...] = ()

    def wire_bytes(self, sizes: Mapping[str, int]) -> float:
        """Return what a device sends in ring collectives, per step: 2 (n-1)/n of an all-reduce, (n-1)/n of others."""
        n = self.group_size(sizes)
        share = 1.0 if self.kind == "collective-permute" else self.rounds * (n - 1) / n
        return share * self.bytes * self.calls

    def group_size(self, sizes: Mapping[str, int]) -> int:
        """Return how many devices take part in one call."""
        return math.prod(sizes[axis] for axis in (self.axis, *self.also))

    @property
    def rounds(self) -> int:
        """How often a ring collective passes the buffer on: twice in an all-reduce."""
        return 2 if self.kind == "all-reduce" else 1


def traffic(placed: PlacedModel, *, batch_size: int) -> tuple[Transfer, ...]:
    """Return the transfers of a step; those over axes of size 1 are left out.

    For Psi bytes of gradients that tensor and pipeline leave to a device, M micro-batches, and A bytes at the boundary
    between two blocks:

    - ddp: one all-reduce of Psi over data. zero1: a reduce-scatter and an all-gather. zero2: a reduce-scatter per
      micro-batch. fsdp: per micro-batch two all-gathers of the blocks (three in a pipeline with remat), one of the
      outer parameters, and a reduce-scatter; in a pipeline outer parameters once per step, and blocks too without regather. Leaves replicated over data
      are all-reduced once. Then one all-reduce over replica, of shards where there are shards. Gathers are in
      `gather_dtype`, reduce-scatters in `scatter_dtype`, all else as the parameters are. Tables that `so.nn.embedding`
      reads under fsdp are not gathered where it sends fewer bytes to exchange their rows.
    - pipeline: two permutes of A per tick, and an all-reduce of the outer gradients, under ddp over data and pipeline
      at once. With several chunks a stage, permutes that bring blocks to where they run, and their gradients back.
    - context: what data sends goes over data and context together. And keys and values, as `so.nn.attention` says of the
      method that it chooses, forwards (with remat twice) and backwards.
    - expert: data sends what is no expert's over data and expert together, and what is over data alone. And each token's K
      copies go to their experts and back, forwards (with remat once more) and backwards: all-to-alls, taken to be balanced.
    - tensor: the all-reduces of A that the workload names, forward and backward; with remat, again those which the
      backward pass needs: all but the last of each block. And one after the embedding, one before the head's gradient
      leaves it.
    """
    boundary = placed.workload.boundary_bytes * batch_size / placed.layout.pieces
    found = [
        *_over_data(placed),
        *_of_tables(placed, batch_size / placed.layout.pieces),
        _over_replica(placed),
        *_over_pipeline(placed, boundary),
        *_over_context(placed, batch_size / placed.layout.pieces),
        *_over_expert(placed, batch_size / placed.layout.pieces),
        _over_tensor(placed, boundary),
    ]
    sizes = placed.layout.sizes
    return tuple(one for one in found if one.group_size(sizes) > 1 and one.bytes > 0 and one.calls > 0)


def by_axis(found: tuple[Transfer, ...], sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the wire bytes a device sends in a step, by mesh axis."""
    axes = [axis for axis in sizes if any(one.axis == axis for one in found)]
    return {axis: math.fsum(one.wire_bytes(sizes) for one in found if one.axis == axis) for axis in axes}


def _over_data(placed: PlacedModel) -> list[Transfer]:
    experts, none = placed.elements.experts, dict.fromkeys(Elements._fields, 0)
    others = placed._replace(elements=placed.elements._replace(experts=0))
    alone = placed._replace(elements=Elements(**none)._replace(sharded_blocks=experts, expert=1))
    names = tuple(axis for axis in placed.layout.shards.names[1:] if axis != "expert")
    return _sums(others, placed.layout.shards.names[1:]) + (_sums(alone, names) if experts else [])


def _sums(placed: PlacedModel, over: tuple[str, ...]) -> list[Transfer]:
    """Return the gathers and sums over data and the axes `over`."""
    elements, layout, size = placed.elements, placed.layout, placed.itemsize
    replicated = elements.replicated_blocks + elements.replicated_outer
    sharded = elements.sharded_blocks + elements.sharded_outer
    if not placed.shards.opt_state and layout.pipeline > 1:
        return [
            Transfer("all-reduce", "data", "gradients", size * elements.blocks(), 1, also=over),
            Transfer("all-reduce", "data", "outer gradients", _WIDE * elements.outer(), 1, also=(*over, "pipeline")),
        ]
    if not placed.shards.opt_state:
        return [Transfer("all-reduce", "data", "gradients", size * (replicated + sharded), 1, also=over)]
    rest = Transfer("all-reduce", "data", "gradients", size * replicated, 1, also=over)
    m, pipelined, scattered = layout.micro_batches, layout.pipeline > 1, placed.scattered_itemsize
    once = 1 if pipelined else m
    if not placed.shards.params:
        return [
            rest,
            Transfer(
                "reduce-scatter",
                "data",
                "gradients",
                scattered * sharded,
                once if placed.shards.grads else 1,
                also=over,
            ),
            Transfer("all-gather", "data", "weights", size * sharded, 1, also=over),
        ]
    # a pass gathers each block of a micro-batch, or the step all blocks of the stage before its ticks
    blocks, again = placed.num_blocks, layout.regather
    passes = 3 if pipelined and layout.remat else 2
    each, calls = (elements.sharded_blocks / blocks, blocks * m) if again else (elements.sharded_blocks, 1)
    gathered, outer = placed.gathered_itemsize, elements.sharded_outer - elements.tables
    return [
        rest,
        Transfer(
            "all-gather", "data", "weights", gathered * each, passes * calls if again else 1, hidden=again, also=over
        ),
        Transfer("reduce-scatter", "data", "gradients", scattered * each, calls, hidden=again, also=over),
        Transfer("all-gather", "data", "outer weights", gathered * outer, once, also=over),
        Transfer("reduce-scatter", "data", "outer gradients", scattered * outer, once, also=over),
    ]


def _of_tables(placed: PlacedModel, rows: float) -> list[Transfer]:
    """Return what looking rows up in tables sends that are sharded by columns, as `so.nn.embedding` chooses."""
    elements, size, m = placed.elements.tables, placed.workload.itemsize, placed.layout.micro_batches
    over = placed.layout.shards.names[1:]
    if (exchange := _exchange(placed, rows)) is not None:
        ids, moved = exchange
        return [
            Transfer("all-gather", "data", "ids", ids, m, also=over),
            Transfer("all-to-all", "data", "embedding rows", moved, m, also=over),
        ]
    return [
        Transfer("all-gather", "data", "outer weights", size * elements, m, also=over),
        Transfer("reduce-scatter", "data", "outer gradients", placed.scattered_itemsize * elements, m, also=over),
    ]


def _exchange(placed: PlacedModel, rows: float) -> tuple[float, float] | None:
    """Return the bytes of ids and of rows in the exchange for one micro-batch; None where a table is gathered, or is none."""
    workload, elements = placed.workload, placed.elements.tables
    if not elements:
        return None
    ids = workload.table_ids * rows
    width = workload.table_numbers / workload.table_ids
    found = exchange_bytes(ids, width, devices=placed.layout.shards.size, itemsize=workload.itemsize)
    return found if sum(found) < elements * (workload.itemsize + placed.scattered_itemsize) else None


def _over_replica(placed: PlacedModel) -> Transfer:
    size = placed.itemsize * placed.elements.total(_shards(placed))
    return Transfer("all-reduce", "replica", "gradients", size, 1)


def _over_pipeline(placed: PlacedModel, boundary: float) -> list[Transfer]:
    table = placed.layout.table()
    if table is None:
        return []
    permutes = table.num_ticks * sum(shift > 0 for shift in (*table.forward_shifts, *table.backward_shifts))
    shards, elements, data = placed.shards, placed.elements, placed.layout.shards.size
    # blocks that a stage stores and another runs, and their gradients on the way back
    chunk = placed.itemsize / placed.layout.chunks
    there, back = elements.blocks(data if shards.params else 1), elements.blocks(data if shards.grads else 1)
    found = [
        Transfer("collective-permute", "pipeline", "activations", boundary, permutes),
        Transfer("collective-permute", "pipeline", "blocks", chunk * (there + back), rounds_to_schedule(table)),
    ]
    if shards.opt_state:  # else they are summed over data and pipeline at once
        found.append(Transfer("all-reduce", "pipeline", "outer gradients", _WIDE * elements.outer(data), 1))
    return found


def _over_context(placed: PlacedModel, rows: float) -> list[Transfer]:
    """Return what attention sends to see the positions of other devices, by the method that `so.nn.attention` chooses."""
    layout, found, C = placed.layout, placed.workload.attention, placed.layout.context
    if found is None or C == 1:
        return []
    keys, queries = 2 * found.keys * rows / layout.tensor, 2 * found.queries * rows / layout.tensor
    sums, calls = keys * _WIDE / placed.workload.itemsize, placed.num_blocks * layout.micro_batches
    kept = isinstance(layout.remat, str) and "attention" in _saved(layout.remat)
    forwards = 1 if layout.remat is False or kept else 2
    each = found.kv_heads / layout.tensor
    heads = {"heads": each * queries / keys, "kv_heads": each, "itemsize": placed.workload.itemsize}
    kind = choose_method(placed.workload.tokens, C, C - 1, **heads)
    if kind == "all_to_all":
        return [Transfer("all-to-all", "context", "heads", keys + queries, (forwards + 1) * calls)]
    if kind == "all_gather":
        return [
            Transfer("all-gather", "context", "keys and values", C * keys, (forwards + 1) * calls),
            Transfer("reduce-scatter", "context", "gradients of keys and values", C * sums, calls),
        ]
    hops = (C - 1) * calls
    return [
        Transfer("collective-permute", "context", "keys and values", keys, (forwards + 1) * hops, hidden=True),
        Transfer("collective-permute", "context", "gradients of keys and values", sums, hops, hidden=True),
    ]


def _over_expert(placed: PlacedModel, rows: float) -> list[Transfer]:
    """Return what tokens send to their experts and back, the same number from each device to each other."""
    found, layout = placed.workload.experts, placed.layout
    if found is None or layout.expert == 1:
        return []
    kept = isinstance(layout.remat, str) and "dispatched" in _saved(layout.remat)
    forwards = 2 if layout.remat is False or kept else 3  # there and back; what comes back is not needed again
    calls = placed.num_blocks * layout.micro_batches
    return [Transfer("all-to-all", "expert", "tokens", found.top_k * found.tokens * rows, (forwards + 2) * calls)]


def _over_tensor(placed: PlacedModel, boundary: float) -> Transfer:
    again = placed.recompute
    sums = sum(placed.workload.tensor_sums) + (0 if again is None else again.tensor_sums)
    m = placed.layout.micro_batches
    return Transfer(
        "all-reduce", "tensor", "activations", boundary, sums * placed.num_blocks * m + (2 * m if sums else 0)
    )


def _shards(placed: PlacedModel) -> int:
    """Return into how many parts gradients are scattered before they are summed over other axes."""
    return placed.layout.shards.size if placed.shards.opt_state else 1


class Footprint(NamedTuple):
    """Bytes on one device at the worst moment of a step, by what they are for.

    Attributes:
      params: parameters that it holds; on a TPU with what tiles add.
      opt_state: optimizer state that it holds, likewise.
      gradients: sums of gradients, and those of the micro-batch under way where these exist beside the sums.
      activations: what is kept from forwards to backwards, of all micro-batches under way.
      gathered: weights that are gathered while one block, or the loss, is differentiated, and their gradients before
        they are scattered; with several chunks a stage, its blocks in the order in which they run.
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


def footprint(placed: PlacedModel, *, batch_size: int, more_slots: int = 0) -> Footprint:
    """Return the bytes on a device; in a pipeline with so many more slots than the schedule has.

    With k blocks on a stage, r rows in a micro-batch, and activations sharded over tensor as the workload says:

    - gradients: one sum of what the placement shards; with micro-batches and no pipeline, those of one more
      micro-batch, which the backward pass makes before they are added. In a pipeline two sums, as each tick makes new
      ones of the old; outer gradients are replicated there.
    - activations: k r residuals, or with remat k r boundaries (and values that are saved by name) and the residuals of
      one block. Under fsdp elementwise results are kept of one block at a time. In a pipeline the residuals of `schedule.num_slots` chunks, and the
      boundaries that wait; with remat only the inputs of chunks, and the residuals of one chunk.
    - gathered (fsdp): at the loss the weights that it reads and the largest gradient of them, at a block its weights and
      gradients, at embed the gradient of the largest outer leaf.
    """
    workload, layout = placed.workload, placed.layout
    rows, tensor = batch_size / layout.pieces, layout.tensor
    everything = workload.residuals.on(tensor) * rows
    residuals = workload.stage_residuals.on(tensor) * rows if placed.keeps_products else everything
    recompute, boundary = placed.recompute, workload.boundary_bytes * rows
    saved = 0.0 if recompute is None else recompute.kept.on(tensor) * rows
    # without a pipeline, what was not kept of one block is made again while it is differentiated; with remat all
    again = 0.0 if layout.pipeline > 1 else everything - (residuals if recompute is None else saved)
    loss, block, embedding = _gathered(placed, rows)
    summed = 2 * boundary if tensor > 1 else 0.0  # a sum over tensor reads one and writes another
    moments = [
        (embedding, 0.0),
        (block, workload.working.on(tensor) * rows + again + summed),
        (loss, workload.ends_working.on(tensor) * rows),
    ]
    gathered, working = max(moments, key=sum)
    deferred = workload.deferred.on(tensor) * rows
    return Footprint(
        params=placed.params,
        opt_state=placed.opt_state,
        gradients=_gradients(placed),
        activations=_activations(
            placed, boundary, boundary + saved if layout.remat else residuals, residuals, deferred, more_slots
        ),
        gathered=gathered + _reordered(placed),
        working=working,
    )


def _gradients(placed: PlacedModel) -> float:
    elements, shards, data = placed.elements, placed.shards, placed.layout.shards.size
    scattered = elements.total(data)
    if placed.layout.pipeline > 1:
        blocks = elements.blocks(data if shards.grads and placed.layout.regather else 1)
        # the branch of a tick makes its new sums beside the old ones
        return _WIDE * (2 * (blocks + elements.outer()) + (scattered if shards.opt_state else 0))
    several = placed.layout.micro_batches > 1
    if shards.grads and not shards.params:
        return _WIDE * (elements.total() + (scattered if several else 0))
    return _WIDE * (scattered if shards.params else elements.total()) * (2 if several else 1)


def _activations(
    placed: PlacedModel, boundary: float, kept: float, residuals: float, deferred: float, more_slots: int
) -> float:
    layout, table = placed.layout, placed.layout.table()
    if table is None:
        return placed.num_blocks * kept
    k = placed.workload.num_blocks // (layout.pipeline * layout.chunks)
    waiting = table.num_input_slots + table.num_cotangent_slots + 2 * table.ticks.message_ticks
    split = table.ticks.weight is not None
    left, slots = (table.num_deferred_slots + more_slots * split) * k * deferred, table.num_slots + more_slots
    if layout.remat:
        return (slots + waiting) * boundary + k * residuals + left
    return slots * k * residuals + waiting * boundary + left


def _reordered(placed: PlacedModel) -> float:
    """Return the bytes of a stage's blocks in the order in which it runs them, where it stores others."""
    if placed.layout.chunks == 1:
        return 0.0
    return placed.itemsize * placed.elements.blocks(placed.layout.shards.size if placed.shards.params else 1)


def _gathered(placed: PlacedModel, rows: float) -> tuple[float, float, float]:
    """Return the bytes of gathered weights and their gradients, while the loss, one block, and embed are differentiated.

    Those that the loss reads stay gathered until it is differentiated; embed needs none again. Gradients are scattered
    leaf by leaf, those of a block together but for experts, each of which takes the place of its weight: a bucket that travels
    joined stands beside its leaves, both ways. A pipeline has the outer weights gathered throughout.
    """
    if not placed.shards.params or placed.layout.shards.size == 1:
        return 0.0, 0.0, 0.0
    elements, layout, size = placed.elements, placed.layout, placed.gathered_itemsize
    every = elements.sharded_blocks + elements.experts
    block = every * layout.pipeline / placed.workload.num_blocks
    outer = elements.sharded_outer * size if layout.pipeline > 1 else 0.0
    grad = _WIDE if layout.scatter_dtype is None else max(size, placed.scattered_itemsize)
    loss = (outer or elements.loss_outer * size) + elements.largest_loss * grad
    largest = elements.largest_outer if _exchange(placed, rows) else max(elements.largest_outer, elements.tables)
    joined = sum(min(block * each, SMALL_BUCKET_BYTES) for each in (size, grad))
    if not layout.regather:  # the stage has its blocks gathered throughout
        return loss + every * size, outer + every * size, outer + every * size + largest * grad
    alone = elements.at_experts * layout.pipeline / placed.workload.num_blocks
    return loss, outer + block * size + (block - alone) * grad + joined, outer + largest * grad


def step_flops(workload: Workload, layout: Layout, *, batch_size: int, hardware: Hardware | None = None) -> float:
    """Return the flops of inner products of one device in a step, on average over the stages of a pipeline.

    With `hardware` of TPUs those of attention are what its kernels compute (`splash_flops`): whole tiles of the causal mask,
    and the scores again in the backward one; and what rotary positions add. Over context they are as without.
    """
    again = workload.recompute(layout.remat)
    block = 3 * workload.block_flops + (0 if again is None else again.flops)
    found = workload.attention
    if found is not None and hardware is not None and hardware.torus_dims and layout.context == 1:
        forward, backward = found.kernel_flops
        kept = again is None or (isinstance(layout.remat, str) and "attention" in _saved(layout.remat))
        passes = 1 if kept else 2
        block += passes * forward + backward - (passes + 2) * found.flops
    row = workload.num_blocks * block + 3 * workload.ends_flops
    return batch_size * row / layout.num_chips


def _saved(remat: str) -> list[str]:
    return remat.removeprefix("save:").split(",")


class StepTime(NamedTuple):
    """Seconds of a step, by what the device does or waits for.

    Attributes:
      compute: inner products, and the memory traffic of what is between them.
      tensor: sums over tensor, which blocks wait for.
      data: gathers and reductions over data and replica beyond what hides behind computation.
      pipeline: permutes between stages, and the outer gradients.
      bubble: idle time of the lockstep schedule.
      update: the optimizer, bound by memory bandwidth.
      context: keys and values, beyond what hides behind computation.
      expert: tokens on the way to their experts and back.
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
    placed: PlacedModel, transfers: tuple[Transfer, ...], hardware: Hardware, *, batch_size: int, slices: int = 1
) -> StepTime:
    """Return the time of a step if every part ran at the published peak of what bounds it.

    It is made of first principles: no factor is fitted to a run, so machines are slower. A forward takes flops / peak, or
    the bytes of its weights / bandwidth if that is more; then what stands between inner products writes and reads
    activations, which takes their bytes / bandwidth. A backward is twice that, and with remat what the forward has to
    run again. The loss writes and reads its logits. Gradients of a micro-batch are written and read in fp32, and where there
    are several so is their sum. Transfers that can hide, on chips that move such beside the products, run beside the
    computation, and what is longer counts. In a pipeline a tick takes as long as its busiest stage, the loss included; of
    schedules whose messages are sent ahead, stages wait for their neighbours alone.
    """
    layout = placed.layout
    times = {one: seconds(one, layout, hardware, slices=slices) for one in transfers}
    beside = {one for one in transfers if one.hidden and one.kind in hardware.hides}
    hidden = sum(times[one] for one in beside)
    exposed = sum(time for one, time in times.items() if one not in beside and one.axis in ("data", "replica"))
    tensor = sum(time for one, time in times.items() if one.axis == "tensor")
    pipeline = sum(time for one, time in times.items() if one.axis == "pipeline")
    context = sum(time for one, time in times.items() if one not in beside and one.axis == "context")
    expert = sum(time for one, time in times.items() if one.axis == "expert")
    passes = pass_seconds(placed, transfers, hardware, batch_size=batch_size, slices=slices)
    # state and parameters are read and written, gradients (fp32) read
    moved = 2 * (placed.params + placed.opt_state) + _WIDE * placed.params / placed.itemsize
    # of the ends each stage does its share, and idles while the last one does the rest
    compute, bubble = layout.micro_batches * passes.compute, 0.0
    if (table := layout.table()) is not None:
        size, share = len(table.ticks.stage_of), 1 / layout.chunks
        numbers = {
            "forward": passes.forward * share,
            "backward": [*[passes.backward * share] * (size - 1), passes.backward * share + passes.ends],
            "weight": passes.weight * share,
        }
        ahead = table.ticks.message_ticks > 1
        if ahead:  # messages are on their way beside the passes: what they are waited for is idle time
            pipeline -= sum(time for one, time in times.items() if _is_message(one))
        spent = table.program_time(**numbers, communication=passes.communication if ahead else 0.0)
        bubble = max(spent - compute - tensor, 0.0)
    data, update = exposed + max(hidden - compute, 0.0), moved / hardware.memory_bandwidth
    return StepTime(compute, tensor, data, pipeline, bubble, update, context, expert)


class PassSeconds(NamedTuple):
    """Seconds of what a stage of a pipeline (or a device without one) does for a micro-batch.

    Attributes:
      forward: of all its blocks.
      backward: the gradient of its input, with what the forward has to run again.
      weight: the gradient of its weights.
      ends: of the loss and the outer gradients, which the last stage has besides.
      communication: a message from one stage to the next.
      compute: all of it without sums over tensor, the ends shared out over the stages.
    """

    forward: float
    backward: float
    weight: float
    ends: float
    communication: float
    compute: float


def pass_seconds(
    placed: PlacedModel, transfers: tuple[Transfer, ...], hardware: Hardware, *, batch_size: int, slices: int = 1
) -> PassSeconds:
    """Return the times that `so.schedules.search` wants, as `step_time` predicts them."""
    workload, layout = placed.workload, placed.layout
    rows = batch_size / layout.pieces
    tensor = sum(seconds(one, layout, hardware, slices=slices) for one in transfers if one.axis == "tensor")
    waiting = tensor / layout.micro_batches / 3
    forward = _forward(placed, hardware, rows)
    logits = 2 * workload.ends_working.on(layout.tensor) * rows / hardware.memory_bandwidth
    grads, outer_grads = _gradient_seconds(placed, hardware)
    ends = 3 * workload.ends_flops * rows / layout.tensor / hardware.flops + logits + outer_grads
    recompute = placed.recompute
    again = 0.0 if recompute is None else forward * recompute.flops / max(workload.block_flops, 1.0)
    message = [one._replace(calls=1) for one in transfers if _is_message(one)]
    return PassSeconds(
        forward=forward + waiting,
        backward=forward + again + waiting,
        weight=forward + grads + waiting,
        ends=ends,
        communication=sum(seconds(one, layout, hardware, slices=slices) for one in message),
        compute=3 * forward + again + grads + ends / layout.pipeline,
    )


def _is_message(transfer: Transfer) -> bool:
    return transfer.axis == "pipeline" and transfer.what == "activations"


def _forward(placed: PlacedModel, hardware: Hardware, rows: float) -> float:
    """Return the seconds of the forward of a stage's blocks on one micro-batch."""
    workload, tensor = placed.workload, placed.layout.tensor
    flops = placed.num_blocks * workload.block_flops * rows / tensor
    weights = placed.elements.blocks() * workload.itemsize
    # what is kept is written once and read once
    kept = workload.stage_residuals if placed.keeps_products else workload.residuals
    activations = 2 * placed.num_blocks * kept.on(tensor) * rows
    return max(flops / hardware.flops, weights / hardware.memory_bandwidth) + activations / hardware.memory_bandwidth


def _gradient_seconds(placed: PlacedModel, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds in which a micro-batch's gradients, of a stage's blocks and of the outer parameters, come and go.

    They are written and read; where several are summed, the sum is read and written too, of shards where these are summed.
    """
    elements, layout = placed.elements, placed.layout
    pipelined = layout.pipeline > 1
    several = layout.micro_batches > 1
    shards = layout.shards.size if placed.shards.grads else 1
    blocks = elements.blocks() + (elements.blocks(shards) if several else 0)
    outer = elements.outer() + (elements.outer(1 if pipelined else shards) if several else 0)
    each = 2 * _WIDE / hardware.memory_bandwidth
    return each * blocks, each * outer


def seconds(transfer: Transfer, layout: Layout, hardware: Hardware, *, slices: int = 1) -> float:
    """Return the time of a transfer, per step, in rings at full bandwidth; the time to start one is not counted.

    Devices are laid out as `so.make_mesh` does it: tensor neighbours adjacent, pipeline next, data outside it, replica
    outermost. A group within one pod or node uses its links; a group spread over several first works within each, on
    k members, then across them, each member its k-th of the buffer over the network. On a torus a mesh axis of n of C
    chips has D log n / log C of the D torus axes to itself, of which whole ones count, at least one.
    """
    sizes = layout.sizes
    domain = max(min(hardware.pod_chips, layout.num_chips // slices), 1)
    axes = list(sizes)
    inner = math.prod(sizes[axis] for axis in axes[axes.index(transfer.axis) + 1 :] if axis not in transfer.also)
    n = transfer.group_size(sizes)
    near = min(n, max(domain // inner, 1))
    far = -(-n // near)
    link = hardware.link_bandwidth * torus_axes(near, domain, hardware)
    total = transfer.bytes * transfer.calls
    if transfer.kind == "collective-permute":
        return total / (hardware.network_bandwidth if far > 1 else link)
    within = transfer.rounds * (near - 1) / near * total / link
    return within + transfer.rounds * (far - 1) / far * total / near / hardware.network_bandwidth


def torus_axes(size: int, chips: int, hardware: Hardware) -> int:
    """Return how many torus axes a mesh axis of a slice of `chips` chips has to itself; 1 on a switch."""
    if hardware.torus_dims == 0 or size == 1 or chips == 1:
        return 1
    return max(1, math.floor(hardware.torus_dims * math.log(size) / math.log(chips) + 1e-9))
