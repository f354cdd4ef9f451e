"""All-gather of sharded leaves and reduce-scatter of their gradients.

Each is the transpose of the other.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters.ad import Zero
from jax.typing import DTypeLike

from shardopt.collectives._buckets import (
    SMALL_BUCKET_BYTES,
    MeshAxes,
    all_gather_buckets,
    reduce_scatter_buckets,
    shards_of,
)
from shardopt.collectives._per_device import shard_by_shard
from shardopt.collectives._tiles import (
    gather_joined,
    in_gathered_layout,
    is_tpu,
    joined_to_tiles,
    joins_small_matrices,
)
from shardopt.collectives._wire import Encoded, LeafWire
from shardopt.core import Arrays, PyTree, cast, is_floating, is_inexact, is_key, replaced
from shardopt.core._checksum import checksum_of, to_limbs
from shardopt.mesh import device_kind, device_kind_or_default


def all_gather(
    leaves: Sequence[jax.Array],
    wires: Sequence[LeafWire],
    *,
    bucket_bytes: int = SMALL_BUCKET_BYTES,
    cast_in_place: bool = False,
    probe: jax.Array | None = None,
) -> list[Any]:
    """All-gather local shards along mesh axes; the backward pass reduce-scatters their gradients.

    Args:
      leaves: local shards.
      wires: how each leaf travels. Gradients are cast back before they are summed, so sums have the
        precision of the stored leaf, unless `scatter_dtype` says otherwise.
      bucket_bytes: the gathered bytes of leaves that may share a collective, if that is faster.
        Leaves of one bucket are gathered at the same time, and so are their gradients.
      cast_in_place: whether a TPU casts float32 to bfloat16 exactly here, and not earlier in the
        program.
      probe: float32[8] without a meaning, whose gradient is the sum of the local gradients' bits,
        see `core._checksum`.

    Returns:
      The gathered leaves; a leaf with a form as the form decodes it. The gradient of a sharded leaf
      is summed over its axes; the gradient of a replicated leaf stays local.
    """
    # forward   shard -> gather_dtype -> encode -> all-gather -> decode -> leaf
    # backward  local gradient -> stored dtype -> scatter_dtype -> reduce-scatter -> its shard
    stored = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    # Frozen and integer leaves: their zeros would be reduce-scattered like any other gradient.
    differentiable = [i for i, wire in enumerate(wires) if wire.trained and is_inexact(stored[i])]

    def forward(xs, probe):
        del probe
        pairs = zip(xs, wires, strict=True)
        sent = [_cast_to_send(x, wire, in_place=cast_in_place) for x, wire in pairs]
        return _gather(sent, wires, bucket_bytes)

    # A derived backward pass would reduce the gradients in the dtype of the gather, so it is
    # written out.
    def backward(_, cotangents):
        local_grads = [
            cast(_local_gradient(cotangents[i], wires[i]), stored[i].dtype) for i in differentiable
        ]
        gradient_wires = [wires[i].of_gradient for i in differentiable]
        sums = reduce_scatter(local_grads, gradient_wires, bucket_bytes=bucket_bytes)
        # of the gradients before they are summed: afterwards all devices of the axis share one
        # result
        limbs = None if probe is None else to_limbs(checksum_of(local_grads))
        # None is a zero cotangent
        return replaced([None] * len(stored), differentiable, sums), limbs

    run = jax.custom_vjp(forward)
    # no residuals: a gather is linear, and the gradient of a form reads the cotangent alone
    run.defvjp(lambda xs, probe: (forward(xs, probe), None), backward)
    gathered = run(list(leaves), probe)
    # All results of `jax.custom_vjp` have tangents, which callbacks refuse; frozen leaves have none.
    return [
        leaf if wire.trained else jax.lax.stop_gradient(leaf)
        for leaf, wire in zip(gathered, wires, strict=True)
    ]


def gathered_twice(
    gather: Callable[[PyTree], PyTree], run: Callable[[PyTree, PyTree], PyTree]
) -> Callable[[PyTree, PyTree], PyTree]:
    """Return `(shards, inputs) -> run(gather(shards), inputs)`, whose backward pass gathers again.

    It keeps each value that it reads, but the results of `gather`, a tree like `shards`.
    """

    # `jax.checkpoint` with a policy does the same, but traces `run` several times.
    def forward(shards: PyTree, inputs: PyTree) -> tuple[PyTree, jax.tree_util.Partial]:
        arguments = jax.tree.leaves((shards, inputs))
        perturbed = [i for i, argument in enumerate(arguments) if argument.perturbed]
        shards, inputs = jax.tree.map(lambda argument: argument.value, (shards, inputs))
        gathered = gather(shards)
        leaves, treedef = jax.tree.flatten((gathered, inputs))

        def of_perturbed(chosen: Arrays) -> PyTree:
            return run(*treedef.unflatten(replaced(leaves, perturbed, chosen)))

        results, pull_back = jax.vjp(of_perturbed, [leaves[i] for i in perturbed])
        residuals, structure = jax.tree.flatten(pull_back)
        indices = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(gathered))}
        # the index of a gathered leaf, or None for a value that is kept
        sources = [indices.get(id(x)) for x in residuals]
        kept = [x if i is None else None for x, i in zip(residuals, sources, strict=True)]

        def backward(
            shards: PyTree, kept: Sequence[jax.Array | None], cotangents: PyTree
        ) -> PyTree:
            # Otherwise the compiler sees that both passes gather the same weights, and keeps them.
            shards, kept = behind_barrier((shards, kept))

            def gather_perturbed(shards: PyTree) -> tuple[Arrays, Arrays]:
                leaves = jax.tree.leaves(gather(shards))
                return [leaves[i] for i in perturbed if i < len(leaves)], leaves

            chosen, scatter, leaves = jax.vjp(gather_perturbed, shards, has_aux=True)
            residuals = [x if i is None else leaves[i] for x, i in zip(kept, sources, strict=True)]
            (grads,) = structure.unflatten(residuals)(jax.tree.map(_zero, cotangents))
            nothing = [None] * treedef.num_leaves
            _, of_inputs = treedef.unflatten(replaced(nothing, perturbed, grads))
            return *scatter(grads[: len(chosen)]), of_inputs

        return results, jax.tree_util.Partial(backward, shards, kept)

    differentiable = jax.custom_vjp(lambda shards, inputs: run(gather(shards), inputs))
    differentiable.defvjp(
        forward, lambda backward, cotangents: backward(cotangents), symbolic_zeros=True
    )
    return differentiable


def _zero(cotangent: jax.Array | SymbolicZero) -> jax.Array | Zero:
    """Return a cotangent in the form that `jax.vjp` takes."""
    # A zero that is an array would be multiplied by derivatives of metrics, which may be infinite.
    return Zero(cotangent.aval) if isinstance(cotangent, SymbolicZero) else cotangent


def behind_barrier(tree: PyTree) -> PyTree:
    """Return the tree behind one barrier, so that no computation on one part of it moves ahead of
    the other parts.
    """
    leaves, treedef = jax.tree.flatten(tree)
    barrier_indices = [i for i, leaf in enumerate(leaves) if not is_key(leaf)]
    behind = jax.lax.optimization_barrier([leaves[i] for i in barrier_indices])
    return treedef.unflatten(replaced(leaves, barrier_indices, behind))


def _cast_to_send(x: jax.Array, wire: LeafWire, *, in_place: bool) -> jax.Array:
    """Return a shard in the dtype of its gather."""
    if wire.gather_dtype is None or x.dtype == wire.gather_dtype:
        return x
    return _cast_in_place(x, wire.gather_dtype) if in_place else x.astype(wire.gather_dtype)


def _gather(shards: Sequence[jax.Array], wires: Sequence[LeafWire], bucket_bytes: int) -> list[Any]:
    """Return the gathered leaves, decoded. The arrays of all leaves travel together."""
    # A form may write one leaf as several arrays (codes and scales) or as none (a table that
    # stays). They are flattened, gathered with all others, and given back to their leaves.
    encoded = [_encode(shard, wire) for shard, wire in zip(shards, wires, strict=True)]
    arrays, treedef = jax.tree.flatten([leaf.arrays for leaf in encoded])
    array_wires = [wire for wire, leaf in zip(wires, encoded, strict=True) for _ in leaf.arrays]

    def move(xs: Arrays, dims: list[int], axes: MeshAxes) -> Arrays:
        if joins_small_matrices(axes):
            return gather_joined(xs, dims, axes, _all_gather)
        return all_gather_buckets(xs, dims, axes, _all_gather, bucket_bytes=bucket_bytes)

    gathered = treedef.unflatten(_apply_where_sharded(move, arrays, array_wires))
    return [leaf.decode(group) for leaf, group in zip(encoded, gathered, strict=True)]


def _encode(shard: jax.Array, wire: LeafWire) -> Encoded:
    """Return a shard as it is gathered: in the form of its wire, or as its own numbers."""
    if wire.form is None:
        return Encoded([shard], lambda arrays: arrays[0])
    return wire.form.encode(shard, wire.axes)


def _local_gradient(cotangent: Any, wire: LeafWire) -> jax.Array:
    """Return the gradient of a leaf from the gradient of the decoded leaf."""
    return cotangent if wire.form is None else wire.form.gradient(cotangent)


def reduce_scatter(
    leaves: Sequence[jax.Array],
    wires: Sequence[LeafWire],
    *,
    bucket_bytes: int = SMALL_BUCKET_BYTES,
) -> Arrays:
    """Sum local gradients over mesh axes, where each device keeps its shard.

    Leaves with dim None stay local.

    Args:
      leaves: local gradients.
      wires: how each leaf travels. Sums are returned in the dtype of the leaf.
      bucket_bytes: see `all_gather`.
    """
    sent = [wire.scattered(x) for x, wire in zip(leaves, wires, strict=True)]
    as_bits = [wire.sends_bits(x) for x, wire in zip(sent, wires, strict=True)]
    # half-precision floats are summed in fp32, but sent as they are; XLA:CPU would send fp32
    scatter_bits = functools.partial(_sum_by_exchange, dtype=jnp.float32)
    # two rounds: in each, the leaves of the other round have no dim, and stay as they are
    for scatter, bits in ((psum_scatter, False), (scatter_bits, True)):
        chosen = [
            wire if leaf_bits is bits else wire._replace(dim=None)
            for wire, leaf_bits in zip(wires, as_bits, strict=True)
        ]
        move = functools.partial(reduce_scatter_buckets, scatter=scatter, bucket_bytes=bucket_bytes)
        sent = _apply_where_sharded(move, sent, chosen)
    return [cast(x, leaf.dtype) for x, leaf in zip(sent, leaves, strict=True)]


def _apply_where_sharded(
    move: Callable[[Arrays, list[int], MeshAxes], Arrays],
    leaves: Sequence[jax.Array],
    wires: Sequence[LeafWire],
) -> Arrays:
    """Apply a collective to the leaves that have a dim, once for all leaves with the same axes.

    Return the others as is.
    """
    results = list(leaves)
    sharded = {i: wire.dim for i, wire in enumerate(wires) if wire.dim is not None}
    # `dict.fromkeys` keeps the order of the leaves. Every device must start collectives in one
    # order, and a set of strings has another order in each process.
    for axes in dict.fromkeys(wires[i].axes for i in sharded):
        dims = {i: dim for i, dim in sharded.items() if wires[i].axes == axes}
        if jax.lax.axis_size(axes) == 1:  # one device has the whole leaf
            continue

        # The defaults bind this turn's values; a closure would read the loop's last ones.
        def run(xs: Arrays, dims: dict[int, int] = dims, axes: MeshAxes = axes) -> Arrays:
            return move(xs, list(dims.values()), axes)

        moved = shard_by_shard(run, [leaves[i] for i in dims], [wires[i].tensor for i in dims])
        results = replaced(results, dims, moved)
    return results


def psum_scatter(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    """Sum over mesh axes, where each device keeps its shard of a dim: `jax.lax.psum_scatter`,
    tiled.

    Between processes on CPU this is an all-to-all and a local sum. XLA's reduce-scatter through
    gloo gave wrong sums there, in one of fifty to a hundred calls (24 MB, two processes, jax
    0.10.2). All-to-alls and all-reduces gave none.
    """
    if jax.process_count() > 1 and device_kind_or_default() == "cpu":
        return _sum_by_exchange(x, axis, dim, x.dtype)

    def move(x: jax.Array, dim: int) -> jax.Array:
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)

    return joined_to_tiles(move, x, dim) if is_tpu() else move(x, dim)


def _sum_by_exchange(x: jax.Array, axis: MeshAxes, dim: int, dtype: DTypeLike) -> jax.Array:
    """Send each device its shard from all devices, and sum the shards in `dtype`."""
    # [n, shard] before: row i goes to device i. After: row i is device i's part of this shard. The
    # sum has one fixed order and any dtype; XLA chooses both inside of a reduce-scatter.
    rows = all_to_all(shards_of(x, dim, jax.lax.axis_size(axis)), axis, 0, 0)
    return jnp.sum(rows, axis=0, dtype=dtype)


def all_to_all(x: jax.Array, axis: MeshAxes, split: int, concat: int) -> jax.Array:
    """Split the dim `split` over a mesh axis, and join the received parts on the dim `concat`.

    Not differentiable.
    """

    def move(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis, split, concat, tiled=True)

    return _as_bits_on_cpu(move, x)


def _all_gather(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    def move(x: jax.Array, dim: int) -> jax.Array:
        return _as_bits_on_cpu(lambda x: jax.lax.all_gather(x, axis, axis=dim, tiled=True), x)

    return in_gathered_layout(joined_to_tiles(move, x, dim), dim) if is_tpu() else move(x, dim)


def _cast_in_place(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast.

    On a TPU, keep XLA from moving a cast from float32 to bfloat16 out of the loop over blocks.

    XLA would cast the stack of all blocks instead (`xla_jf_bf16_propagation`), and hold this copy
    of half the size for the whole step. No XLA pass moves a rounding (`reduce_precision`), so
    rounding here fixes the place of the cast.
    """
    half = x.dtype == jnp.float32 and dtype == jnp.bfloat16
    if half and is_tpu():
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return cast(x, dtype)


def _as_bits_on_cpu(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a collective.

    On CPU send short floats as integer bits, because XLA:CPU would send them as fp32.

    Other devices send them unchanged: on a TPU the cast to bits and back copies the gathered array.
    """
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize)
    if bits is None or not is_floating(x) or device_kind() != "cpu":
        return move(x)
    # Only collectives that move numbers may see bits. A sum of bits would be no sum of floats.
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, bits)), x.dtype)
