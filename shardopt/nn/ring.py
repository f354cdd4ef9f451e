"""Attention over a ring of devices: keys and values travel, each device keeps its queries."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardopt.core.types import PyTree
from shardopt.mesh import axes_of_role, device_kind_or_default, mesh_under_trace
from shardopt.nn import splash
from shardopt.nn.flash import (
    Marks,
    Rule,
    State,
    absorb,
    delta_of,
    finish,
    gradients,
    heads_first,
    heads_last,
    start,
)

T = TypeVar("T")


class Ring(NamedTuple):
    """Who sends to whom.

    Attributes:
      axes: names of the context axis.
      size: devices on it.
      stride: every so many-th device is of one ring: that many rings run side by side.
      hops: how often keys are sent on, at most size / stride - 1.
      rule: which positions see which.
      splash: whether blocks are taken in by the Pallas kernel: in natural order without a window.
    """

    axes: tuple[str, ...]
    size: int
    stride: int
    hops: int
    rule: Rule
    splash: bool = False


def ring_of(
    axes: tuple[str, ...],
    size: int,
    length: int,
    rule: Rule,
    *,
    natural: bool,
    stride: int = 1,
    splash: bool = False,
) -> Ring:
    """Return the ring, without the hops that nobody needs: with a window of w, keys go ceil((w - 1) / T) devices far.

    Args:
      axes: names of the context axis; none for attention on one device.
      size: devices on it.
      length: T, positions of each device.
      rule: which positions see which.
      natural: whether device i holds positions i T, ..., i T + T - 1.
      stride: see `Ring`.
      splash: likewise.
    """
    hops = size // stride - 1
    if natural and rule.window is not None:
        hops = min(hops, -(-(rule.window - 1) // length))
    return Ring(axes, size, stride, hops, rule, splash)


def ring_attention(
    ring: Ring,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    marks: Marks,
) -> Float[Array, "B T H K"]:
    """Return attention of these queries over the keys of all devices of the ring; also of one device alone.

    Forward, K and V make `hops` hops. Backward they make them again, and dK and dV in float32 (float64) as many: they set out at
    the first neighbour, and what their own device adds is added at home. No key of another device is kept.
    """
    return heads_last(_attend(ring, *heads_first(query, key, value), marks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, query: Array, key: Array, value: Array, marks: Marks) -> Array:
    return _forward(ring, query, key, value, marks)[0]


def _forward(ring: Ring, query: Array, key: Array, value: Array, marks: Marks) -> tuple[Array, tuple]:
    seen = _seen(ring, query.shape[-2])
    own = seen(0, marks)

    def taken_in(state: State, hop: Array | int, block: tuple[Array, Array, Marks]) -> State:
        key, value, marks = block
        if not ring.splash:
            return absorb(state, query, key, value, own, seen(hop, marks), ring.rule)
        causal = ring.rule.causal and isinstance(hop, int)  # the own block
        update = lambda state: splash.absorb(state, query, key, value, own, marks, causal=causal)  # noqa: E731
        return _unless_ahead(ring, hop, update, state)

    state, travelling = start(query), (key, value, marks)
    arriving = send(ring, travelling) if ring.hops else travelling  # beside the product, here and below
    state = taken_in(state, 0, travelling)

    def one(carry: tuple, hop: Array) -> tuple[tuple, None]:
        state, travelling = carry
        arriving = send(ring, travelling)
        return (taken_in(state, hop, travelling), arriving), None

    if ring.hops > 1:
        (state, arriving), _ = lax.scan(one, (state, arriving), jnp.arange(1, ring.hops))
    if ring.hops:
        state = taken_in(state, jnp.int32(ring.hops), arriving)
    out, logsumexp = finish(state, value.dtype)
    return out, (query, key, value, marks, out, logsumexp)


def _backward(ring: Ring, kept: tuple, d_out: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, marks, out, logsumexp = kept
    key, value, d_out = lax.optimization_barrier(
        (key, value, d_out)
    )  # else XLA may keep what the forward pass was sent
    seen = _seen(ring, query.shape[-2])
    own = seen(0, marks)
    delta = delta_of(out, d_out, logsumexp)

    def of_block(hop: Array | int, key: Array, value: Array, marks: Marks) -> list[Array]:
        if not ring.splash:
            return list(gradients(query, key, value, logsumexp, delta, d_out, own, seen(hop, marks), ring.rule))
        causal = ring.rule.causal and isinstance(hop, int)  # the own block
        nothing = [jnp.zeros(x.shape, logsumexp.dtype) for x in (query, key, value)]

        def of_kernel(_: list[Array]) -> list[Array]:
            return splash.gradients(query, key, value, logsumexp, delta, d_out, own, marks, causal=causal)

        return _unless_ahead(ring, hop, of_kernel, nothing)

    travelling = send(ring, (key, value, marks)) if ring.hops else ()
    dq, *at_home = of_block(0, key, value, marks)
    if ring.hops:
        arriving = send(ring, travelling) if ring.hops > 1 else travelling
        more, *sums = of_block(jnp.int32(1), *travelling)
        carry = dq + more, sums, arriving

        def one(carry: tuple, hop: Array, *, last: bool = False) -> tuple[tuple, None]:
            dq, sums, travelling = carry
            sums, arriving = send(ring, (sums, () if last else travelling))  # beside the product
            more, *added = of_block(hop, *travelling)
            return (dq + more, jax.tree.map(jnp.add, sums, added), arriving), None

        if ring.hops > 2:
            carry, _ = lax.scan(one, carry, jnp.arange(2, ring.hops))
        if ring.hops > 1:
            carry, _ = one(carry, jnp.int32(ring.hops), last=True)
        dq, sums, _ = carry
        at_home = jax.tree.map(jnp.add, at_home, send(ring, sums, -ring.hops))
    dk, dv = at_home
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None


_attend.defvjp(_forward, _backward)


def _unless_ahead(ring: Ring, hop: Array | int, update: Callable[[T], T], without: T) -> T:
    """Skip a block that stands after these queries; in natural order it came around the end of the ring."""
    if not ring.rule.causal or isinstance(hop, int):
        return update(without)
    return lax.cond(_place(ring) >= hop, update, lambda without: without, without)


def _place(ring: Ring) -> Array | int:
    """Return which block of positions this device holds."""
    return lax.axis_index(ring.axes) // ring.stride if ring.size > 1 else 0


def _seen(ring: Ring, length: int) -> Callable[[Array | int, Marks], Marks]:
    """Return the function from hop and marks that came with the keys to these marks with positions."""
    outer = _place(ring)
    devices = ring.size // ring.stride

    def seen(hop: Array | int, marks: Marks) -> Marks:
        if marks.positions is not None:
            return marks
        first = (outer - hop) % devices * length
        return marks._replace(positions=(first + jnp.arange(length, dtype=jnp.int32)).astype(jnp.int32)[None])

    return seen


def send(ring: Ring, tree: PyTree, hops: int = 1) -> PyTree:
    """Return what the device so many hops before this one on its ring holds.

    XLA:CPU lets all devices of the mesh meet at a permute, and those of another pipeline stage do not come: there it is a gather
    of the axis.
    """
    shift = hops * ring.stride
    stages = [axis for axis in axes_of_role("pipeline") if mesh_under_trace().shape[axis] > 1]
    if stages and device_kind_or_default() == "cpu":
        sender = (lax.axis_index(ring.axes) - shift) % ring.size
        return jax.tree.map(lambda x: lax.all_gather(x, ring.axes)[sender], tree)
    pairs = [(i, (i + shift) % ring.size) for i in range(ring.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axes, pairs), tree)
