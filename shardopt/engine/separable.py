"""Whether a loss is a (weighted) mean over rows, so that the pieces on several devices add up to it; else it is refused.

The loss is traced on abstract rows, twice, and nothing runs: see `separability.analysis`. Only where the trace cannot
tell, numbers are compared: see `separable_numbers`. Backward rules of `jax.custom_vjp` are followed as far as they can
be traced (`separability.backward`); numbers do not look at them, `so.check` does.
"""

import functools
import linecache
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import source_info_util
from jax.core import Tracer

from shardopt.collectives.per_device import TENSOR
from shardopt.core.block_model import LossFn, as_block_model, call, takes_rng
from shardopt.core.errors import NotSeparableError, format_error, plural
from shardopt.core.types import Max, Min, PyTree, Sum, TreeDef, Updated, Weighted, abstract, leaves_with_paths
from shardopt.engine.batch_dims import resized, sequence_dim
from shardopt.engine.batches import num_rows
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout
from shardopt.engine.loss import loss_parts
from shardopt.engine.rows import RowContext, row_context, with_rows
from shardopt.engine.separable_numbers import deviation
from shardopt.mesh import analysis, on_mesh
from shardopt.partition import LeafPlan
from shardopt.remat.gathered_block import leaves_like
from shardopt.separability.analysis import DifferentTracesError, Scope, follow
from shardopt.separability.arithmetic import part_degree
from shardopt.separability.experts import experts_elsewhere
from shardopt.separability.values import Const, Mixed, Op, Rows, Value, first_mixed, odd, same
from shardopt.separability.values import Sum as RowSum


class Mixing(NamedTuple):
    """Where a loss is no mean over rows, or over positions.

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
    """A result of a loss, and what it must be: "mean", "ratio" (of two leaves), "sum" or "extreme"."""

    what: str
    must: str
    leaves: tuple[Any, ...]


def find_mixing(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    who: str = "loss_fn",
    key: jax.Array | None = None,
    context: RowContext | None = None,
    axis_sizes: Sequence[tuple[str, int]] = (),
    training: bool = True,
    sequence_dim: Callable[[str, int], int | None] | None = None,
) -> Mixing | None:
    """Return where a loss is no (weighted) mean over rows; None if it is shown to be one.

    Args:
      loss_fn: the loss, or a `BlockModel`.
      params: parameters as shapes and dtypes.
      batch: a batch as shapes and dtypes, leaves [rows, ...] with as many rows as one piece has.
      who: the function that the user called, for messages.
      key: a random key as shape and dtype, for a loss that takes one.
      context: what `gather_batch`, `batch_mean` and `batch_sum` are told; without it there are no other rows.
      axis_sizes: mesh axes and their sizes that the loss may name.
      training: whether it is differentiated, so that backward rules of `jax.custom_vjp` count.
      sequence_dim: to look at positions of sequences instead of rows: `sequence_dim(path, ndim)` of a batch leaf.
    """
    loss_fn = _with_checked_blocks(who, loss_fn)
    unit = "rows" if sequence_dim is None else "positions"
    rows_of = lambda path, ndim: 0 if ndim else None  # noqa: E731
    dims = [(sequence_dim or rows_of)(path, leaf.ndim) for path, leaf in leaves_with_paths(batch)]
    leaves, treedef = jax.tree.flatten(batch)
    count = max(leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)
    least, devices = max(count, 2), 1 if context is None else context.devices
    outs: list[_Out] = []

    def traced(params: PyTree, batch: PyTree, key: jax.Array | None, devices: int) -> list[jax.Array]:
        within = context and with_rows(context._replace(devices=devices, tracing=True), loss_fn)
        with analysis():
            returned = call(within or loss_fn, key, 0, params, batch)
        loss_parts(who, returned, num_rows(batch))  # refuses what is no loss
        outs[:] = _outs(returned)
        return [jnp.asarray(leaf) for out in outs for leaf in out.leaves]

    def trace(size: int, devices: int) -> Any:
        resized = treedef.unflatten([_resized(*pair, size) for pair in zip(leaves, dims, strict=True)])
        make = jax.make_jaxpr(traced, static_argnums=3, axis_env=list(axis_sizes))
        return make(params, resized, key, devices)

    # Twice the rows on half the devices: what follows from the whole batch alone stays the same, its size included.
    sizes, first = (least, 2 * least), trace(least, 2 * devices)
    try:
        jaxprs = first, trace(2 * least, devices)
    except Exception as error:
        why = (
            f"it cannot be traced on {2 * least} {unit}, so nothing can be said of it: {type(error).__name__}: {error}"
        )
        return Mixing("the loss", why.splitlines()[0], "", (), sure=False)
    none = (0.0,)
    shared = [Const(none) for _ in jax.tree.leaves(params)]
    rowwise: list[Value] = [Const(none) if dim is None else Rows(dim, none) for dim in dims]
    drawn = [Const(none, anywhere=True) for _ in jax.tree.leaves(key)]
    together = context.axes if context is not None and context.micro_batches == 1 else ()
    try:
        scope = Scope(sizes, frozenset(together), sequence_dim is not None, training)
        found = follow(scope, jaxprs, [*shared, *rowwise, *drawn])
    except DifferentTracesError as error:
        op = None if error.eqn is None else Op(error.eqn)
        why = f"it does other things on {sizes[0]} {unit} than on {sizes[1]}."
        return Mixing("the loss", why, _operation(op), () if op is None else (_line(op),), sure=False)
    values = iter(found)
    problems = [_problem(out, [next(values) for _ in out.leaves], sizes) for out in outs]
    problems = sorted((one for one in problems if one is not None), key=lambda one: not one.sure)
    if not problems:
        return None
    return problems[0] if unit == "rows" else problems[0]._replace(why=_of_positions(problems[0].why))


FIX = (
    'view="global", which is exact for every loss; or so.gather_batch, so.batch_mean or so.batch_sum for what a row needs '
    "of the whole batch, and so.Weighted for a normaliser that depends on the rows; or separable=True if you know better."
)


def check_separable(config: StrategyConfig, layout: Layout, params: PyTree, batch: PyTree, *, training: bool) -> bool:
    """Refuse a loss whose pieces, on several devices or in micro-batches, do not add up to that of the whole batch.

    Returns whether that is settled: not where only numbers can tell, and arguments are abstract.

    Args:
      config: of the step; of evaluation, its `of_evaluation`.
      layout: of the parameters.
      params: the parameters; where the trace cannot tell, the loss is run on some rows.
      batch: a global batch.
      training: whether the loss gets a random key, if it takes one.

    Raises:
      NotSeparableError: if the loss is no (weighted) mean over rows.
    """
    if config.local_updates is not None and config.local_updates.warmup_steps:
        config = config._replace(sync_gradients=True)
    if config.view == "global" or config.num_pieces == 1 or config.separable:
        return True
    axes = config.axes
    shares = math.prod(axes.sizes[axis] for axis in axes.rows) * config.micro_batches
    find = functools.partial(
        find_mixing,
        who=config.strategy,
        key=jax.eval_shape(lambda: jax.random.key(0)) if training and takes_rng(config.loss_fn) else None,
        axis_sizes=[(axis, size) for axis, size in axes.sizes.items() if axis != TENSOR or size == 1],
        training=training,
    )
    rows = max(1, num_rows(batch) // shares)
    piece = resized(config, abstract(batch), rows=rows, position_shares=axes.num_position_shares)
    given = config.loss_fn, as_gathered(config, layout), piece
    if any(plan.experts for plan in layout.plans) and axes.sizes["expert"] > 1:
        _refuse_experts_elsewhere(config, layout, find.keywords["key"], *given)
    if axes.num_position_shares > 1:
        along = functools.partial(find, sequence_dim=functools.partial(sequence_dim, config))
        _refuse_mixed_positions(config, on_mesh(config.mesh, along)(*given))
    mixing = on_mesh(config.mesh, functools.partial(find, context=row_context(config)))(*given)
    if mixing is None:
        return True
    if not mixing.sure:
        if any(isinstance(leaf, jax.ShapeDtypeStruct | Tracer) for leaf in jax.tree.leaves((params, batch))):
            return False  # lowered for abstract arguments: nothing is trained
        numbers = deviation(config, params, batch, shares)
        if numbers is None:
            return True
        mixing = mixing._replace(why=f"{mixing.why} {numbers}")
    cut = [f"{axes.num_shares} devices"] * (axes.num_shares > 1)
    cut += [f"{config.micro_batches} micro-batches"] * (config.micro_batches > 1)
    what = (
        f"{mixing.what} is not a (weighted) mean over rows, so {' and '.join(cut)} would train on another: {mixing.why}"
    )
    raise NotSeparableError(format_error(config.strategy, what, mixing.lines, FIX), operation=mixing.operation)


FIX_POSITIONS = (
    "so.nn.attention for what a position needs of the others, and so.nn.positions for its index; inputs and targets as leaves "
    'of their own rather than shifted in the loss; view="global"; a mesh with context=1; or separable=True if you know better.'
)


def _refuse_mixed_positions(config: StrategyConfig, mixing: Mixing | None) -> None:
    """Refuse a loss that mixes positions of a sequence otherwise than by `so.nn.attention`.

    Numbers are not asked: a piece of a sequence alone is no loss to compare with.
    """
    if mixing is None:
        return
    what = (
        f"{mixing.what} is not shown to be a (weighted) mean over positions, which {config.axes.num_position_shares} devices "
        f"along context share: {mixing.why}"
    )
    raise NotSeparableError(
        format_error(config.strategy, what, mixing.lines, FIX_POSITIONS), operation=mixing.operation
    )


def _refuse_experts_elsewhere(
    config: StrategyConfig, layout: Layout, key: PyTree, loss_fn: LossFn, params: PyTree, batch: PyTree
) -> None:
    """Refuse a loss that uses leaves of experts, of which each device has its own, otherwise than by sending tokens to them."""

    def traced(params: PyTree, batch: PyTree, key: jax.Array | None) -> list[jax.Array]:
        with analysis():
            return jax.tree.leaves(
                call(with_rows(row_context(config)._replace(tracing=True), loss_fn), key, 0, params, batch)
            )

    axis_env = [(axis, size) for axis, size in config.axes.sizes.items() if axis != TENSOR or size == 1]
    jaxpr = on_mesh(config.mesh, jax.make_jaxpr(traced, axis_env=axis_env))(params, batch, key)
    own = [{i: None} if plan.experts else {} for i, plan in enumerate(layout.plans)]
    others = len(jaxpr.jaxpr.invars) - len(own)
    found = {leaf: at for marks in experts_elsewhere(jaxpr, [*own, *[{}] * others]) for leaf, at in marks.items()}
    if not found:
        return
    lines = [
        layout.plans[leaf].path + ("" if at is None else f": {_line(Op(at))}") for leaf, at in sorted(found.items())
    ]
    what = (
        f"the loss uses {plural(len(found), 'leaf')} of experts outside of so.nn.mixture_of_experts, and each of "
        f"{config.axes.sizes['expert']} devices along expert has its own experts."
    )
    fix = (
        "decay or clip weights in the optax chain; view='global'; a mesh with expert=1; or separable=True if the loss sends "
        "tokens over expert itself."
    )
    operation = next((_operation(Op(at)) for at in found.values() if at is not None), "")
    raise NotSeparableError(format_error(config.strategy, what, lines, fix), operation=operation)


class SeparableOnce:
    """`check_separable`, once for each structure of parameters and batch.

    Args:
      config: of the step; of evaluation, its `of_evaluation`.
      training: whether the loss gets a random key, if it takes one.
    """

    def __init__(self, config: StrategyConfig, *, training: bool):
        self._config, self._training = config, training
        self._settled: list[tuple[Layout, TreeDef]] = []

    def __call__(self, layout: Layout, params: PyTree, batch: PyTree) -> None:
        """Check the loss, if it is not known of this layout and such a batch."""
        structure = jax.tree.structure(batch)
        if any(one is layout and other == structure for one, other in self._settled):
            return
        if check_separable(self._config, layout, params, batch, training=self._training):
            self._settled.append((layout, structure))


def as_gathered(config: StrategyConfig, layout: Layout) -> PyTree:
    """Return the parameters as the loss gets them."""

    def one(leaf: jax.ShapeDtypeStruct, plan: LeafPlan) -> jax.ShapeDtypeStruct:
        cast = config.gather_dtype is not None and plan.trainable and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, config.gather_dtype if cast else leaf.dtype)

    leaves = layout.treedef.flatten_up_to(layout.abstract.params)
    return layout.treedef.unflatten([one(*pair) for pair in zip(leaves, layout.plans, strict=True)])


def _with_checked_blocks(who: str, loss_fn: LossFn) -> LossFn:
    """Return the loss; a block of a model that returns something else than it is given is refused as in the step."""
    model = as_block_model(loss_fn)
    if model is None:
        return loss_fn

    @functools.wraps(model.block)
    def block(one_block: PyTree, x: PyTree, **key: Any) -> PyTree:
        leaves, treedef = jax.tree.flatten(x)
        return treedef.unflatten(leaves_like(who, leaves, treedef, model.block(one_block, x, **key)))

    return model._replace(block=block)


def _resized(leaf: jax.ShapeDtypeStruct, dim: int | None, size: int) -> jax.ShapeDtypeStruct:
    if dim is None:
        return leaf
    return jax.ShapeDtypeStruct((*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]), leaf.dtype)


def _outs(returned: PyTree) -> list[_Out]:
    main, aux = returned, {}
    if isinstance(returned, tuple) and not isinstance(returned, Weighted):
        main, aux = returned
    found = _terms("the loss", main)
    for name, value in (aux or {}).items():
        if isinstance(value, Updated):
            for path, leaf in leaves_with_paths(value.values):
                must = "mean" if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact) else "extreme"
                found.append(_Out(f"new value of {path}", must, (leaf,)))
        else:
            found += _terms(f"metric {name!r}", value)
    return found


def _terms(what: str, value: Any) -> list[_Out]:
    if isinstance(value, Weighted):
        totals, weights = (one if isinstance(one, tuple) else (one,) for one in value)
        return [_Out(what, "ratio", both) for both in zip(totals, weights, strict=True)]
    if isinstance(value, Sum | Max | Min):
        return [_Out(what, "sum" if isinstance(value, Sum) else "extreme", (value.value,))]
    return [_Out(what, "mean", (value,))]


def _problem(out: _Out, values: Sequence[Value], sizes: Sequence[int]) -> Mixing | None:
    if mixed := first_mixed(values):
        extreme = mixed.op.eqn.primitive.name in EXTREMES and mixed.use is None
        return None if out.must == "extreme" and extreme else _mixing(out.what, mixed)
    degrees, sums = [], [value for value in values if isinstance(value, RowSum)]
    operation, lines = _operation(sums[0].op) if sums else "", tuple(_line(one.op) for one in sums)
    for value in values:
        if isinstance(value, Rows):
            why = "it holds a number for each row, and the mean over devices would be taken of those of different rows."
            return Mixing(out.what, why, operation, lines, sure=True)
        if isinstance(value, RowSum) or (isinstance(value, Const) and not value.zero):
            degrees.append(part_degree(sizes, value))
    if out.must == "extreme":
        why = "it is made of a sum over rows, whose largest or smallest on any device is not that of the batch."
        return Mixing(out.what, why, operation, lines, sure=True) if sums else None
    mean = tuple(-1.0 if size != sizes[0] else 0.0 for size in sizes[1:])
    if out.must == "mean":
        if wrong := [one for one in degrees if odd(one) or not same(one, mean)]:
            of_sum = all(abs(one) < 1e-3 for one in wrong[0])
            why = "it is a sum over rows, where a mean is expected." if of_sum else WHY["count"]
            return Mixing(out.what, why, operation, lines, sure=True)
    elif out.must == "sum":
        if any(odd(one) or not same(one, (0.0,)) for one in degrees):
            return Mixing(out.what, "it is no sum over rows.", operation, lines, sure=True)
    elif any(odd(one) for one in degrees) or not same(*degrees):
        why = "its total and its weight do not grow alike with the number of rows, as two sums over rows do, or two means."
        return Mixing(out.what, why, operation, lines, sure=True)
    return None


EXTREMES = ("reduce_max", "reduce_min", "reduce_or", "reduce_and")

WHY = {
    "mixes": "rows are mixed.",
    "position": "a row's part depends on its position in the batch.",
    "count": "it depends on the number of rows otherwise than a mean over them.",
    "backward": "the backward rule of a jax.custom_vjp mixes rows, or depends on their number.",
    "unknown": "nothing is known of what an operation does to rows.",
}


def _of_positions(why: str) -> str:
    """Return what is said of rows as it is said of positions."""
    if why == WHY["position"]:
        return "a position's part depends on its index on its device, which is not that in the sequence."
    return why.replace("rows", "positions").replace("each row", "each position")


def _mixing(what: str, value: Mixed) -> Mixing:
    lines = [_line(value.op)]
    if value.use is not None and _operation(value.use) != _operation(value.op):
        lines.append("whose result goes into " + _line(value.use))
    return Mixing(what, WHY[value.why], _operation(value.op), tuple(lines), sure=value.why != "unknown")


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
    return next((frame for frame in frames if "site-packages" not in frame.file_name), next(iter(frames), None))
