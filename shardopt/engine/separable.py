"""Whether a loss is a (weighted) mean over rows, so that the losses of its pieces on several devices add up to it.

The loss is traced on the whole batch and on one piece of it, on abstract rows, and nothing runs. The two traces are related
equation by equation (`separability.walk`). A loss passes only if that proves it a mean: whatever is not known does not pass.
"""

import functools
import linecache
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import source_info_util

from shardopt.collectives.per_device import TENSOR
from shardopt.core.block_model import LossFn, as_block_model, call, takes_rng
from shardopt.core.errors import NotSeparableError, format_error, plural
from shardopt.core.types import Max, Min, PyTree, Sum, Updated, Weighted, abstract, leaves_with_paths
from shardopt.engine.batch_dims import num_rows, resized, row_dim, sequence_dim
from shardopt.engine.config import StrategyConfig
from shardopt.engine.explain import explained
from shardopt.engine.layout import Layout
from shardopt.engine.loss import loss_parts
from shardopt.engine.rows import RowContext, row_context, with_rows
from shardopt.mesh import analysis, on_mesh
from shardopt.partition import LeafPlan
from shardopt.remat.gathered_block import leaves_like
from shardopt.separability.dependence import EXPERTS, leaves_used
from shardopt.separability.numbers import relation_of
from shardopt.separability.relations import (
    WHY,
    Extreme,
    Known,
    Op,
    Same,
    Split,
    Total,
    Unknown,
    Value,
    close,
    tolerance_of,
)
from shardopt.separability.scope import DifferentTracesError
from shardopt.separability.walk import prove

_HERE = Path(__file__).parent


class Mixing(NamedTuple):
    """Where a loss is not proved to be a mean over rows, or over positions.

    Attributes:
      what: which result of the loss: "the loss", "metric 'accuracy'".
      why: what is in the way, a sentence.
      operation: the operation that mixes rows, as "reduce_sum at loss.py:12 (clip)"; "" if it is not known.
      lines: that operation and what becomes of its result, with their source.
      cause: the error of a loss that cannot be traced on a piece.
    """

    what: str
    why: str
    operation: str = ""
    lines: tuple[str, ...] = ()
    cause: Exception | None = None


class _Result(NamedTuple):
    """A result of a loss, and what it must be: "mean", "ratio" (of two leaves), "sum", "max" or "min"."""

    what: str
    must: str
    leaves: tuple[Any, ...]


def find_mixing(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    pieces: int,
    blocks: int = 1,
    caller: str = "loss_fn",
    key: jax.Array | None = None,
    context: RowContext | None = None,
    axis_sizes: Mapping[str, int] | None = None,
    training: bool = True,
    dims: Sequence[int | None] | None = None,
    positions: bool = False,
) -> Mixing | None:
    """Return why a loss is not proved to be the (weighted) mean of the losses of its pieces; None if it is.

    Args:
      loss_fn: the loss, or a `BlockModel`.
      params: parameters as shapes and dtypes.
      batch: the whole batch as shapes and dtypes.
      pieces: n, into how many equal pieces the batch is cut.
      blocks: into how many blocks of rows the batch falls, of each of which a piece has the same part; 1 if pieces are contiguous.
      caller: the function that the user called, for messages.
      key: a random key as shape and dtype, for a loss that takes one.
      context: what `gather_batch`, `batch_mean` and `batch_sum` are told on a piece; without it there are no other rows.
      axis_sizes: mesh axes and their sizes that the loss may name.
      training: whether the loss is differentiated, so that derivative rules count.
      dims: for each leaf of the batch the dim that is cut, or None; by default the first dim.
      positions: whether positions of sequences are cut, rather than rows.
    """
    loss_fn = _with_checked_blocks(caller, loss_fn)
    unit = "positions" if positions else "rows"
    leaves, treedef = jax.tree.flatten(batch)
    dims = [0 if leaf.ndim else None for leaf in leaves] if dims is None else dims
    sizes = axis_sizes or {}
    row_axes = frozenset(context.axes if context is not None and context.devices == pieces else ())
    whole_context = None if context is None else context._replace(devices=1, micro_batches=1, refused=None)
    counts = [
        (leaf.shape[dim], leaf.shape[dim] // pieces) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None
    ]
    if any(whole % (pieces * blocks) for whole, _ in counts):
        return Mixing("the loss", f"its {unit} cannot be cut into {pieces} equal pieces.")
    results: list[_Result] = []

    def traced(context: RowContext | None, params: PyTree, batch: PyTree, key: jax.Array | None) -> list[jax.Array]:
        within = loss_fn if context is None else with_rows(context, loss_fn)
        with analysis():
            returned = call(within, key, 0, params, batch)
        loss_parts(caller, returned, 1)  # refuses what is no loss
        results[:] = _results(returned)
        return [jnp.asarray(leaf) for one in results for leaf in one.leaves]

    def trace(context: RowContext | None, batch: PyTree, sizes: Mapping[str, int]) -> Any:
        make = jax.make_jaxpr(functools.partial(traced, context), axis_env=list(sizes.items()))
        return make(params, batch, key)

    piece = treedef.unflatten([_cut(*pair, pieces) for pair in zip(leaves, dims, strict=True)])
    # what is wrong with the loss itself is raised as it is
    whole_jaxpr = trace(whole_context, batch, {axis: 1 if axis in row_axes else size for axis, size in sizes.items()})
    try:
        piece_jaxpr = trace(context, piece, sizes)
    except Exception as error:
        seen, rows = f"{counts[0][1]} of the {counts[0][0]} {unit}", f"{type(error).__name__}: {error}".splitlines()[0]
        return Mixing("the loss", f"a piece is {seen}, on which the loss cannot be traced: {rows}", cause=error)
    shapes = [[var.aval.shape for var in one.jaxpr.outvars] for one in (whole_jaxpr, piece_jaxpr)]
    grows = iter(whole != piece for whole, piece in zip(*shapes, strict=True))
    for result in results:
        grown = [next(grows) for _ in result.leaves]
        if any(grown):
            return Mixing(result.what, "it has another shape on a piece than on the whole batch.")
    relations: list[Value] = [Same() for _ in jax.tree.leaves(params)]
    relations += [Same() if dim is None else Split(dim, blocks) for dim in dims]
    relations += [Same(drawn=True) for _ in jax.tree.leaves(key)]
    relate = functools.partial(
        prove,
        whole_jaxpr,
        piece_jaxpr,
        relations,
        pieces=pieces,
        row_axes=row_axes,
        other_axes=frozenset(sizes) - frozenset(context.axes if context is not None else ()),
        positions=positions,
    )
    # derivative rules are traced one by one, which takes longest: so only once the values are known to be right
    for with_rules in (False, True)[: 1 + training]:
        try:
            values = iter(relate(training=with_rules))
        except DifferentTracesError as error:
            op = None if error.eqn is None else Op(error.eqn)
            why = f"it does other things on {counts[0][0]} {unit} than on {counts[0][1]}."
            return Mixing("the loss", why, _operation(op), () if op is None else (_line(op),))
        for result in results:
            mixing = _problem(result, [next(values) for _ in result.leaves], pieces)
            if mixing is not None:
                return mixing._replace(why=_of_positions(mixing.why)) if positions else mixing
    if training and (name := _trained_weight(whole_jaxpr, results, len(jax.tree.leaves(params)))):
        return Mixing(
            "the loss", f"{name} of so.Weighted depends on the parameters, so the mean has a gradient of the weight."
        )
    return None


def find_trained_weight(
    loss_fn: LossFn, params: PyTree, batch: PyTree, *, caller: str = "loss_fn", key: jax.Array | None = None
) -> str | None:
    """Return which weight of a `Weighted` loss follows from the parameters, such as "the weight"; None if none does.

    Args:
      loss_fn: the loss, or a `BlockModel`.
      params: parameters as shapes and dtypes.
      batch: the batch as shapes and dtypes.
      caller: the function that the user called, for messages.
      key: a random key as shape and dtype, for a loss that takes one.
    """
    results: list[_Result] = []

    def traced(params: PyTree, batch: PyTree, key: jax.Array | None) -> list[jax.Array]:
        with analysis():
            returned = call(loss_fn, key, 0, params, batch)
        loss_parts(caller, returned, 1)
        results[:] = _results(returned)
        return [jnp.asarray(leaf) for one in results for leaf in one.leaves]

    jaxpr = jax.make_jaxpr(traced)(params, batch, key)
    return _trained_weight(jaxpr, results, len(jax.tree.leaves(params)))


def _trained_weight(jaxpr: Any, results: Sequence[_Result], num_params: int) -> str | None:
    """Return which weight of the loss follows from the parameters, other than through `stop_gradient`."""
    marks = [{i: None} if i < num_params else {} for i in range(len(jaxpr.jaxpr.invars))]
    used = iter(leaves_used(jaxpr, marks, differentiated=True))
    weights = 0
    for result in results:
        leaves = [next(used) for _ in result.leaves]
        if result.what == "the loss" and result.must == "ratio":
            weights += 1
            if leaves[1]:
                return "the weight" if weights == 1 else f"weight {weights}"
    return None


# --- what is in the way of a strategy -----------------------------------------------------------------------------------


class Obstacle(NamedTuple):
    """Why devices cannot run a loss on their own rows.

    Attributes:
      what: a sentence.
      lines: the operations, with their source.
      fix: the remedies.
      operation: the operation that mixes rows; "" if it is not known.
      cause: the error of a loss that cannot be traced on a piece.
    """

    what: str
    lines: tuple[str, ...]
    fix: str
    operation: str
    cause: Exception | None = None

    def error(self, config: StrategyConfig) -> Exception:
        """Return the error of a strategy that cannot run the loss otherwise: what shardopt itself says of it, or that it mixes rows."""
        if self.cause is not None and "\nFix: " in str(self.cause):
            return self.cause
        no_view = "" if config.schedule is None else "a mesh with pipeline=1; or "
        no_view = no_view or ("no reducer; or " if config.reducer is not None else "")
        no_view = no_view or ("no scatter_dtype; or " if config.scatter_dtype is not None else "")
        fix = f"{no_view or GLOBAL}{self.fix}"
        return NotSeparableError(format_error(config.strategy, self.what, self.lines, fix), operation=self.operation)


GLOBAL = 'view="global", which is exact for every loss; or '
FIX = (
    "so.gather_batch, so.batch_mean or so.batch_sum for what a row needs of the whole batch, and so.Weighted for a normaliser "
    "that depends on the rows; or separable=True if you know better."
)
FIX_POSITIONS = (
    "so.nn.attention for what a position needs of the others, and so.nn.positions for its index; inputs and targets as leaves "
    "of their own rather than shifted in the loss; a mesh with context=1; or separable=True if you know better."
)


def find_obstacle(config: StrategyConfig, layout: Layout, batch: PyTree, *, training: bool) -> Obstacle | None:
    """Return why devices cannot run the loss of a strategy on their own rows; None if they can, by proof or by the user's word.

    Args:
      config: of the step; of evaluation, its `of_evaluation`.
      layout: of the parameters.
      batch: a global batch; its shapes count.
      training: whether the loss is differentiated, and gets a random key if it takes one.
    """
    configs = [config]
    if config.local_updates is not None and config.local_updates.warmup_steps:  # in which replicas share one gradient
        configs.append(config._replace(sync_gradients=True))
    for one in configs:
        if one.num_pieces == 1 or one.separable:
            continue
        with explained(one._replace(view="per_device")):
            obstacle = _obstacle(one, layout, batch, training=training)
        if obstacle is not None:
            return obstacle
    return None


def _obstacle(config: StrategyConfig, layout: Layout, batch: PyTree, *, training: bool) -> Obstacle | None:
    axes = config.axes
    find = functools.partial(
        find_mixing,
        caller=config.strategy,
        key=jax.eval_shape(lambda: jax.random.key(0)) if training and takes_rng(config.loss_fn) else None,
        axis_sizes={axis: size for axis, size in axes.sizes.items() if axis != TENSOR or size == 1},
        training=training,
    )
    params, replicas = as_gathered(config, layout), axes.num_all_row_shares // axes.num_row_shares
    whole = resized(config, abstract(batch), rows=max(1, num_rows(config, batch) // replicas))
    cuts_experts = any(plan.experts for plan in layout.plans) and axes.sizes["expert"] > 1
    if cuts_experts and (obstacle := _experts_elsewhere(config, layout, find.keywords["key"], params, whole)):
        return obstacle
    mixing, over = None, "rows"
    if axes.num_position_shares > 1:
        dims = [sequence_dim(config, path, leaf.ndim) for path, leaf in leaves_with_paths(whole)]
        along = functools.partial(find, pieces=axes.num_position_shares, dims=dims, positions=True)
        mixing, over = on_mesh(config.mesh, along)(config.loss_fn, params, whole), "positions"
    row_dims = [row_dim(config, path, leaf.ndim) for path, leaf in leaves_with_paths(whole)]
    for rows, pieces in _row_cuts(config, num_rows(config, whole)):
        if mixing is None and pieces > 1:
            shared = resized(config, whole, rows=rows, position_shares=axes.num_position_shares)
            along = functools.partial(find, pieces=pieces, dims=row_dims, context=row_context(config))
            mixing, over = on_mesh(config.mesh, along)(config.loss_fn, params, shared), "rows"
    if mixing is None:
        return None
    if over == "positions":
        cut = f"{axes.num_position_shares} devices along context share"
        what = f"{mixing.what} is not shown to be a (weighted) mean over positions, which {cut}: {mixing.why}"
        return Obstacle(what, mixing.lines, FIX_POSITIONS, mixing.operation, mixing.cause)
    parts = [f"{axes.num_shares} devices"] * (axes.num_shares > 1)
    parts += [f"{config.micro_batches} micro-batches"] * (config.micro_batches > 1)
    cut = " and ".join(parts)
    what = (
        f"{mixing.what} is not shown to be a (weighted) mean over rows, so {cut} could train on another: {mixing.why}"
    )
    return Obstacle(what, mixing.lines, FIX, mixing.operation, mixing.cause)


def _row_cuts(config: StrategyConfig, rows: int) -> list[tuple[int, int]]:
    """Return of how many rows the loss must be the mean over how many pieces: (rows, pieces).

    Rows that do not fill all pieces are evaluated as equal pieces and single rows (`evaluate.Totals`): so the loss of all rows, and
    that of a piece, must be the mean of those of single rows.
    """
    pieces = config.num_row_pieces
    return [(rows, pieces)] if rows % pieces == 0 else [(rows, rows), (rows // pieces, rows // pieces)]


def _experts_elsewhere(
    config: StrategyConfig, layout: Layout, key: PyTree, params: PyTree, batch: PyTree
) -> Obstacle | None:
    """Return where a loss uses leaves of experts, of which each device has its own, otherwise than by sending tokens to them."""

    def traced(params: PyTree, batch: PyTree, key: jax.Array | None) -> list[jax.Array]:
        with analysis():
            return jax.tree.leaves(call(with_rows(row_context(config), config.loss_fn), key, 0, params, batch))

    axis_env = [(axis, size) for axis, size in config.axes.sizes.items() if axis != TENSOR or size == 1]
    jaxpr = on_mesh(config.mesh, jax.make_jaxpr(traced, axis_env=axis_env))(params, batch, key)
    own = [{i: None} if plan.experts else {} for i, plan in enumerate(layout.plans)]
    others = len(jaxpr.jaxpr.invars) - len(own)
    found = {
        leaf: at for marks in leaves_used(jaxpr, [*own, *[{}] * others], but=EXPERTS) for leaf, at in marks.items()
    }
    if not found:
        return None
    lines = [
        layout.plans[leaf].path + ("" if at is None else f": {_line(Op(at))}") for leaf, at in sorted(found.items())
    ]
    what = (
        f"the loss uses {plural(len(found), 'leaf')} of experts outside of so.nn.mixture_of_experts, and each of "
        f"{config.axes.sizes['expert']} devices along expert has its own experts."
    )
    fix = (
        "decay or clip weights in the optax chain; a mesh with expert=1; or separable=True if the loss sends tokens over expert "
        "itself."
    )
    operation = next((_operation(Op(at)) for at in found.values() if at is not None), "")
    return Obstacle(what, tuple(lines), fix, operation)


def as_gathered(config: StrategyConfig, layout: Layout) -> PyTree:
    """Return the parameters as the loss gets them."""

    def one(leaf: jax.ShapeDtypeStruct, plan: LeafPlan) -> jax.ShapeDtypeStruct:
        cast = config.gather_dtype is not None and plan.trainable and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, config.gather_dtype if cast else leaf.dtype)

    leaves = layout.treedef.flatten_up_to(layout.abstract.params)
    return layout.treedef.unflatten([one(*pair) for pair in zip(leaves, layout.plans, strict=True)])


def _with_checked_blocks(caller: str, loss_fn: LossFn) -> LossFn:
    """Return the loss; a block of a model that returns something else than it is given is refused as in the step."""
    model = as_block_model(loss_fn)
    if model is None:
        return loss_fn

    @functools.wraps(model.block)
    def block(one_block: PyTree, x: PyTree, **key: Any) -> PyTree:
        leaves, treedef = jax.tree.flatten(x)
        return treedef.unflatten(leaves_like(caller, leaves, treedef, model.block(one_block, x, **key)))

    return model._replace(block=block)


def _cut(leaf: jax.ShapeDtypeStruct, dim: int | None, pieces: int) -> jax.ShapeDtypeStruct:
    if dim is None:
        return leaf
    return jax.ShapeDtypeStruct((*leaf.shape[:dim], leaf.shape[dim] // pieces, *leaf.shape[dim + 1 :]), leaf.dtype)


def _results(returned: PyTree) -> list[_Result]:
    main, aux = returned, {}
    if isinstance(returned, tuple) and not isinstance(returned, Weighted):
        main, aux = returned
    found = _terms("the loss", main)
    for name, value in (aux or {}).items():
        if isinstance(value, Updated):
            for path, leaf in leaves_with_paths(value.values):
                must = "mean" if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact) else "max"
                found.append(_Result(f"new value of {path}", must, (leaf,)))
        else:
            found += _terms(f"metric {name!r}", value)
    return found


def _terms(what: str, value: Any) -> list[_Result]:
    if isinstance(value, Weighted):
        totals, weights = (one if isinstance(one, tuple) else (one,) for one in value)
        return [_Result(what, "ratio", both) for both in zip(totals, weights, strict=True)]
    if isinstance(value, Sum | Max | Min):
        kind = {Sum: "sum", Max: "max", Min: "min"}[type(value)]
        return [_Result(what, kind, (value.value,))]
    return [_Result(what, "mean", (value,))]


def _problem(result: _Result, values: Sequence[Value], pieces: int) -> Mixing | None:
    """Return why a result of the loss is not what it must be."""
    shares: list[float] = []  # the c of W = c (P_0 + ... + P_{n-1})
    ops = [value.op for value in values if isinstance(value, Total | Extreme) and value.op is not None]
    operation, lines = (_operation(ops[0]), (_line(ops[0]),)) if ops else ("", ())
    for leaf, value in zip(result.leaves, values, strict=True):
        value = _as_relation(value, jnp.asarray(leaf).dtype)
        if isinstance(value, Unknown):
            return _unknown(result.what, value)
        if isinstance(value, Split):
            why = "it holds a number for each row, and the mean over devices would be taken of those of different rows."
            return Mixing(result.what, why, operation, lines)
        if result.must in ("max", "min"):
            if not (isinstance(value, Extreme) and value.kind == result.must) and value != Same(
                drawn=getattr(value, "drawn", False)
            ):
                name = "largest" if result.must == "max" else "smallest"
                return Mixing(
                    result.what, f"it is not shown to be the {name} of what the pieces give.", operation, lines
                )
            return None
        if isinstance(value, Extreme):
            return Mixing(result.what, WHY["mixes"], operation, lines)
        assert isinstance(value, Same | Total)
        shares.append(value.ratio / pieces if isinstance(value, Same) else value.ratio)
    equal = lambda a, b: close(a, b, tolerance_of(jnp.asarray(result.leaves[0]).dtype))  # noqa: E731
    if result.must == "mean" and not equal(shares[0], 1 / pieces):
        summed = equal(shares[0], 1.0)
        return Mixing(
            result.what,
            "it is a sum over rows, where a mean is expected." if summed else WHY["count"],
            operation,
            lines,
        )
    if result.must == "sum" and not equal(shares[0], 1.0):
        return Mixing(result.what, "it is no sum over rows.", operation, lines)
    if result.must == "ratio" and not equal(shares[0], shares[1]):
        why = "its total and its weight do not grow alike with the number of rows, as two sums over rows do, or two means."
        return Mixing(result.what, why, operation, lines)
    return None


def _as_relation(value: Value, dtype: Any) -> Value:
    """Return the relation of a result whose shape has no rows."""
    if not isinstance(value, Known):
        return value
    return relation_of(value, (value.whole.shape, value.piece.shape), 1, dtype)


def _of_positions(why: str) -> str:
    """Return what is said of rows as it is said of positions."""
    if why == WHY["position"]:
        return "a position's part depends on its index on its device, which is not that in the sequence."
    return why.replace("rows", "positions").replace("each row", "each position")


def _unknown(what: str, value: Unknown) -> Mixing:
    lines = [] if value.op is None else [_line(value.op)]
    if value.op is not None and value.use is not None and _operation(value.use) != _operation(value.op):
        lines.append("whose result goes into " + _line(value.use))
    return Mixing(what, WHY[value.why], _operation(value.op), tuple(lines))


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
    """Return the user's line, if there is one, rather than that of a library that it calls.

    What jax keeps traces of, such as its own functions, does not say who called: the call does.
    """
    frames = [
        frame
        for eqn in (op.eqn, *reversed(op.callers))
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
    ]
    return next((frame for frame in frames if not _of_a_library(frame.file_name)), next(iter(frames), None))


def _of_a_library(path: str) -> bool:
    return "site-packages" in path or path.startswith((f"{_HERE.parent / 'nn'}{os.sep}", f"{_HERE}{os.sep}"))
