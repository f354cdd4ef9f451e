"""Whether a loss is a (weighted) mean over rows, so that the pieces on several devices add up to it; else it is refused.

The loss is traced on abstract rows, twice, and nothing runs: see `row_analysis`.
"""

import linecache
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import source_info_util

from shardopt.core.block_model import LossFn, call, takes_rng
from shardopt.core.errors import NotSeparableError, format_error
from shardopt.core.types import PyTree, Updated, Weighted, leaves_with_paths
from shardopt.engine.config import StrategyConfig
from shardopt.engine.row_analysis import DifferentTracesError, Scope, follow
from shardopt.engine.row_arithmetic import as_sum
from shardopt.engine.row_values import Const, Mixed, Op, Rows, Sum, Value, odd, same
from shardopt.mesh import on_mesh


class Mixing(NamedTuple):
    """Where a loss is no mean over rows.

    Attributes:
      what: which result of the loss: "the loss", "metric 'accuracy'".
      why: in what way, a sentence.
      operation: the operation that mixes rows, as "reduce_sum at loss.py:12 (clip)"; "" if it is not known.
      lines: that operation and what becomes of its result, with their source.
      sure: whether it is certain; else only numbers can tell.
    """

    what: str
    why: str
    operation: str
    lines: tuple[str, ...]
    sure: bool


class _Out(NamedTuple):
    """A result of a loss, and what it must be: "mean", "ratio", "sum" or "any"."""

    what: str
    must: str
    leaves: tuple[Any, ...]


def find_mixing(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    key: jax.Array | None = None,
    row_axes: Sequence[str] = (),
    axis_sizes: Sequence[tuple[str, int]] = (),
) -> Mixing | None:
    """Return where a loss is no (weighted) mean over rows; None if it is shown to be one.

    Args:
      loss_fn: the loss, or a `BlockModel`.
      params: parameters as shapes and dtypes.
      batch: a batch as shapes and dtypes, leaves [rows, ...] with as many rows as one piece has.
      key: a random key as shape and dtype, for a loss that takes one.
      row_axes: mesh axes over which rows are split, if the loss may use collectives over them.
      axis_sizes: mesh axes and their sizes that the loss may name.
    """
    rows = max(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)
    sizes = (rows, 2 * rows) if rows > 1 else (2, 4)
    outs: list[_Out] = []

    def traced(params: PyTree, batch: PyTree, key: jax.Array | None) -> list[jax.Array]:
        outs[:] = _outs(call(loss_fn, key, 0, params, batch))
        return [jnp.asarray(leaf) for out in outs for leaf in out.leaves]

    jaxprs = []
    for size in sizes:
        resized = jax.tree.map(lambda x: _resized(x, size), batch)  # noqa: B023
        try:
            jaxprs.append(jax.make_jaxpr(traced, axis_env=list(axis_sizes))(params, resized, key))
        except Exception as error:
            if size == rows:
                raise
            why = f"it cannot be traced on {size} rows, so nothing can be said of it: {type(error).__name__}: {error}"
            return Mixing("the loss", why.splitlines()[0], "", (), sure=False)
    none = (0.0,) * (len(sizes) - 1)
    shared = [Const(none) for _ in jax.tree.leaves(params)]
    rowwise: list[Value] = [Rows(0, none) if leaf.ndim else Const(none) for leaf in jax.tree.leaves(batch)]
    drawn = [Const(none, anywhere=True) for _ in jax.tree.leaves(key)]
    try:
        found = follow(Scope(sizes, frozenset(row_axes)), jaxprs, [*shared, *rowwise, *drawn])
    except DifferentTracesError as error:
        lines = () if error.eqn is None else (_line(Op(error.eqn)),)
        why = f"it does other things on {sizes[0]} rows than on {sizes[1]}."
        return Mixing("the loss", why, lines[0] if lines else "", lines, sure=False)
    values = iter(found)
    problems = [_problem(out, [next(values) for _ in out.leaves], sizes) for out in outs]
    problems = sorted((one for one in problems if one is not None), key=lambda one: not one.sure)
    return problems[0] if problems else None


def _resized(leaf: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) if leaf.ndim else leaf


def _outs(returned: PyTree) -> list[_Out]:
    main, aux = returned, {}
    if isinstance(returned, tuple) and not isinstance(returned, Weighted) and len(returned) == 2:
        main, aux = returned
    found = [_out("the loss", main)]
    for name, value in (aux or {}).items():
        if isinstance(value, Updated):
            found += [_Out(f"new value of {path}", "mean", (leaf,)) for path, leaf in leaves_with_paths(value.values)]
        else:
            found.append(_out(f"metric {name!r}", value))
    return found


def _out(what: str, value: Any) -> _Out:
    if isinstance(value, Weighted):
        return _Out(what, "ratio", tuple(value))
    return _Out(what, "mean", tuple(jax.tree.leaves(value)))


def _problem(out: _Out, values: Sequence[Value], sizes: Sequence[int]) -> Mixing | None:
    for value in values:
        if isinstance(value, Mixed):
            return _mixing(out.what, value)
        if isinstance(value, Rows):
            op = value.plus.op if value.plus else None
            why = "it holds a number for each row, and the mean over devices would be taken of those of different rows."
            return Mixing(out.what, why, "", () if op is None else (_line(op),), sure=True)
    sums = [as_sum(_Anywhere(sizes), value) for value in values]
    if out.must == "mean":
        mean = tuple(-1.0 * (size != sizes[0]) for size in sizes[1:])
        wrong = next((one for one in sums if one is not None and not (same(one.degree, mean) and not odd(one.degree))), None)
        if wrong is not None:
            return _wrong_size(out.what, wrong, values)
    elif out.must == "ratio" and None not in sums:
        total, weight = sums
        assert total is not None
        assert weight is not None
        if not same(total.degree, weight.degree) or odd(total.degree):
            why = "its total and its weight grow differently with the number of rows: one is a sum over rows, the other is not."
            return Mixing(out.what, why, _line(total.op), _lines(values), sure=True)
    return None


class _Anywhere(NamedTuple):
    """What `as_sum` wants to know of a place in the trace."""

    num_rows: Sequence[int]
    op: Any = None


def _wrong_size(what: str, total: Sum, values: Sequence[Value]) -> Mixing:
    lines = _lines(values)
    if total.degree[0] > -1e-3 and total.degree[0] < 1e-3:
        why = "it is a sum over rows, where a mean is taken over devices."
    else:
        why = "it depends on the number of rows otherwise than a mean over them."
    return Mixing(what, why, lines[0] if lines else "", lines, sure=True)


def _lines(values: Sequence[Value]) -> tuple[str, ...]:
    return tuple(_line(value.op) for value in values if isinstance(value, Sum) and value.op is not None)


WHY = {
    "mixes": "rows are mixed.",
    "position": "a row's part depends on its position in the batch.",
    "count": "it depends on the number of rows otherwise than a mean over them.",
    "unknown": "nothing is known of what an operation does to rows.",
}


def _mixing(what: str, value: Mixed) -> Mixing:
    lines = [_line(value.op)]
    if value.use is not None and _operation(value.use) != _operation(value.op):
        lines.append("whose result goes into " + _line(value.use))
    return Mixing(what, WHY[value.why], lines[0], tuple(lines), sure=value.why != "unknown")


def _line(op: Op) -> str:
    """Return `reduce_sum at loss.py:12 (clip): its source`."""
    frame = _frame(op)
    if frame is None:
        return _operation(op)
    text = linecache.getline(frame.file_name, frame.start_line).strip()
    return _operation(op) + (f": {text}" if text else "")


def _operation(op: Op | None) -> str:
    """Return `reduce_sum at loss.py:12 (clip)`."""
    if op is None:
        return ""
    frame = _frame(op)
    if frame is None:
        return op.eqn.primitive.name
    relative = os.path.relpath(frame.file_name)
    name = frame.file_name if relative.startswith("..") else relative
    return f"{op.eqn.primitive.name} at {name}:{frame.start_line} ({frame.function_name})"


def _frame(op: Op) -> source_info_util.Frame | None:
    """Return the user's line; of what jax keeps of its own functions, that of the innermost call from outside of it."""
    for eqn in (op.eqn, *reversed(op.callers)):
        frame = source_info_util.user_frame(eqn.source_info.traceback)
        if frame is not None:
            return frame
    return None
