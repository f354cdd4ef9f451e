"""The axis that a reduction runs over: whether it is bound, whether values vary along it, and its
collectives.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core import Arrays, PyTree, abstract, cast, is_floating, plural, value_error
from shardopt.core._axis import AxisName, axis_names, axis_size

T = TypeVar("T")


def tracks_varying(axis_name: AxisName) -> bool:
    """Return whether types record along which axes values vary.

    They do only in `shard_map` with `check_vma=True`.
    """
    return bool(varying(jax.lax.axis_index(axis_name)))


def varying(x: jax.Array) -> frozenset[str]:
    """Return the axes along which a value varies according to its type.

    Empty where types do not track this.
    """
    return jax.typeof(x).mat.varying


def as_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Return a value whose type says that it varies along these axes too."""
    missing = tuple(axis for axis in axes if axis not in varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def check_not_summed(
    axis_name: AxisName, paths: Sequence[str], leaves: Sequence[jax.Array]
) -> None:
    """Raise an error for gradients that are the same on all devices of the axis already.

    They are a sum, by jax, or a mean, by an earlier link. Nothing is checked where types do not
    track along which axes values vary.
    """
    names = axis_names(axis_name)
    if not tracks_varying(names):
        return
    summed = [
        path for path, leaf in zip(paths, leaves, strict=True) if not varying(leaf) >= set(names)
    ]
    if summed:
        quoted = " or ".join(map(repr, names))
        problem = (
            f"{plural(len(summed), 'gradient leaf')} {'does' if len(summed) == 1 else 'do'} not"
            f" vary along {quoted}: jax has summed the gradient of a replicated parameter,"
            " jax.lax.pmean or an earlier link has averaged it, or optax.MultiSteps is around."
        )
        fix = (
            f"differentiate with respect to jax.lax.pcast(params, {axis_name!r}, to='varying'); and"
            " leave out what averages gradients before. optax.MultiSteps belongs after the mean."
        )
        raise value_error(problem, summed, fix)


def agreeing_cond(
    predicate: jax.Array | bool,
    if_true: Callable[..., T],
    if_false: Callable[..., T],
    *args: PyTree,
) -> T:
    """Return `jax.lax.cond` of two branches whose results may vary along different axes.

    A result that varies along an axis in one branch is cast to vary along that axis in the other
    branch too. The predicate must be the same on all devices, because the branches may run
    collectives. Double-precision arguments (a state made elsewhere) are cast to single precision
    where `jax_enable_x64` is off. The cast applies to both branches, whether or not a branch
    computes with the argument.
    """
    args = jax.tree.map(lambda x, abstract_x: cast(x, abstract_x.dtype), args, abstract(args))
    if not any(map(varying, jax.tree.leaves(args))):
        return jax.lax.cond(predicate, if_true, if_false, *args)

    def varying_axes(branch):
        axes_of_leaves = []
        jax.eval_shape(lambda: axes_of_leaves.extend(map(varying, jax.tree.leaves(branch(*args)))))
        return axes_of_leaves

    # `cond` wants one type for both branches. An exact mean is invarying, and a result that no
    # collective touched still varies.
    common_axes = [
        true_axes | false_axes
        for true_axes, false_axes in zip(varying_axes(if_true), varying_axes(if_false), strict=True)
    ]

    def cast_results(branch):
        def run(*args):
            leaves, treedef = jax.tree.flatten(branch(*args))
            return treedef.unflatten(map(as_varying, leaves, common_axes))

        return run

    return jax.lax.cond(predicate, cast_results(if_true), cast_results(if_false), *args)


# Collectives over several arrays at once: arrays of one dtype share a buffer.


def all_to_all_packed(arrays: Sequence[jax.Array], axis_name: AxisName) -> Arrays:
    """Send row i of each array [N, k] to device i; row j of each result came from device j."""
    return _packed(arrays, lambda buffer: _all_to_all(buffer, axis_name))


def all_gather_packed(arrays: Sequence[jax.Array], axis_name: AxisName) -> Arrays:
    """Send each array [1, k] to all devices; row j of each result [N, k] came from device j."""
    return _packed(arrays, lambda buffer: _all_gather(buffer, axis_name))


def all_to_all_kept(arrays: Sequence[jax.Array], axis_name: AxisName) -> Arrays:
    """Send row i of each array [N, ...] to device i, and keep how the partitioner shards the row.

    It keeps the sharding through permutes and sums alone: it would gather the operand of an
    all-to-all or an all-gather first (jax 0.10.2). Each of N - 1 permutes moves a row.
    """
    return [_all_to_all_kept(array, axis_name) for array in arrays]


def _all_to_all_kept(array: jax.Array, axis_name: AxisName) -> jax.Array:
    num_devices = axis_size(axis_name)
    bits = _as_bits(array)
    index = jax.lax.axis_index(axis_name)
    received = bits
    for hop in range(1, num_devices):
        row = jax.lax.dynamic_index_in_dim(bits, (index + hop) % num_devices)
        # On hop h each device sends the row of the device h places on, and gets one from h places
        # back. After N - 1 hops it has its row from all others; its own row never left.
        moves = [(device, (device + hop) % num_devices) for device in range(num_devices)]
        row = jax.lax.ppermute(row, axis_name, moves)
        source = (index - hop) % num_devices
        received = jax.lax.dynamic_update_index_in_dim(received, row, source, 0)
    return _from_bits(received, array.dtype)


def all_gather_kept(arrays: Sequence[jax.Array], axis_name: AxisName) -> Arrays:
    """Send each array [1, ...] to all devices, and keep how the partitioner shards it.

    It is a sum of N rows: each device has one row, and zeros.
    """
    return [_all_gather_kept(array, axis_name) for array in arrays]


def _all_gather_kept(array: jax.Array, axis_name: AxisName) -> jax.Array:
    num_devices = axis_size(axis_name)
    bits = _as_bits(array)
    zeros = jnp.zeros((num_devices, *bits.shape[1:]), bits.dtype)
    index = jax.lax.axis_index(axis_name)
    rows = jax.lax.dynamic_update_index_in_dim(zeros, bits, index, 0)
    # Each element is a number once and zero on all other devices, so the sum of bits is exact.
    return _from_bits(jax.lax.psum(rows, axis_name), array.dtype)


def all_reduce_padded(flat: jax.Array, axis_name: AxisName, axis_size: int) -> jax.Array:
    """Sum a flat array over the axis.

    Padding gives each device an equal chunk in the ring all-reduce.
    """
    padding = -flat.size % axis_size
    padded = jnp.pad(flat, (0, padding)) if padding else flat
    return jax.lax.psum(padded, axis_name)[: flat.size]


def _packed(arrays: Sequence[jax.Array], collective: Callable[[jax.Array], jax.Array]) -> Arrays:
    """Concatenate the arrays of each dtype, run the collective once on each buffer, and split the
    results.
    """
    bit_arrays = [_as_bits(array) for array in arrays]
    results = list(arrays)
    for dtype in dict.fromkeys(array.dtype for array in bit_arrays):
        members = [i for i, array in enumerate(bit_arrays) if array.dtype == dtype]
        buffer = (
            bit_arrays[members[0]]
            if len(members) == 1
            else jnp.concatenate([bit_arrays[i] for i in members], axis=1)
        )
        received = collective(buffer)
        start = 0
        for i in members:
            stop = start + arrays[i].shape[1]
            results[i] = _from_bits(received[:, start:stop], arrays[i].dtype)
            start = stop
    return results


def _as_bits(x: jax.Array) -> jax.Array:
    """Return half-precision floats as uint16 bits: XLA:CPU would widen them to fp32 on the wire."""
    if is_floating(x) and x.dtype.itemsize == 2:
        return jax.lax.bitcast_convert_type(x, jnp.uint16)
    return x


def _from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _all_to_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
    def axis_by_axis(names):
        sizes = [jax.lax.axis_size(name) for name in names]
        # Row i of N goes to device i; along several axes i is a tuple of indices, the first axis
        # major.
        grid = x.reshape(*sizes, *x.shape[1:])
        for dim, name in enumerate(names):
            grid = jax.lax.all_to_all(grid, name, dim, dim, tiled=True)
        return grid.reshape(x.shape)

    return _over_axes(
        axis_name, lambda names: jax.lax.all_to_all(x, names, 0, 0, tiled=True), axis_by_axis
    )


def _all_gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    # The gathered value is equal on all devices; its type says so if types track varying axes.
    to = "invarying" if varying(x) else "varying"

    def gather(x, names):
        return jax.lax.all_gather(x, names, axis=0, tiled=True, to=to)

    return _over_axes(
        axis_name,
        lambda names: gather(x, names),
        lambda names: functools.reduce(gather, reversed(names), x),
    )


def _over_axes(
    axis_name: AxisName,
    as_one_axis: Callable[[AxisName], jax.Array],
    axis_by_axis: Callable[[tuple[str, ...]], jax.Array],
) -> jax.Array:
    """Run a collective over several axes as if they were one axis.

    jax.vmap has no batching rule for a collective over several axes: under vmap the axes are taken
    one after another. That costs no communication, because vmap sends nothing.
    """
    if isinstance(axis_name, str) or len(axis_name) == 1:
        return as_one_axis(axis_name)
    try:
        return as_one_axis(tuple(axis_name))
    except AssertionError:
        return axis_by_axis(tuple(axis_name))
