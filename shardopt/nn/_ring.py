"""Attention over a ring of devices: keys and values travel, and each device keeps its queries."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from shardopt.core import PyTree
from shardopt.kernels import _splash as splash
from shardopt.kernels._flash import (
    Keys,
    Marks,
    MaskRule,
    Queries,
    State,
    absorb,
    empty_state,
    gradients,
)
from shardopt.mesh import axes_of_role, device_kind_or_default, mesh_under_trace
from shardopt.nn._regions import Axes

T = TypeVar("T")


class Ring(NamedTuple):
    """Which devices send keys and values on, in `hops` hops; in the backward pass they make the same
    hops again. A ring of one device is allowed.

    Attributes:
      axes: names of the context axis.
      size: devices on it.
      stride: the distance between neighbours of a ring; as many rings run in parallel.
      hops: how often keys are sent on, at most size / stride - 1.
      rule: which positions see which.
      splash: whether the Pallas kernel absorbs the blocks; it needs natural order without a window.
    """

    axes: Axes
    size: int
    stride: int
    hops: int
    rule: MaskRule
    splash: bool = False

    def absorb(self, query: Array, keys: Keys) -> State:
        """Return the state of these queries after the blocks of all hops."""
        key_marks_at = _key_marks(self, query.shape[-2])
        query_marks = key_marks_at(0, keys.marks)

        def absorb_block(state: State, hop: Array | int, keys: Keys) -> State:
            if not self.splash:
                keys = keys._replace(marks=key_marks_at(hop, keys.marks))
                return absorb(state, query, query_marks, keys, self.rule)
            rule = _rule_of_block(self, hop)

            def update(state):
                return splash.absorb(state, query, query_marks, keys, rule)

            return _unless_ahead(self, hop, update, state)

        # Four devices, natural order; (q, k) is a block of queries and of keys:
        #
        # hop        device 0   device 1   device 2   device 3
        # 0          q0 k0      q1 k1      q2 k2      q3 k3      causal within the block
        # 1          q0 k3 -    q1 k0      q2 k1      q3 k2      - is ahead of the queries: skipped
        # 2          q0 k2 -    q1 k3 -    q2 k0      q3 k1
        # 3          q0 k1 -    q1 k2 -    q2 k3 -    q3 k0      `so.nn.zigzag` evens out the work
        state = empty_state(query)
        # sent while the product runs, also below
        next_blocks = send(self, keys) if self.hops else keys
        state = absorb_block(state, 0, keys)

        def hop_step(carry: tuple, hop: Array) -> tuple[tuple, None]:
            state, blocks = carry
            next_blocks = send(self, blocks)
            return (absorb_block(state, hop, blocks), next_blocks), None

        if self.hops > 1:
            carry = state, next_blocks
            (state, next_blocks), _ = lax.scan(hop_step, carry, jnp.arange(1, self.hops))
        if self.hops:
            # The last block is not sent on, so it is outside of the loop.
            state = absorb_block(state, jnp.int32(self.hops), next_blocks)
        return state

    def gradients(self, queries: Queries, keys: Keys) -> tuple[Array, Array, Array]:
        """Return dQ, and dK and dV, whose sums make as many hops in float32 (float64) as the keys.

        They start at the first neighbour; their own device adds its part at the end.
        """
        key_marks_at = _key_marks(self, queries.query.shape[-2])
        queries = queries._replace(marks=key_marks_at(0, queries.marks))

        def block_gradients(hop: Array | int, keys: Keys) -> list[Array]:
            if not self.splash:
                keys = keys._replace(marks=key_marks_at(hop, keys.marks))
                return list(gradients(queries, keys, self.rule))
            rule = _rule_of_block(self, hop)
            operands = queries.query, keys.key, keys.value
            zeros = [jnp.zeros(x.shape, queries.logsumexp.dtype) for x in operands]

            def kernel_gradients(_):
                return splash.gradients(queries, keys, rule)

            return _unless_ahead(self, hop, kernel_gradients, zeros)

        blocks = send(self, keys) if self.hops else keys
        dq, *own_sums = block_gradients(0, keys)
        if self.hops:
            next_blocks = send(self, blocks) if self.hops > 1 else blocks
            dq_part, *sums = block_gradients(jnp.int32(1), blocks)
            carry = dq + dq_part, sums, next_blocks

            def hop_step(carry: tuple, hop: Array, *, last: bool = False) -> tuple[tuple, None]:
                dq, sums, blocks = carry
                # sent while the product runs
                sums, next_blocks = send(self, (sums, () if last else blocks))
                dq_part, *key_gradients = block_gradients(hop, blocks)
                return (dq + dq_part, jax.tree.map(jnp.add, sums, key_gradients), next_blocks), None

            if self.hops > 2:
                carry, _ = lax.scan(hop_step, carry, jnp.arange(2, self.hops))
            if self.hops > 1:
                carry, _ = hop_step(carry, jnp.int32(self.hops), last=True)
            dq, sums, _ = carry
            # Device i now has the sums of the keys of device i - hops.
            own_sums = jax.tree.map(jnp.add, own_sums, send(self, sums, -self.hops))
        dk, dv = own_sums
        return dq, dk, dv


def ring_of(
    axes: Axes,
    size: int,
    length: int,
    rule: MaskRule,
    *,
    natural: bool,
    stride: int = 1,
    splash: bool = False,
) -> Ring:
    """Return the ring without unneeded hops: with a window of w, keys travel only ceil((w - 1) / T)
    devices far.

    Args:
      axes: names of the context axis; empty for attention on one device.
      size: devices on it.
      length: T, positions of each device.
      rule: which positions see which.
      natural: whether device i holds positions i T, ..., i T + T - 1.
      stride: as in `Ring`.
      splash: as in `Ring`.
    """
    hops = size // stride - 1
    if natural and rule.window is not None:
        hops = min(hops, -(-(rule.window - 1) // length))
    return Ring(axes, size, stride, hops, rule, splash)


def _rule_of_block(ring: Ring, hop: Array | int) -> MaskRule:
    """Return the rule of a block without its position: this device's own block (a hop that is an
    int) alone is causal.
    """
    # A kernel counts positions from 0 in both blocks, which is right for the own block alone. Other
    # blocks are seen whole, or skipped by `_unless_ahead`.
    return ring.rule._replace(causal=ring.rule.causal and isinstance(hop, int))


def _unless_ahead(ring: Ring, hop: Array | int, update: Callable[[T], T], unchanged: T) -> T:
    """Skip a block whose keys are after these queries.

    In natural order such a block has passed the end of the ring.
    """
    if not ring.rule.causal or isinstance(hop, int):
        return update(unchanged)
    return lax.cond(_block_number(ring) >= hop, update, lambda unchanged: unchanged, unchanged)


def _block_number(ring: Ring) -> Array | int:
    """Return the number of the block of positions that this device holds."""
    return lax.axis_index(ring.axes) // ring.stride if ring.size > 1 else 0


def _key_marks(ring: Ring, length: int) -> Callable[[Array | int, Marks], Marks]:
    """Return a function from a hop, and the marks that came with the keys, to these marks with
    positions.
    """
    block = _block_number(ring)
    devices = ring.size // ring.stride

    def marks_at(hop: Array | int, marks: Marks) -> Marks:
        if marks.positions is not None:
            return marks
        # Keys come from the device `hop` places before, so their positions follow and need not be
        # sent.
        first_position = (block - hop) % devices * length
        return marks._replace(
            positions=(first_position + jnp.arange(length, dtype=jnp.int32)).astype(jnp.int32)[None]
        )

    return marks_at


def send(ring: Ring, tree: PyTree, hops: int = 1) -> PyTree:
    """Return the tree of the device that is `hops` before this one on its ring.

    On XLA:CPU all devices of the mesh must meet at a permute, but devices of other pipeline stages
    do not. There it is an all-gather of the axis instead.
    """
    shift = hops * ring.stride
    stages = [axis for axis in axes_of_role("pipeline") if mesh_under_trace().shape[axis] > 1]
    if stages and device_kind_or_default() == "cpu":
        sender = (lax.axis_index(ring.axes) - shift) % ring.size
        return jax.tree.map(lambda x: lax.all_gather(x, ring.axes)[sender], tree)
    pairs = [(i, (i + shift) % ring.size) for i in range(ring.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axes, pairs), tree)
