"""`Workload`: the flops and bytes of training a model, input of every prediction.

`trace` computes it from a model.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from shardopt.core import (
    Arrays,
    PyTree,
    Rules,
    Weighted,
    abstract,
    calling,
    inexact_indices,
    leaves_with_paths,
    plural,
    type_error,
    value_error,
    with_leaves,
)
from shardopt.core._block_model import BLOCKS, BlockModel, as_block_model, call, outer_of
from shardopt.core._block_remat import Named, read_remat
from shardopt.core._rounding import Rounding
from shardopt.mesh import analysis
from shardopt.partition._rules import match_rules, matches, patterns_of
from shardopt.remat._split_backward import split_backward
from shardopt.trace._jaxprs import cost_of
from shardopt.trace._marks import (
    ATTENTION,
    EXPERTS,
    GROUPED_PRODUCT,
    LOOKED_UP,
    has_mark,
    marks_in,
    named_values,
)
from shardopt.trace._parts import product_flops


class Bytes(NamedTuple):
    """Bytes of activations, divided by whether the tensor axis shards them.

    Attributes:
      replicated: bytes that every device of the tensor axis holds.
      sharded: bytes that are divided over the devices of the tensor axis.
    """

    replicated: float = 0.0
    sharded: float = 0.0

    def on(self, tensor: int) -> float:
        """Return the bytes on one of `tensor` devices."""
        return self.replicated + self.sharded / tensor

    def plus(self, other: "Bytes", times: float = 1.0) -> "Bytes":
        """Return the sum of both, with `other` counted `times` times."""
        return Bytes(
            self.replicated + times * other.replicated, self.sharded + times * other.sharded
        )


class NamedValue(NamedTuple):
    """The cost and the saving of `remat="save:NAME"`, for one block and one row.

    Attributes:
      name: the name given by `jax.ad_checkpoint.checkpoint_name`.
      bytes: bytes of the values of that name.
      flops: flops of the inner products that do not run again. Flops of several names are assumed
        to add up.
      tensor_sums: all-reduces of `boundary_bytes` over tensor that do not run again.
    """

    name: str
    bytes: Bytes
    flops: float
    tensor_sums: int


class Recompute(NamedTuple):
    """The bytes that remat stores and the work that it repeats, for one block and one row.

    Attributes:
      kept: bytes that are stored in addition to the input of the block.
      flops: flops of the inner products that run again.
      tensor_sums: all-reduces of `boundary_bytes` over tensor that run again.
    """

    kept: Bytes
    flops: float
    tensor_sums: int


class AttentionSizes(NamedTuple):
    """The sizes of the calls of `so.nn.attention` in one block and one row.

    Attributes:
      queries: bytes of the queries. The result has as many.
      keys: bytes of the keys. The values have as many.
      kv_heads: heads of keys and values.
      scores: bytes of scores that a block stores, as part of its `residuals`. Over context,
        attention runs tile by tile and stores none.
      flops: flops of attention, as part of `block_flops`; 0 if nothing is known.
    """

    queries: float
    keys: float
    kv_heads: int
    scores: float = 0.0
    flops: float = 0.0


class ExpertSizes(NamedTuple):
    """The sizes of the calls of `so.nn.mixture_of_experts` in one block and one row.

    Attributes:
      num_experts: E.
      top_k: K, experts of a token.
      tokens: bytes of the tokens that are sent to experts, each counted once.
      buffers: bytes of the tokens at their experts, of all tokens or of one chunk, if every device
        gets equally many.
      working: temporary bytes at the experts while a block is differentiated, as part of
        `Workload.working`.
      exchange_working: temporary bytes next to `buffers` while gradients travel over an expert
        axis; the larger of this and `working` counts there.
      saves_buffers: whether `buffers` are residuals of the block; otherwise they are part of
        `Workload.working`.
    """

    num_experts: int
    top_k: int
    tokens: float
    buffers: Bytes = Bytes()
    working: Bytes = Bytes()
    exchange_working: Bytes = Bytes()
    saves_buffers: bool = True


class Workload(NamedTuple):
    """The parameters of a model made of blocks, and the flops and bytes of one example (row) of its
    batch.

    `so.planning.trace` makes a workload of any `BlockModel`;
    `so.planning.Transformer(...).workload()` makes one of sizes. All costs are assumed to be
    proportional to the number of rows: examples must not read each other.

    Attributes:
      name: name for tables.
      params: abstract parameters, `{"blocks": leaves stacked [L, ...], **outer}`.
      rules: tensor rules, as strategies take them.
      tokens: positions of a row, for tokens per second; 1 if a row has no positions.
      block_flops: multiplications and additions of inner products in the forward pass of one block
        and one row. The backward pass has twice as many.
      recompute_flops: the part of `block_flops` that remat runs again. Products that the backward
        pass does not read, such as the last product of a residual branch, are not among them.
      ends_flops: forward flops of embed and loss together.
      boundary_bytes: bytes of the activations that one row passes from block to block.
      residuals: bytes that one block stores for one row from forward to backward, if nothing is
        recomputed.
      stage_residuals: the same if elementwise operations are computed again, as strategies do.
      deferred: bytes that the backward pass of a block stores for its weight gradient, if the
        schedule splits that off.
      working: temporary bytes while one block is differentiated, in addition to its `residuals`.
      ends_working: temporary bytes while the loss of a row is differentiated.
      tensor_sums: all-reduces of `boundary_bytes` over tensor, (in the forward of a block, in its
        backward).
      model_flops: flops of a training step and one row by the convention of model flops
        utilisation: recomputation is not counted, causal attention is counted as half.
      itemsize: bytes of one number in the dtype that blocks compute with.
      loss_reads: key paths of the outer parameters that the loss reads; only embed reads the
        others.
      named: the values of a block that have a name, which remat can save.
      tables: key paths of the outer parameters that `so.nn.embedding` reads in their shards; see
        `BlockModel`.
      table_ids: how many ids of a row are looked up in the tables.
      table_numbers: how many numbers these lookups return.
      rounded: the weights of blocks that are gathered in 8 bits; see `BlockModel`.
      attention: sizes of attention, for splitting positions over context; None if nothing is known.
      experts: sizes of the experts, for an expert axis; None without experts.
    """

    name: str
    params: PyTree
    rules: Rules
    tokens: int
    block_flops: float
    recompute_flops: float
    ends_flops: float
    boundary_bytes: int
    residuals: Bytes
    stage_residuals: Bytes
    deferred: Bytes
    working: Bytes
    ends_working: Bytes
    tensor_sums: tuple[int, int]
    model_flops: float
    itemsize: int
    loss_reads: tuple[str, ...]
    named: tuple[NamedValue, ...] = ()
    tables: tuple[str, ...] = ()
    table_ids: float = 0.0
    table_numbers: float = 0.0
    rounded: Mapping[str, Rounding] = MappingProxyType({})
    attention: AttentionSizes | None = None
    experts: ExpertSizes | None = None

    @property
    def num_blocks(self) -> int:
        """L, the stacked blocks."""
        return jax.tree.leaves(self.params["blocks"])[0].shape[0]

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def tiled(self) -> "Workload":
        """The same workload if attention runs tile by tile and stores no scores, as over a context
        axis.
        """
        scores = 0.0 if self.attention is None else self.attention.scores
        stored = {name: getattr(self, name) for name in ("residuals", "stage_residuals", "working")}
        return self._replace(
            **{
                name: bytes._replace(sharded=max(bytes.sharded - scores, 0.0))
                for name, bytes in stored.items()
            }
        )

    def over_experts(self, devices: int, tensor: int = 1) -> "Workload":
        """Return the same workload over an expert axis of X devices.

        A device has room for all tokens that could arrive: X min(K, E/X) / K times as many as in
        equal shares.
        """
        experts = self.experts
        if experts is None or devices == 1:
            return self
        times = min(experts.top_k, experts.num_experts // devices) * devices / experts.top_k
        largest = max(
            experts.working, experts.exchange_working, key=lambda temporary: temporary.on(tensor)
        )
        working = self.working.plus(largest, times).plus(experts.working, -1)
        if not experts.saves_buffers:
            return self._replace(working=working.plus(experts.buffers, times - 1))
        stored = {
            name: getattr(self, name) for name in ("residuals", "stage_residuals", "deferred")
        }
        enlarged = {name: bytes.plus(experts.buffers, times - 1) for name, bytes in stored.items()}
        return self._replace(**enlarged, working=working)

    @calling("plan")
    def recompute(self, remat: bool | str) -> Recompute | None:
        """Return the bytes that remat stores and the work that it repeats; None for False.

        Args:
          remat: True stores the input of a block alone, "save:NAME,..." stores the values of these
            names too.

        Raises:
          ValueError: if `remat` is neither, or names values that blocks do not have.
        """
        if remat is False:
            return None
        flops = self.recompute_flops
        sums = max(self.tensor_sums[0] - 1, 0)
        if remat is True:
            return Recompute(Bytes(), flops, sums)
        policy = read_remat(remat)
        if not isinstance(policy, Named) or policy.offload:
            problem = f"remat must be True, False or 'save:NAME,...', got {remat!r}."
            raise value_error(problem, fix="write 'save:qkv,attention', or True for 'full'.")
        known = {value.name: value for value in self.named}
        unknown = [name for name in policy.names if name not in known]
        if unknown:
            problem = (
                f"remat names {plural(len(unknown), 'value')} that the blocks of {self.name} do not"
                " have."
            )
            fix = (
                f"use some of {', '.join(known)}."
                if known
                else "use True, or name values with checkpoint_name."
            )
            raise value_error(problem, unknown, fix)
        saved = [known[name] for name in policy.names]
        return Recompute(
            functools.reduce(Bytes.plus, (value.bytes for value in saved), Bytes()),
            max(flops - sum(value.flops for value in saved), 0.0),
            max(sums - sum(value.tensor_sums for value in saved), 0),
        )

    def remat_choices(self) -> tuple[bool | str, ...]:
        """Return the values of `remat` to try, from storing all residuals (False) to storing the
        input alone (True).

        The values between save the names of a block, those first that avoid most flops per byte.
        """
        useful = [value for value in self.named if value.flops > 0 and value.bytes.on(1) > 0]
        useful.sort(key=lambda value: value.flops / value.bytes.on(1), reverse=True)
        name_lists = [
            ",".join(value.name for value in useful[:count]) for count in range(len(useful), 0, -1)
        ]
        return False, *(f"save:{names}" for names in name_lists), True


@calling("plan")
def tensor_sums(params: PyTree, rules: Rules) -> tuple[int, int]:
    """Return how many sums over tensor the (forward, backward) pass of a block needs by its rules.

    A weight that is sharded on its first dim, the contracted one, needs a sum of partial results in
    the forward pass. A weight that is sharded on another dim needs a sum of partial input gradients
    in the backward pass. The first dim of expert leaves counts experts and is skipped. Input
    gradients of all expert leaves are summed in one all-reduce.
    """
    leaves = leaves_with_paths(params)
    specs = match_rules(
        rules, [(path, leaf.shape[path.startswith("blocks/") :]) for path, leaf in leaves]
    )
    experts = patterns_of(rules, "experts")
    tensor_specs = [
        (matches(experts, path), tuple(spec))
        for (path, _), spec in zip(leaves, specs, strict=True)
        if path.startswith("blocks/") and "tensor" in tuple(spec)
    ]
    row_sharded = sum(spec[is_expert] == "tensor" for is_expert, spec in tensor_specs)
    column_sharded = [is_expert for is_expert, spec in tensor_specs if spec[is_expert] != "tensor"]
    return row_sharded, column_sharded.count(False) + (True in column_sharded)


@calling("trace")
def trace(
    model: BlockModel,
    abstract_params: PyTree,
    abstract_batch: PyTree,
    *,
    rules: Rules = (),
    name: str = "model",
    tokens: int = 1,
) -> Workload:
    """Return the costs of one row of a model's batch.

    The model is traced for one row and for two; nothing runs.

    Args:
      model: a `BlockModel`, or its `loss_fn`.
      abstract_params: the parameters of the model, or their shapes: `jax.eval_shape(init, key)`.
      abstract_batch: a batch, or its shapes, with rows as the first dim of every leaf. The number
        of rows does not matter.
      rules: the rules, as strategies take them.
      name: name for tables.
      tokens: positions of a row.

    Returns:
      A `Workload`.

    Raises:
      TypeError: if `model` is not a `BlockModel`.
      ValueError: if the parameters have no "blocks", a batch leaf has no rows, or embed looks up
        none of the model's tables.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> model = so.BlockModel(
      ...     embed=lambda outer, batch: batch["x"],
      ...     block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
      ...     loss=lambda outer, x, batch: jnp.mean(x**2),
      ... )
      >>> shapes = {"blocks": {"up": jnp.zeros((3, 8, 32)), "down": jnp.zeros((3, 32, 8))}}
      >>> work = trace(model, shapes, {"x": jnp.zeros((4, 8))})
      >>> work.num_blocks, work.block_flops, work.boundary_bytes
      (3, 1024.0, 32)

    Note:
      Flops are counted in the inner products and convolutions of the trace, forward and backward.
      The residuals of a block are the residuals of `jax.vjp` that are not weights. Over tensor,
      arrays with the shape of a block's output count as replicated, and so do statistics of it; all
      others count as sharded. That is true for a block whose first product is sharded by column and
      whose second product is sharded by row.
    """
    blocks = as_block_model(model)
    if blocks is None:
        fix = (
            "use so.BlockModel(embed, block, loss), or describe a shape with"
            " so.planning.Transformer."
        )
        raise type_error(f"model must be a BlockModel, got {type(model).__name__}.", fix=fix)
    if not isinstance(abstract_params, dict) or BLOCKS not in abstract_params:
        fix = 'pass {"blocks": leaves stacked [L, ...], **outer}.'
        raise value_error("the parameters of a BlockModel must be a dict with 'blocks'.", fix=fix)
    if not all(map(np.ndim, jax.tree.leaves(abstract_batch))):
        fix = "give every leaf of the batch its rows as first dim."
        raise value_error("a leaf of the batch has no dim.", fix=fix)
    params = abstract(abstract_params)
    functions = _ModelFunctions.of(blocks, params)
    one_row, two_rows = (
        _row_costs(functions, _with_rows(abstract_batch, count)) for count in (1, 2)
    )
    row = jax.tree.map(lambda one_row, two_rows: max(two_rows - one_row, 0), one_row, two_rows)
    num_blocks = jax.tree.leaves(params[BLOCKS])[0].shape[0]
    batch = _with_rows(abstract_batch, 1)
    named = row.pop("named")
    sums = _count_named_sums(functions, batch)
    embed = jax.make_jaxpr(functions.embed)(functions.outer, batch, functions.key)
    looked_up = named_values(embed).get(LOOKED_UP, []) if blocks.tables else []
    if blocks.tables and not looked_up:
        fix = "read them by so.nn.embedding, or leave tables out."
        raise value_error("embed looks up none of BlockModel.tables.", blocks.tables, fix)
    return Workload(
        name=name,
        params=params,
        rules=rules,
        tokens=tokens,
        **row,
        named=tuple(
            NamedValue(value, named[value][0], named[value][1], count)
            for value, count in sums.items()
        ),
        tensor_sums=tensor_sums(params, rules),
        model_flops=3.0 * (num_blocks * row["block_flops"] + row["ends_flops"]),
        itemsize=max(leaf.dtype.itemsize for leaf in jax.tree.leaves(functions.boundary(batch))),
        loss_reads=_loss_reads(functions, batch),
        tables=blocks.tables,
        table_ids=float(sum(value.size / value.shape[-1] for value in looked_up)),
        table_numbers=float(sum(value.size for value in looked_up)),
        rounded=blocks.rounded,
        attention=_attention(functions, batch),
        experts=_experts(functions, batch) if patterns_of(rules, "experts") else None,
    )


class _ModelFunctions(NamedTuple):
    """The three functions of a model, each with a key as last argument, and the shapes of their
    weights.

    The weights have the dtype that the functions compute with.
    """

    embed: Callable[..., PyTree]
    block: Callable[..., PyTree]
    loss: Callable[..., jax.Array]
    outer: PyTree
    weights: PyTree
    key: jax.ShapeDtypeStruct

    @staticmethod
    def of(model: BlockModel, params: PyTree) -> "_ModelFunctions":
        def loss(outer: PyTree, x: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
            value = call(model.loss, key, 0, outer, x, batch)
            value = (
                value[0] if isinstance(value, tuple) and not isinstance(value, Weighted) else value
            )
            return jax.tree.reduce(jnp.add, value.total) if isinstance(value, Weighted) else value

        outer = outer_of(params)
        return _ModelFunctions(
            embed=lambda outer, batch, key: call(model.embed, key, 0, outer, batch),
            block=lambda weights, x, key: call(model.block, key, 0, weights, x),
            loss=loss,
            outer=outer,
            weights=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params[BLOCKS]
            ),
            key=jax.eval_shape(lambda: jax.random.key(0)),
        )

    def boundary(self, batch: PyTree) -> PyTree:
        """Return the shapes of the activations between blocks."""
        return jax.eval_shape(self.embed, self.outer, batch, self.key)


def _row_costs(functions: _ModelFunctions, batch: PyTree) -> dict[str, PyTree]:
    """Return the fields of a `Workload` that are proportional to the number of rows."""
    outer = functions.outer
    weights = functions.weights
    key = functions.key
    x = functions.boundary(batch)
    traced_block, shapes = jax.make_jaxpr(functions.block, return_shape=True)(weights, x, key)

    def block(weights: PyTree, x: PyTree, key: jax.Array) -> PyTree:
        """Do the operations of a block, without its Python: many functions below trace it."""
        return with_leaves(shapes, jaxpr_as_fun(traced_block)(*jax.tree.leaves((weights, x, key))))

    def flops(f: Callable[..., PyTree], *args: PyTree) -> float:
        return float(sum(count_flops(jax.make_jaxpr(f)(*args))))

    def backward(block: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda w, x, dy, key: jax.vjp(lambda w, x: block(w, x, key), w, x)[1](dy)

    def recomputed(policy: Callable[..., bool] | None = None) -> float:
        return (
            flops(backward(jax.checkpoint(block, policy=policy)), weights, x, x, key)
            - backward_flops
        )

    backward_flops = flops(backward(block), weights, x, x, key)
    recompute_flops = recomputed()
    save = jax.checkpoint_policies.save_only_these_names
    named = named_values(traced_block)
    boundary = sum(map(_nbytes, jax.tree.leaves(x)))
    boundary_shapes = {leaf.shape for leaf in jax.tree.leaves(x)}
    residuals = _residuals(block, weights, x, key)
    loss_residuals = _residuals(functions.loss, outer, x, batch, key)
    stage_residuals, deferred = _stage_residuals(block, weights, x)
    return {
        "block_flops": float(sum(count_flops(traced_block))),
        "recompute_flops": recompute_flops,
        "named": {
            name: (
                _split_by_shape(values, boundary_shapes),
                recompute_flops - recomputed(save(name)),
            )
            for name, values in named.items()
        },
        "ends_flops": (
            flops(functions.loss, outer, x, batch, key) + flops(functions.embed, outer, batch, key)
        ),
        "boundary_bytes": boundary,
        "residuals": _split_by_shape(residuals, boundary_shapes),
        "stage_residuals": _split_by_shape(stage_residuals, boundary_shapes),
        "deferred": _split_by_shape(deferred, boundary_shapes),
        "working": Bytes(boundary, max(map(_nbytes, residuals), default=0)),
        "ends_working": Bytes(0, sum(map(_nbytes, loss_residuals))),
    }


def _count_named_sums(functions: _ModelFunctions, batch: PyTree) -> dict[str, int]:
    """Return, for each name, how many of its values have the shape of a block's output: results of
    sums over tensor.
    """
    x = functions.boundary(batch)
    boundary_shapes = {leaf.shape for leaf in jax.tree.leaves(x)}
    named = named_values(jax.make_jaxpr(functions.block)(functions.weights, x, functions.key))
    return {
        name: sum(value.shape in boundary_shapes for value in values)
        for name, values in named.items()
    }


def _attention(functions: _ModelFunctions, batch: PyTree) -> AttentionSizes | None:
    """Return the sizes of a block's calls of `so.nn.attention`; several calls add up."""
    calls = marks_in(_block_jaxpr(functions, batch), ATTENTION)
    if not calls:
        return None
    queries, keys = (sum(_nbytes(_aval(mark.operands[i])) for mark in calls) for i in (0, 1))
    lengths = {_aval(mark.operands[0]).shape[1] for mark in calls}
    residuals = _residuals(
        functions.block, functions.weights, functions.boundary(batch), functions.key
    )
    score_shapes = {(length, length) for length in lengths}
    scores = sum(_nbytes(residual) for residual in residuals if residual.shape[-2:] in score_shapes)
    return AttentionSizes(
        queries, keys, min(_aval(mark.operands[1]).shape[2] for mark in calls), scores
    )


def _experts(functions: _ModelFunctions, batch: PyTree) -> ExpertSizes | None:
    """Return the sizes of a block's calls of `so.nn.mixture_of_experts`; several calls add up."""
    calls = marks_in(_block_jaxpr(functions, batch), EXPERTS)
    if not calls:
        return None
    call_sizes = []
    for mark in calls:
        # weights [E, D, F] each, x [B, T, D], router [D, E]
        inputs = [_aval(v) for v in mark.operands]
        router = next(i for i, array in enumerate(inputs) if array.ndim == 2)
        call_sizes.append(
            (inputs[router].shape[1], mark.data["top_k"], _nbytes(inputs[router - 1]))
        )
    num_experts, top_ks, token_bytes = zip(*call_sizes, strict=True)
    return ExpertSizes(max(num_experts), max(top_ks), float(sum(token_bytes)))


def _block_jaxpr(functions: _ModelFunctions, batch: PyTree) -> ClosedJaxpr:
    """Return the trace of a block, with the layers of `so.nn` as named calls."""
    with analysis():

        def block(*args):
            return functions.block(*args)

        return jax.make_jaxpr(block)(functions.weights, functions.boundary(batch), functions.key)


def _residuals(
    f: Callable[..., PyTree], weights: PyTree, x: PyTree, *other_args: PyTree
) -> list[ShapedArray]:
    """Return the residuals of f without its weights, and without casts and views of its weights."""

    def compute_residuals(weights: PyTree, x: PyTree, other_args: PyTree) -> Arrays:
        _, pullback = jax.vjp(lambda w, x: f(w, x, *other_args), weights, x)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(compute_residuals)(weights, x, other_args).jaxpr
    weight_ids = set(map(id, jaxpr.invars[: len(jax.tree.leaves(weights))]))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _VIEWS and id(eqn.invars[0]) in weight_ids:
            weight_ids.add(id(eqn.outvars[0]))
    return list(
        {
            id(v): _aval(v) for v in jaxpr.outvars if isinstance(v, Var) and id(v) not in weight_ids
        }.values()
    )


_VIEWS = ("convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim")


def _stage_residuals(
    block: Callable[..., PyTree], weights: PyTree, x: PyTree
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """Return the arrays that a pipeline stores until a block's backward, and from there until its
    weight gradient.
    """
    leaves, treedef = jax.tree.flatten(weights)
    inputs, x_treedef = jax.tree.flatten(x)

    def f(weight_leaves: Arrays, x: Arrays) -> Arrays:
        return jax.tree.leaves(
            block(treedef.unflatten(weight_leaves), x_treedef.unflatten(x), jax.random.key(0))
        )

    trained = inexact_indices(leaves)
    passes = split_backward(f, leaves, inputs, trained=trained)
    return passes.residuals, passes.deferred


def _split_by_shape(
    arrays: Iterable[ShapedArray | jax.ShapeDtypeStruct], boundary_shapes: set[tuple[int, ...]]
) -> Bytes:
    """Return the bytes of arrays, replicated for shapes of a block's output or of statistics of it
    (last dim 1).
    """
    shapes = boundary_shapes | {(*shape[:-1], 1) for shape in boundary_shapes}
    sizes = [(array.shape in shapes, _nbytes(array)) for array in arrays]
    replicated = sum(size for is_replicated, size in sizes if is_replicated)
    return Bytes(float(replicated), float(sum(size for _, size in sizes) - replicated))


def _loss_reads(functions: _ModelFunctions, batch: PyTree) -> tuple[str, ...]:
    """Return the key paths of the outer parameters that the loss reads."""
    jaxpr = jax.make_jaxpr(functions.loss)(
        functions.outer, functions.boundary(batch), batch, functions.key
    ).jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    paths = [path for path, _ in leaves_with_paths(functions.outer)]
    return tuple(path for path, v in zip(paths, jaxpr.invars, strict=False) if id(v) in used)


def _with_rows(batch: PyTree, count: int) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), batch
    )


def _nbytes(array: ShapedArray | jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * getattr(array.dtype, "itemsize", 4)


def count_flops(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[float]:
    """Yield the flops of the inner products and convolutions of a jaxpr.

    Scans are multiplied by their length.

    A `while` of unknown length counts once. A `cond` counts as its most expensive branch.
    """
    return (cost_of(eqn, _product_flops) for eqn in jaxpr.eqns)


def _product_flops(eqn: JaxprEqn) -> float | None:
    if eqn.primitive.name == "dot_general":
        return product_flops(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = _aval(eqn.invars[1])
        features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _aval(eqn.outvars[0]).size * kernel.size / features
    if has_mark(eqn, GROUPED_PRODUCT):  # each row is multiplied with the matrix of its group
        return 2.0 * _aval(eqn.invars[0]).size * _aval(eqn.outvars[0]).shape[-1]
    return None


def _aval(v: Var | Literal) -> ShapedArray:
    return cast(ShapedArray, v.aval)
