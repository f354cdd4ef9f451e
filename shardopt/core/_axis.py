"""The axis that a reduction runs over: its names, its size, and whether it is bound."""

import contextlib
import math
from collections.abc import Iterator

import jax
from jax._src.core import get_axis_env, top_axis_env, trace_ctx

from shardopt.core._errors import quoted, type_error, value_error

AxisName = str | tuple[str, ...]
"""The name of a mesh axis, or a tuple of names that act as one axis; the last name varies fastest.
"""


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """Return the axis name, or the several axis names, as a tuple of strings."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (
        not isinstance(names, tuple | list)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        problem = f"an axis name is a string or a tuple of strings, got {axis_name!r}."
        raise type_error(problem, fix='pass the name of a mesh axis, such as "data".')
    if len(set(names)) < len(names):
        raise value_error(f"axis names must differ, got {tuple(names)!r}.")
    return tuple(names)


def axis_size(axis_name: AxisName) -> int:
    """Return the number of devices along the axis."""
    names = axis_names(axis_name)
    unbound = [name for name in names if not is_bound(name)]
    if unbound:
        names_text = quoted(unbound)
        problem = f"axis {names_text} {'is' if len(unbound) == 1 else 'are'} not bound here."
        fix = (
            f"call it inside jax.shard_map over a mesh with axis {names_text} (manual, not left to the"
            " partitioner), or inside jax.pmap or jax.vmap with"
            f" axis_name={names_text if len(unbound) == 1 else names}. Under jax.jit, wrap an optax"
            " chain in so.transforms.on_mesh."
        )
        raise value_error(problem, fix=fix)
    return math.prod(map(jax.lax.axis_size, names))


def bound_axes() -> tuple[str, ...]:
    """Return the axes that are bound: of the `shard_map`, `pmap` and `vmap` around."""
    return tuple(name for name in get_axis_env().axis_sizes if isinstance(name, str))


@contextlib.contextmanager
def global_view() -> Iterator[None]:
    """Let functions that are traced inside of a `shard_map` see no bound axis, as outside of it."""
    axes = get_axis_env()
    trace_ctx.set_axis_env(top_axis_env)
    try:
        yield
    finally:
        trace_ctx.set_axis_env(axes)


def is_bound(name: str) -> bool:
    """Return whether the axis is bound, so that collectives over it can be called."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True
