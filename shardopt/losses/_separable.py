"""Checks that a loss is a (weighted) mean over rows, so that several devices can compute it on
their own rows.

The loss is traced on the whole batch and on one piece of it, with abstract arrays: nothing runs.
`separability._walk` relates the two traces equation by equation. A loss passes only if this proves
that it is a mean. docs/proof.md explains the proof.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax._src.custom_batching import custom_vmap_p

from shardopt.core import (
    Arrays,
    Loss,
    Max,
    Min,
    PyTree,
    Sum,
    Updated,
    Weighted,
    format_error,
    is_inexact,
    leaves_with_paths,
)
from shardopt.core._block_model import LossFn, as_block_model, call
from shardopt.core._trace_context import RowContext
from shardopt.losses._operation_text import operation_line, operation_name
from shardopt.losses._parts import loss_parts
from shardopt.losses._per_row import PerRow
from shardopt.losses._rows import with_rows
from shardopt.mesh import analysis
from shardopt.remat._gathered_block import leaves_like
from shardopt.separability._dependence import LOOP, leaves_used
from shardopt.separability._draws import draws_together
from shardopt.separability._numbers import relation_of_numbers
from shardopt.separability._proof import DifferentTracesError, ProofSettings
from shardopt.separability._relations import (
    REASONS,
    Extreme,
    Known,
    Operation,
    Relation,
    Same,
    Shifted,
    Split,
    Total,
    Unrelated,
    is_drawn,
    is_exactly_same,
)
from shardopt.separability._walk import relate_jaxprs
from shardopt.trace._jaxprs import CUSTOM, equations

CUSTOM_VMAP = "jax.custom_batching.custom_vmap in it may mix rows."
CALLBACK = 'a function outside of jax sees all rows. Use vmap_method="sequential".'
ALL_ROWS_AT_ONCE = ("expand_dims", "broadcast_all", "legacy_vectorized")
"""The values of `vmap_method` with which a callback, or a foreign function, gets all rows together."""
TRAINED_WEIGHT = (
    "{} of so.losses.Weighted depends on the parameters, so the mean has a gradient of the weight."
)
"""The reason of a loss whose weight is trained, to be filled with the name of the weight."""
EXTREMES = {"max": "largest", "min": "smallest"}
"""The results that are the extreme of their pieces, in words."""


class Mixing(NamedTuple):
    """The reason why a loss is not proved to be a mean over rows, or over positions.

    Attributes:
      result: the name of the result of the loss that fails: "the loss", "metric 'accuracy'".
      reason: a sentence.
      operation: the operation that mixes rows, as "reduce_sum at loss.py:12 (clip)"; "" if it is
        not known.
      lines: this operation, and the operation that takes its result if that is the problem, with
        their source lines.
      cause: the error of a loss that cannot be traced on a piece.
    """

    result: str
    reason: str
    operation: str = ""
    lines: tuple[str, ...] = ()
    cause: Exception | None = None


class _Result(NamedTuple):
    """A result of a loss.

    Attributes:
      name: as in `Mixing.result`.
      expected: "mean", "ratio" (of two leaves), "sum", "max" or "min" over rows.
      leaves: its values in the trace, and their types when it is over: a tracer must not outlive it.
    """

    name: str
    expected: str
    leaves: tuple[Any, ...]


class _LossTrace(NamedTuple):
    """A trace of a loss.

    Attributes:
      jaxpr: the trace.
      results: its results: their leaves are the outputs of the jaxpr, in order.
      num_params: the number of arguments of the jaxpr that are parameters. They come first.
    """

    jaxpr: jex.ClosedJaxpr
    results: list[_Result]
    num_params: int

    def by_result(self, of_outputs: Iterable[Any]) -> Iterator[tuple[_Result, list[Any]]]:
        """Yield each result with its part of values that belong to the outputs of the jaxpr."""
        remaining = iter(of_outputs)
        for result in self.results:
            yield result, [next(remaining) for _ in result.leaves]

    def has(self, *names: str) -> bool:
        """Return whether an equation of the trace has one of these names."""
        return any(eqn.primitive.name in names for eqn in equations(self.jaxpr))


class Cut(NamedTuple):
    """How a batch is cut into equal pieces.

    Attributes:
      pieces: n, the number of pieces.
      dims: the dim of each leaf of the batch that is cut, or None for a leaf that all pieces share;
        by default the first dims.
      blocks: the number of blocks of rows. A piece has an equal part of every block. 1 if pieces
        are contiguous.
      positions: the mesh axes of the pieces, if the dims are positions of sequences; () if they are
        rows.
    """

    pieces: int
    dims: Sequence[int | None] | None = None
    blocks: int = 1
    positions: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The name of the entries that are cut."""
        return "positions" if self.positions else "rows"

    def lengths(self, leaves: Sequence[Any]) -> list[int]:
        """Return the lengths of the dims that are cut."""
        return [leaf.shape[dim] for leaf, dim in self.dims_of(leaves) if dim is not None]

    def dims_of(self, leaves: Sequence[Any]) -> list[tuple[Any, int | None]]:
        """Return the leaves of a batch, each with the dim that is cut."""
        if self.dims is None:
            return [(leaf, 0 if leaf.ndim else None) for leaf in leaves]
        return list(zip(leaves, self.dims, strict=True))


@dataclasses.dataclass(frozen=True)
class LossCall:
    """How a loss is called when it is traced.

    Attributes:
      caller: the function that the user called, for messages.
      key: a random key as shape and dtype, for a loss that takes one.
      training: whether the loss is differentiated, so that derivative rules count.
      context: the context of `gather_batch`, `batch_mean` and `batch_sum` on a piece; None if a
        piece knows no other rows.
      axis_sizes: the sizes of the mesh axes that the loss may name.
    """

    caller: str = "loss_fn"
    key: jax.Array | None = None
    training: bool = True
    context: RowContext | None = None
    axis_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def row_axes(self, pieces: int) -> tuple[str, ...]:
        """Return the axes that so many pieces are spread over, in the order of the pieces."""
        if self.context is None or self.context.devices != pieces:
            return ()
        return self.context.axes

    @property
    def other_axes(self) -> frozenset[str]:
        """The axes that divide the work of every piece in the same way."""
        return frozenset(self.axis_sizes) - frozenset(
            () if self.context is None else self.context.axes
        )

    def on_whole_batch(self, pieces: int) -> "LossCall":
        """Return the call on the whole batch, for a call on one of so many pieces."""
        context = self.context and self.context._replace(devices=1, micro_batches=1, refused=None)
        sizes = {
            axis: 1 if axis in self.row_axes(pieces) else size
            for axis, size in self.axis_sizes.items()
        }
        return dataclasses.replace(self, context=context, axis_sizes=sizes)


def find_mixing(
    loss_fn: LossFn, params: PyTree, batch: PyTree, cut: Cut, loss_call: LossCall | None = None
) -> Mixing | None:
    """Return why a loss is not proved to be the (weighted) mean of the losses of its pieces.

    None if it is.

    Args:
      loss_fn: the loss, or a `BlockModel`.
      params: parameters as shapes and dtypes.
      batch: the whole batch as shapes and dtypes.
      cut: how the batch is cut.
      loss_call: how the loss is called on a piece.
    """
    loss_call = loss_call or LossCall()
    loss_fn = _with_checked_blocks(loss_call.caller, loss_fn)
    leaves, treedef = jax.tree.flatten(batch)
    lengths = cut.lengths(leaves)
    if any(length % (cut.pieces * cut.blocks) for length in lengths):
        return Mixing("the loss", f"its {cut.unit} cannot be cut into {cut.pieces} equal pieces.")
    if isinstance(loss_fn, PerRow) and not cut.positions:
        return _find_row_mixing(loss_fn, params, batch, cut, loss_call)
    # an error on the whole batch is an error of the loss itself, so it is not caught
    whole_trace = _trace_loss(loss_call.on_whole_batch(cut.pieces), loss_fn, params, batch)
    dims = [dim for _, dim in cut.dims_of(leaves)]
    loop_mixing = _find_loop_over_rows(whole_trace, dims)
    if loop_mixing is not None:
        # before the loss is traced on a piece, because such losses take long to trace
        return loop_mixing
    piece_batch = treedef.unflatten([_cut(*pair, cut.pieces) for pair in cut.dims_of(leaves)])
    try:
        piece_trace = _trace_loss(loss_call, loss_fn, params, piece_batch)
    except Exception as error:
        piece_size = f"{lengths[0] // cut.pieces} of the {lengths[0]} {cut.unit}"
        error_line = f"{type(error).__name__}: {error}".splitlines()[0]
        reason = f"a piece is {piece_size}, on which the loss cannot be traced: {error_line}"
        return Mixing("the loss", reason, cause=error)
    mixing = _find_other_result(whole_trace, piece_trace)
    if mixing is not None:
        return mixing
    relations = _argument_relations(whole_trace.num_params, dims, cut.blocks, loss_call.key)
    try:
        mixing = _find_unproved(whole_trace, piece_trace, relations, cut, loss_call)
    except DifferentTracesError as error:
        op = None if error.eqn is None else Operation(error.eqn)
        reason = (
            f"it does other things on {lengths[0]} {cut.unit} than on {lengths[0] // cut.pieces}."
        )
        return _mixing_by("the loss", reason, op)
    if mixing is not None or not loss_call.training:
        return mixing
    return _mixing_by_weight(whole_trace)


def find_mean(loss_fn: LossFn, params: PyTree, batch: PyTree, loss_call: LossCall) -> Mixing | None:
    """Return the first result of a loss that is a plain mean; None if every result says its parts.

    Args:
      loss_fn: the loss.
      params: parameters as shapes and dtypes.
      batch: a batch without a common number of rows, as shapes and dtypes.
      loss_call: how the loss is called.
    """
    for result in _trace_loss(loss_call, loss_fn, params, batch).results:
        if result.expected == "mean":
            return Mixing(result.name, "leaves of a batch differ in rows, so it counts as one row.")
    return None


def _find_other_result(whole_trace: _LossTrace, piece_trace: _LossTrace) -> Mixing | None:
    """Return why the loss has other results on a piece than on the whole batch; None if not."""
    if [result[:2] for result in whole_trace.results] != [
        result[:2] for result in piece_trace.results
    ]:
        return Mixing("the loss", "its results are of other kinds on a piece, or in another order.")
    for result, of_piece in zip(whole_trace.results, piece_trace.results, strict=True):
        if [*map(np.shape, result.leaves)] != [*map(np.shape, of_piece.leaves)]:
            return Mixing(result.name, "it has another shape on a piece than on the whole batch.")
    return None


def _argument_relations(
    num_params: int, dims: Sequence[int | None], blocks: int, key: jax.Array | None
) -> list[Relation]:
    """Return how the arguments of the loss on the whole batch relate to those on a piece."""
    relations: list[Relation] = [Same()] * num_params
    relations += [Same() if dim is None else Split(dim, blocks) for dim in dims]
    # each piece has another key, so the key is the same only in the sense of `drawn`
    relations += [
        Same(drawn=True, keys=frozenset([(("key", i),)]))
        for i, _ in enumerate(jax.tree.leaves(key))
    ]
    return relations


def _find_row_mixing(
    loss: PerRow, params: PyTree, batch: PyTree, cut: Cut, loss_call: LossCall
) -> Mixing | None:
    """Return why the mean over rows of a loss of one row is not exact on pieces; None if it is.

    The loss of a row is traced once. It sees no other row, so only five things are left to refuse:
    see `per_row`.

    Raises:
      ValueError: if rows are in other dims than the dims that the strategy cuts.
    """
    leaves, treedef = jax.tree.flatten(batch)
    dims = [dim for _, dim in cut.dims_of(leaves)]
    _check_same_dims(loss_call.caller, loss, batch, dims)
    row = treedef.unflatten([_without_dim(*pair) for pair in cut.dims_of(leaves)])
    row_call = dataclasses.replace(
        loss_call,
        context=None,
        axis_sizes={axis: loss_call.axis_sizes[axis] for axis in loss_call.other_axes},
    )

    def loss_of_row(params: PyTree, row: PyTree, rng: jax.Array | None = None) -> Loss:
        return loss.of_row(params, row, rng)

    try:
        trace = _trace_loss(row_call, loss_of_row, params, row)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        return Mixing("the loss", f"a row names a mesh axis that carries rows: {error}.")
    jaxpr = trace.jaxpr
    mixing = _mixing_by_vmap(jaxpr)
    if mixing is not None:
        return mixing
    if not loss_call.training:
        return None
    try:
        backward_pass = _backward_pass(trace)
    except NotImplementedError as error:  # a custom_vmap within a custom derivative
        reason = f"its backward pass cannot be traced for one row: {error}."
        return Mixing("the loss", reason, cause=error)
    mixing = _mixing_by_vmap(backward_pass) or _mixing_by_weight(trace)
    if mixing is not None:
        return mixing
    proof = ProofSettings(relate_jaxprs, cut.pieces, other_axes=row_call.other_axes, training=True)
    # One row is the same on every piece, so only a custom derivative can be unknown.
    relations = relate_jaxprs(proof, jaxpr, jaxpr, [Same()] * len(jaxpr.in_avals))
    unknown = [relation for relation in relations if isinstance(relation, Unrelated)]
    return _mixing_of_unknown("the loss", unknown[0]) if unknown else None


def _mixing_by_vmap(jaxpr: jex.ClosedJaxpr) -> Mixing | None:
    """Return what `vmap` of a loss does not compute row by row; None if there is nothing."""
    for eqn in equations(jaxpr):
        if eqn.primitive is custom_vmap_p:
            return Mixing("the loss", CUSTOM_VMAP)
        if eqn.params.get("vmap_method") in ALL_ROWS_AT_ONCE:
            return Mixing("the loss", CALLBACK)
        if draws_together(eqn):
            return Mixing("the loss", REASONS["keys"])
    return None


def _check_same_dims(caller: str, loss: PerRow, batch: PyTree, dims: Sequence[int | None]) -> None:
    row_dims = jax.tree.leaves(loss.row_dims(batch), is_leaf=lambda dim: dim is None)
    differing = [
        f"{path or 'batch'}: dim {row_dim} in so.per_row, dim {dim} in {caller}"
        for (path, _), row_dim, dim in zip(leaves_with_paths(batch), row_dims, dims, strict=True)
        if row_dim != dim
    ]
    if differing:
        fix = "pass the same batch_dims to both: so.per_row(loss_of_row, batch_dims=[...])."
        problem = "rows of the batch are in other dims than the loss takes them from."
        raise ValueError(format_error(caller, problem, differing, fix))


def _backward_pass(trace: _LossTrace) -> jex.ClosedJaxpr:
    """Return the trace of a loss with its gradient, so that custom derivatives are in it."""

    def gradient(*arguments: PyTree) -> PyTree:
        params = arguments[: trace.num_params]
        batch_and_rng = arguments[trace.num_params :]

        def of_params(*params: PyTree) -> Arrays:
            return jex.jaxpr_as_fun(trace.jaxpr)(*params, *batch_and_rng)

        results, pull_back = jax.vjp(of_params, *params)
        return pull_back([_cotangent(result) for result in results])

    return jax.make_jaxpr(gradient)(*trace.jaxpr.in_avals)


def _cotangent(result: jax.Array) -> Any:
    if is_inexact(result):
        return jnp.ones_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)


def _find_unproved(
    whole_trace: _LossTrace,
    piece_trace: _LossTrace,
    relations: Sequence[Relation],
    cut: Cut,
    loss_call: LossCall,
) -> Mixing | None:
    """Return why a result is not proved to be a mean; None if all are.

    Raises:
      DifferentTracesError: if the traces do not have the same equations.
    """
    # derivative rules are traced one by one, which takes longest. So the values are checked without
    # them first.
    has_rules = loss_call.training and whole_trace.has(*CUSTOM)
    for with_derivative_rules in (False, True) if has_rules else (False,):
        proof = ProofSettings(
            relate_jaxprs,
            cut.pieces,
            row_axes=loss_call.row_axes(cut.pieces),
            other_axes=loss_call.other_axes.difference(cut.positions),
            positions=bool(cut.positions),
            training=with_derivative_rules,
        )
        result_relations = relate_jaxprs(proof, whole_trace.jaxpr, piece_trace.jaxpr, relations)
        for result, leaf_relations in piece_trace.by_result(result_relations):
            mixing = _find_problem(result, leaf_relations, cut.pieces)
            if mixing is None:
                continue
            if cut.positions:
                return mixing._replace(reason=_reworded_for_positions(mixing.reason))
            return mixing
    return None


def find_trained_weight(
    loss_fn: LossFn, params: PyTree, batch: PyTree, loss_call: LossCall
) -> str | None:
    """Return the name of a weight of a `Weighted` loss that follows from the parameters, such as
    "the weight"; or None.

    Args:
      loss_fn: the loss, or a `BlockModel`.
      params: parameters as shapes and dtypes.
      batch: the batch as shapes and dtypes.
      loss_call: how the loss is called.
    """
    return _trained_weight_name(_trace_loss(loss_call, loss_fn, params, batch))


def _trace_loss(loss_call: LossCall, loss_fn: LossFn, params: PyTree, batch: PyTree) -> _LossTrace:
    results: list[_Result] = []
    context = loss_call.context

    def traced_loss(params: PyTree, batch: PyTree, key: jax.Array | None) -> Arrays:
        with analysis():
            returned = call(
                loss_fn if context is None else with_rows(context, loss_fn), key, 0, params, batch
            )
        loss_parts(loss_call.caller, returned, 1)  # raises if this is not a loss
        named = _named_results(returned)
        results[:] = [
            result._replace(leaves=tuple(map(jax.typeof, result.leaves))) for result in named
        ]
        return [jnp.asarray(leaf) for result in named for leaf in result.leaves]

    jaxpr = jax.make_jaxpr(traced_loss, axis_env=list(loss_call.axis_sizes.items()))(
        params, batch, loss_call.key
    )
    return _LossTrace(jaxpr, results, len(jax.tree.leaves(params)))


def _find_loop_over_rows(trace: _LossTrace, dims: Sequence[int | None]) -> Mixing | None:
    """Return why the loss is no mean if a result follows from a loop whose number of turns follows
    from rows.
    """
    if not trace.has("while"):
        return None
    arguments: list[dict[int, None]] = [{} for _ in trace.jaxpr.in_avals]
    for i, dim in enumerate(dims):
        if dim is not None:
            arguments[trace.num_params + i] = {i: None}
    used = leaves_used(trace.jaxpr, arguments, mark_loops=True)
    for result, used_by_leaves in trace.by_result(used):
        for leaves in used_by_leaves:
            loop = leaves.get(LOOP)
            if loop is not None:
                return _mixing_by(result.name, REASONS["loop"], Operation(loop))
    return None


def _trained_weight_name(trace: _LossTrace) -> str | None:
    """Return the name of the first weight of the loss that has a gradient.

    None if there is none.
    """
    if not any(result.expected == "ratio" for result in trace.results):
        return None
    # one name for all parameters: a set for each would grow with the square of their number
    arguments = [
        {0: None} if i < trace.num_params else {} for i, _ in enumerate(trace.jaxpr.in_avals)
    ]
    used = leaves_used(trace.jaxpr, arguments, differentiated=True)
    num_weights = 0
    for result, used_by_leaves in trace.by_result(used):
        if result.name == "the loss" and result.expected == "ratio":
            num_weights += 1
            if used_by_leaves[1]:
                return "the weight" if num_weights == 1 else f"weight {num_weights}"
    return None


def _with_checked_blocks(caller: str, loss_fn: LossFn) -> LossFn:
    """Return the loss.

    If it is a `BlockModel`, its blocks check that a result is like the input, as in the step.
    """
    model = as_block_model(loss_fn)
    if model is None:
        return loss_fn

    @functools.wraps(model.block)
    def block(block_params: PyTree, x: PyTree, **key: Any) -> PyTree:
        leaves, treedef = jax.tree.flatten(x)
        return treedef.unflatten(
            leaves_like(caller, leaves, treedef, model.block(block_params, x, **key))
        )

    return model._replace(block=block)


def _without_dim(leaf: jax.ShapeDtypeStruct, dim: int | None) -> jax.ShapeDtypeStruct:
    if dim is None:
        return leaf
    return jax.ShapeDtypeStruct((*leaf.shape[:dim], *leaf.shape[dim + 1 :]), leaf.dtype)


def _cut(leaf: jax.ShapeDtypeStruct, dim: int | None, pieces: int) -> jax.ShapeDtypeStruct:
    if dim is None:
        return leaf
    return jax.ShapeDtypeStruct(
        (*leaf.shape[:dim], leaf.shape[dim] // pieces, *leaf.shape[dim + 1 :]), leaf.dtype
    )


def _named_results(returned: PyTree) -> list[_Result]:
    loss = returned
    metrics = {}
    if isinstance(returned, tuple) and not isinstance(returned, Weighted):
        loss, metrics = returned
    results = _results_of_value("the loss", loss)
    for name, value in (metrics or {}).items():
        if isinstance(value, Updated):
            for path, leaf in leaves_with_paths(value.values):
                expected = "mean" if is_inexact(jnp.asarray(leaf)) else "max"
                results.append(_Result(f"new value of {path}", expected, (leaf,)))
        else:
            results += _results_of_value(f"metric {name!r}", value)
    return results


def _results_of_value(name: str, value: Any) -> list[_Result]:
    if isinstance(value, Weighted):
        totals, weights = (terms if isinstance(terms, tuple) else (terms,) for terms in value)
        return [_Result(name, "ratio", leaves) for leaves in zip(totals, weights, strict=True)]
    if isinstance(value, Sum | Max | Min):
        kind = {Sum: "sum", Max: "max", Min: "min"}[type(value)]
        return [_Result(name, kind, (value.value,))]
    return [_Result(name, "mean", (value,))]


def _find_problem(result: _Result, relations: Sequence[Relation], pieces: int) -> Mixing | None:
    """Return why a result of the loss is not the expected mean, sum or extreme; None if it is."""
    ops = [relation.op for relation in relations if isinstance(relation, Total | Extreme)]
    op = next(filter(None, ops), None)
    resolved = [
        _resolve(relation, leaf.dtype, pieces)
        for leaf, relation in zip(result.leaves, relations, strict=True)
    ]
    for relation in resolved:
        if isinstance(relation, Unrelated):
            return _mixing_of_unknown(result.name, relation)
        reason = _leaf_problem(result.expected, relation)
        if reason:
            return _mixing_by(result.name, reason, op)
    if result.expected in EXTREMES:
        return None
    if result.expected == "ratio" and is_drawn(resolved[1]):
        return _mixing_by(f"the weight of {result.name}", REASONS["drawn"], op)
    shares = [_share(relation, pieces) for relation in resolved]
    reason = _share_problem(result.expected, shares, pieces)
    return _mixing_by(result.name, reason, op) if reason else None


def _leaf_problem(expected: str, relation: Relation) -> str:
    """Return why a leaf is of another kind than its result needs; empty if it is of this kind."""
    if isinstance(relation, Split | Shifted):
        return (
            "it holds a number for each row, and the mean over devices would be taken of those"
            " of different rows."
        )
    if expected not in EXTREMES:
        return "" if isinstance(relation, Same | Total) else REASONS["mixes"]
    if is_drawn(relation):
        return REASONS["drawn"]
    if is_exactly_same(relation) or (isinstance(relation, Extreme) and relation.kind == expected):
        return ""
    return f"it is not shown to be the {EXTREMES[expected]} of what the pieces give."


def _share_problem(expected: str, shares: Sequence[Fraction], pieces: int) -> str:
    """Return why totals with these shares are no mean, sum or ratio; empty if they are."""
    if expected == "mean" and shares[0] == 1 != pieces:
        return "it is a sum over rows, where a mean is expected."
    if expected == "mean" and shares[0] * pieces != 1:
        return REASONS["count"]
    if expected == "sum" and shares[0] != 1:
        return "it is no sum over rows."
    if expected == "ratio" and shares[0] != shares[1]:
        return (
            "its total and its weight do not grow alike with the number of rows, as two sums over"
            " rows do, or two means."
        )
    return ""


def _share(relation: Relation, pieces: int) -> Fraction:
    """Return the c of W = c (P_0 + ... + P_{n-1})."""
    assert isinstance(relation, Same | Total)
    return relation.ratio / pieces if isinstance(relation, Same) else relation.ratio


def _resolve(relation: Relation, dtype: Any, pieces: int) -> Relation:
    """Return the relation of a result.

    Known numbers are replaced by the relation that follows from them.
    """
    if not isinstance(relation, Known):
        return relation
    return relation_of_numbers(
        relation, (relation.whole_values.shape, relation.piece_values.shape), pieces, dtype
    )


def _reworded_for_positions(reason: str) -> str:
    """Return the reason with positions in place of rows."""
    if reason == REASONS["position"]:
        return (
            "a position's part depends on its index on its device, which is not that in the"
            " sequence."
        )
    return reason.replace("rows", "positions").replace("each row", "each position")


def _mixing_by_weight(trace: _LossTrace) -> Mixing | None:
    """Return why a loss whose weight follows from parameters is no mean; None for other losses."""
    weight = _trained_weight_name(trace)
    return Mixing("the loss", TRAINED_WEIGHT.format(weight)) if weight else None


def _mixing_by(result: str, reason: str, op: Operation | None) -> Mixing:
    """Return the reason of a result that an operation, if one is known, takes from being a mean."""
    lines = () if op is None else (operation_line(op),)
    return Mixing(result, reason, operation_name(op), lines)


def _mixing_of_unknown(result: str, relation: Unrelated) -> Mixing:
    use = relation.use
    mixing = _mixing_by(result, REASONS[relation.reason], relation.op)
    if not mixing.lines or use is None or operation_name(use) == mixing.operation:
        return mixing
    return mixing._replace(lines=(*mixing.lines, "whose result goes into " + operation_line(use)))
