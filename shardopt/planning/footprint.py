"""Bytes on one device at the worst moment of a step, by what they are for."""

from typing import NamedTuple

import jax.numpy as jnp

from shardopt.planning.candidate import Candidate
from shardopt.planning.placed import Placed
from shardopt.planning.workload import Workload

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


def footprint(workload: Workload, candidate: Candidate, placed: Placed, *, batch_size: int) -> Footprint:
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


def _block_again(candidate: Candidate, kept: float, everything: float) -> float:
    """Without a pipeline, what was not kept of one block is made again while it is differentiated; with remat all."""
    if candidate.pipeline > 1:
        return 0.0
    return everything if candidate.remat else everything - kept


def _gradients(candidate: Candidate, placed: Placed) -> float:
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


def _activations(workload: Workload, candidate: Candidate, message: float, kept: float, deferred: float) -> float:
    table = candidate.table()
    if table is None:
        return workload.num_blocks * (message if candidate.remat else kept)
    k = workload.num_blocks // (candidate.pipeline * candidate.chunks)
    messages = table.num_input_slots + table.num_cotangent_slots + 2
    left = table.num_deferred_slots * k * deferred
    if candidate.remat:
        return (table.num_slots + messages) * message + k * kept + left
    return table.num_slots * k * kept + messages * message + left


def _reordered(candidate: Candidate, placed: Placed) -> float:
    """Return the bytes of a stage's blocks in the order in which it runs them, where it stores others."""
    if candidate.chunks == 1:
        return 0.0
    elements, cut = placed.elements, candidate.data if placed.switches.params else 1
    return placed.itemsize * (elements.split_blocks / cut + elements.whole_blocks)


def _gathered(workload: Workload, candidate: Candidate, placed: Placed) -> tuple[float, float, float]:
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
