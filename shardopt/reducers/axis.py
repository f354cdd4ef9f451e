"""The axis that a reduction runs over: whether it is bound here, whether values differ along it, and its collectives."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, abstract

AxisName = str | tuple[str, ...]
"""The name of a mesh axis, or a tuple of names that stand for one axis, the last one fastest."""

T = TypeVar("T")


def axis_names(who: str, axis_name: AxisName) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        what = f"an axis name is a string or a tuple of strings, got {axis_name!r}."
        raise TypeError(format_error(who, what, fix='pass the name of a mesh axis, such as "data".'))
    if len(set(names)) < len(names):
        raise ValueError(format_error(who, f"axis names must differ, got {tuple(names)!r}."))
    return tuple(names)


def axis_size(who: str, axis_name: AxisName) -> int:
    """Return how many devices there are along the axis."""
    names = axis_names(who, axis_name)
    if unbound := [name for name in names if not is_bound(name)]:
        quoted = ", ".join(repr(name) for name in unbound)
        what = f"axis {quoted} {'is' if len(unbound) == 1 else 'are'} not bound here."
        fix = (
            f"call it inside jax.shard_map over a mesh with axis {quoted} (manual, not left to the partitioner), "
            f"or inside jax.pmap or jax.vmap with axis_name={quoted if len(unbound) == 1 else names}."
        )
        raise ValueError(format_error(who, what, fix=fix))
    return math.prod(jax.lax.axis_size(name) for name in names)


def is_bound(name: str) -> bool:
    """Return whether collectives over this axis can be called here."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def tracks_varying(axis_name: AxisName) -> bool:
    """Return whether types say here along which axes values differ: only in `shard_map` with `check_vma=True`."""
    return bool(varying(jax.lax.axis_index(axis_name)))


def varying(x: jax.Array) -> frozenset[str]:
    """Return the axes along which the type says that a value differs; none where types do not track it."""
    return jax.typeof(x).mat.varying


def check_not_summed(who: str, axis_name: AxisName, paths: Sequence[str], leaves: Sequence[jax.Array]) -> None:
    """Refuse gradients that jax has summed over the axis already, where types tell."""
    names = axis_names(who, axis_name)
    if not tracks_varying(names):
        return
    summed = [path for path, leaf in zip(paths, leaves, strict=True) if not varying(leaf) >= set(names)]
    if summed:
        quoted = " or ".join(repr(name) for name in names)
        what = (
            f"{plural(len(summed), 'gradient leaf')} {'does' if len(summed) == 1 else 'do'} not vary along {quoted}: "
            "under check_vma=True the gradient of a replicated parameter arrives summed already."
        )
        fix = (
            f"differentiate with respect to jax.lax.pcast(params, {axis_name!r}, to='varying'), or use check_vma=False."
        )
        raise ValueError(format_error(who, what, summed, fix))


def agreeing_cond(
    predicate: jax.Array | bool, if_true: Callable[..., T], if_false: Callable[..., T], *args: PyTree
) -> T:
    """Return `jax.lax.cond` of branches whose results may vary along different axes: what varies in one, varies.

    The predicate must be the same on all devices, since collectives run in the branches. What is of double precision where
    `jax_enable_x64` is off, a state from elsewhere, goes on in single in both, not only where a branch computes with it.
    """
    args = jax.tree.map(lambda x, now: x if x.dtype == now.dtype else x.astype(now.dtype), args, abstract(args))
    if not any(varying(leaf) for leaf in jax.tree.leaves(args)):
        return jax.lax.cond(predicate, if_true, if_false, *args)

    def axes_of(branch):
        found = []
        jax.eval_shape(lambda: found.extend(varying(leaf) for leaf in jax.tree.leaves(branch(*args))))
        return found

    wanted = [one | other for one, other in zip(axes_of(if_true), axes_of(if_false), strict=True)]

    def cast(branch):
        def run(*args):
            leaves, treedef = jax.tree.flatten(branch(*args))
            missing = [tuple(axes - varying(leaf)) for leaf, axes in zip(leaves, wanted, strict=True)]
            pairs = zip(leaves, missing, strict=True)
            return treedef.unflatten([jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in pairs])

        return run

    return jax.lax.cond(predicate, cast(if_true), cast(if_false), *args)


# Collectives over arrays that share a buffer, one for each dtype.


def all_to_all_packed(parts: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """Send row i of each part [N, k] to device i; row j of the results came from device j."""
    return _packed(parts, lambda buffer: _all_to_all(buffer, axis_name))


def all_gather_packed(parts: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """Send each part [1, k] to all devices; row j of the results [N, k] came from device j."""
    return _packed(parts, lambda buffer: _all_gather(buffer, axis_name))


def all_reduce_padded(flat: jax.Array, axis_name: AxisName, axis_size: int) -> jax.Array:
    """Sum a flat array over the axis, padded so that each device has an equal chunk of the ring."""
    padding = -flat.size % axis_size
    padded = jnp.pad(flat, (0, padding)) if padding else flat
    return jax.lax.psum(padded, axis_name)[: flat.size]


def _packed(parts: Sequence[jax.Array], move: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Concatenate parts of one dtype, move them at once, and split them again."""
    bits = [_as_bits(part) for part in parts]
    results = list(parts)
    for dtype in dict.fromkeys(part.dtype for part in bits):
        members = [i for i, part in enumerate(bits) if part.dtype == dtype]
        buffer = bits[members[0]] if len(members) == 1 else jnp.concatenate([bits[i] for i in members], axis=1)
        moved, start = move(buffer), 0
        for i in members:
            stop = start + parts[i].shape[1]
            results[i] = _from_bits(moved[:, start:stop], parts[i].dtype)
            start = stop
    return results


def _as_bits(x: jax.Array) -> jax.Array:
    """Half-precision floats are sent as the bits they are: XLA:CPU would widen them to fp32."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2:
        return jax.lax.bitcast_convert_type(x, jnp.uint16)
    return x


def _from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _all_to_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
    def one_by_one(names):
        sizes = [jax.lax.axis_size(name) for name in names]
        grid = x.reshape(*sizes, *x.shape[1:])
        for dim, name in enumerate(names):
            grid = jax.lax.all_to_all(grid, name, dim, dim, tiled=True)
        return grid.reshape(x.shape)

    return _over(axis_name, lambda names: jax.lax.all_to_all(x, names, 0, 0, tiled=True), one_by_one)


def _all_gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    # where types track it, the result is known to be the same on all devices
    to = "invarying" if varying(x) else "varying"

    def over(x, names):
        return jax.lax.all_gather(x, names, axis=0, tiled=True, to=to)

    return _over(axis_name, lambda names: over(x, names), lambda names: functools.reduce(over, reversed(names), x))


def _over(
    axis_name: AxisName,
    at_once: Callable[[AxisName], jax.Array],
    one_by_one: Callable[[tuple[str, ...]], jax.Array],
) -> jax.Array:
    """Run a collective over several axes taken as one.

    jax.vmap has no rule for several axes. There they are taken one after the other, which sends nothing.
    """
    if isinstance(axis_name, str) or len(axis_name) == 1:
        return at_once(axis_name)
    try:
        return at_once(tuple(axis_name))
    except AssertionError:
        return one_by_one(tuple(axis_name))
