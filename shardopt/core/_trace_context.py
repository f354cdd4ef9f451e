"""The context of a trace: one record of what layers and functions of a loss may ask while they are
traced.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from jax._src.core import extend_axis_env_nd
from jax.sharding import AbstractMesh


class RowContext(NamedTuple):
    """How the rows of the batch are distributed, while a loss is traced.

    Attributes:
      axes: the mesh axes that carry the rows of one gradient.
      devices: the number of devices along these axes.
      micro_batches: the number of pieces that each device cuts its rows into.
      refused: (why the loss does not see the whole batch, the remedy). None if it does, or if only
        micro-batches prevent it.
    """

    axes: tuple[str, ...]
    devices: int
    micro_batches: int = 1
    refused: tuple[str, str] | None = None


class TraceContext(NamedTuple):
    """The values that a trace carries from a strategy to the layers of its loss.

    Attributes:
      roles: role -> its axes, on a mesh with other axis names than `AXES`; None if axes are named
        by their roles.
      hidden_mesh: the mesh that `trace_without_mesh` hides from jax.
      is_analysis: whether the trace only shows how a loss uses the rows of a batch.
      rows: how the rows are distributed; None outside of a strategy's loss.
    """

    roles: Mapping[str, tuple[str, ...]] | None = None
    hidden_mesh: AbstractMesh | None = None
    is_analysis: bool = False
    rows: RowContext | None = None


_CONTEXT: ContextVar[TraceContext] = ContextVar("shardopt_trace", default=TraceContext())  # noqa: B039, because it is immutable


def trace_context() -> TraceContext:
    """Return the context of the trace that runs."""
    return _CONTEXT.get()


@contextlib.contextmanager
def within_trace(**fields: Any) -> Iterator[None]:
    """Replace fields of the context in a `with` block."""
    token = _CONTEXT.set(_CONTEXT.get()._replace(**fields))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


@contextlib.contextmanager
def within_rows(context: RowContext) -> Iterator[None]:
    """Set how rows are distributed in a `with` block, and make it a part of the key of jax's cache of
    traces.

    Otherwise a function that the user jitted would be traced in one context and used in another.
    Named axes are part of that key. So the context is the name of an axis that no operation uses.
    """
    with within_trace(rows=context), extend_axis_env_nd([(f"shardopt {context}", 1)]):
        yield
