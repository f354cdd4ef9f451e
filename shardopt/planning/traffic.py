"""What a device sends in a step, by axis and purpose: the closed forms of the strategies, without compiling."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from shardopt.planning.candidate import Candidate
from shardopt.planning.placed import Placed
from shardopt.planning.workload import Workload

_WIDE = 4


class Transfer(NamedTuple):
    """Collectives of one kind and purpose.

    Attributes:
      kind: as `so.audit` names it.
      axis: mesh axis.
      what: what travels: "weights", "gradients", "activations", "outer gradients".
      bytes: whole buffers of one call, per device (see `so.planning.Collective`).
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


def traffic(workload: Workload, candidate: Candidate, placed: Placed, *, batch_size: int) -> tuple[Transfer, ...]:
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


def by_axis(found: tuple[Transfer, ...], candidate: Candidate) -> dict[str, float]:
    """Return the wire bytes a device sends in a step, by mesh axis."""
    sizes = candidate.sizes
    axes = [axis for axis in sizes if any(one.axis == axis for one in found)]
    return {axis: math.fsum(one.wire_bytes(sizes) for one in found if one.axis == axis) for axis in axes}


def _over_data(workload: Workload, candidate: Candidate, placed: Placed) -> list[Transfer]:
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


def _over_replica(candidate: Candidate, placed: Placed) -> list[Transfer]:
    elements, switches = placed.elements, placed.switches
    cut = candidate.data if switches.opt_state else 1
    size = (elements.split_blocks + elements.split_outer) / cut + elements.whole_blocks + elements.whole_outer
    return [Transfer("all-reduce", "replica", "gradients", placed.itemsize * size, 1)]


def _over_pipeline(workload: Workload, candidate: Candidate, placed: Placed, batch_size: int) -> list[Transfer]:
    table = candidate.table()
    if table is None:
        return []
    message = workload.message * batch_size / candidate.pieces
    permutes = table.num_ticks * (len(table.forward_shifts) + len(table.backward_shifts))
    return [
        Transfer("collective-permute", "pipeline", "activations", message, permutes),
        Transfer("all-reduce", "pipeline", "outer gradients", _WIDE * _outer(candidate, placed), 1),
    ]


def _outer(candidate: Candidate, placed: Placed) -> float:
    elements = placed.elements
    cut = candidate.data if placed.switches.opt_state else 1
    return elements.split_outer / cut + elements.whole_outer


def _over_tensor(workload: Workload, candidate: Candidate, batch_size: int) -> list[Transfer]:
    message = workload.message * batch_size / candidate.pieces
    blocks = workload.num_blocks // candidate.pipeline * candidate.micro_batches
    forward, backward = workload.tensor_sums
    again = max(forward - 1, 0) if candidate.remat else 0
    sums = forward + backward + again
    ends = 2 * candidate.micro_batches if sums else 0
    return [Transfer("all-reduce", "tensor", "activations", message, sums * blocks + ends)]
