"""The axis that a reduction runs over: whether it is bound here, and whether values differ along it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardopt.core.errors import format_error, plural

AxisName = Any
"""The name of a mesh axis, or a tuple of names that stand for one axis, the last one fastest."""


def axis_names(who: str, axis_name: AxisName) -> tuple[str, ...]:
    """Return one name or several as a tuple.

    Raises:
      TypeError: if it is neither a string nor a non-empty sequence of strings.
      ValueError: if a name comes twice.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        what = f"an axis name is a string or a tuple of strings, got {axis_name!r}."
        raise TypeError(format_error(who, what, fix='pass the name of a mesh axis, such as "data".'))
    if len(set(names)) < len(names):
        raise ValueError(format_error(who, f"axis names must differ, got {tuple(names)!r}."))
    return tuple(names)


def axis_size(who: str, axis_name: AxisName) -> int:
    """Return how many devices there are along the axis.

    Raises:
      TypeError: as `axis_names`.
      ValueError: if the axis is not bound where this is called.
    """
    names = axis_names(who, axis_name)
    unbound = [name for name in names if not is_bound(name)]
    if unbound:
        quoted = ", ".join(repr(name) for name in unbound)
        are = "is" if len(unbound) == 1 else "are"
        what = f"axis {quoted} {are} not bound here."
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


def varying(x: Any) -> frozenset[str]:
    """Return the axes along which the type says that a value differs; none where types do not track it."""
    return jax.typeof(x).mat.varying


def check_not_summed(who: str, axis_name: AxisName, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse gradients that jax has summed over the axis already, where types tell.

    Raises:
      ValueError: if types track what varies, and a gradient does not vary along the axis.
    """
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


def agreeing_cond(predicate: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], *args: Any) -> Any:
    """Return `jax.lax.cond` of branches whose results may vary along different axes: what varies in one, varies.

    The predicate must be the same on all devices, since collectives run in the branches.
    """
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
