"""What training a model asks of a machine, in numbers: the input of every prediction, and `trace`, which reads it off a model."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.typing import DTypeLike

from shardopt.core.block_model import BLOCKS, BlockModel, as_block_model, call
from shardopt.core.block_remat import Named, named_values, read_remat
from shardopt.core.errors import format_error, plural
from shardopt.core.jaxprs import equations
from shardopt.core.types import PyTree, Rules, Weighted, leaves_with_paths
from shardopt.mesh import analysis
from shardopt.nn.embedding import NAME as LOOKED_UP
from shardopt.partition.rules import match_rules
from shardopt.remat.split_backward import split_backward
from shardopt.separability.dependence import EXPERTS
from shardopt.separability.walk import ATTENTION


class Bytes(NamedTuple):
    """Bytes of activations, by whether the tensor axis shards them.

    Attributes:
      replicated: on every device of the tensor axis.
      sharded: each device of the tensor axis has its part.
    """

    replicated: float = 0.0
    sharded: float = 0.0

    def on(self, tensor: int) -> float:
        """Return the bytes on one of `tensor` devices."""
        return self.replicated + self.sharded / tensor

    def plus(self, other: "Bytes", times: float = 1.0) -> "Bytes":
        """Return the sum of both, the other so many times."""
        return Bytes(self.replicated + times * other.replicated, self.sharded + times * other.sharded)


class NamedValue(NamedTuple):
    """What `remat="save:NAME"` keeps of one block and one row, and what it spares.

    Attributes:
      name: as `jax.ad_checkpoint.checkpoint_name` gave it.
      bytes: of the values of that name.
      flops: of inner products that are then not run again; those of several names are taken to add up.
      tensor_sums: all-reduces of `boundary_bytes` over tensor that are then not run again.
    """

    name: str
    bytes: Bytes
    flops: float
    tensor_sums: int


class Recompute(NamedTuple):
    """What remat keeps of one block and one row besides its input, and what it runs again.

    Attributes:
      kept: bytes.
      flops: of inner products.
      tensor_sums: all-reduces of `boundary_bytes` over tensor.
    """

    kept: Bytes
    flops: float
    tensor_sums: int


class Attention(NamedTuple):
    """What `so.nn.attention` is given in one block and one row.

    Attributes:
      queries: bytes of the queries, as many as what it returns.
      keys: bytes of the keys, as many as of the values.
      kv_heads: heads of keys and values.
      scores: bytes of them that a block keeps, of its `residuals`; over context, which goes tile by tile, none.
      flops: its part of `block_flops`, 0 if nothing is known.
      kernel_flops: those on TPU instead, forwards and backwards: of splash attention (`splash_flops`) and rotary positions.
    """

    queries: float
    keys: float
    kv_heads: int
    scores: float = 0.0
    flops: float = 0.0
    kernel_flops: tuple[float, float] = (0.0, 0.0)


class Experts(NamedTuple):
    """What `so.nn.mixture_of_experts` is given in one block and one row.

    Attributes:
      leaves: regexes of key paths of their leaves, as strategies take them.
      num_experts: E.
      top_k: K, experts of a token.
      tokens: bytes of the tokens that are sent to experts, each once.
      buffers: what a block holds of tokens at their experts, where each device gets as many: of all tokens, or of a chunk.
      passing: what comes and goes there while it is differentiated, of `working`.
      exchanged: what is there with `buffers` instead while gradients travel over an expert axis.
      kept: whether `buffers` are of what a block keeps for its backward pass, or of `working`.
    """

    leaves: tuple[str, ...]
    num_experts: int
    top_k: int
    tokens: float
    buffers: Bytes = Bytes()
    passing: Bytes = Bytes()
    exchanged: Bytes = Bytes()
    kept: bool = True


class Workload(NamedTuple):
    """A model of blocks and the work of one example (row) of its batch.

    `so.planning.trace` makes one of any `BlockModel`, `so.planning.Transformer(...).workload()` of a shape. Costs of a
    row are taken to be proportional to rows, which holds wherever examples do not see each other.

    Attributes:
      name: for tables.
      params: abstract parameters, `{"blocks": leaves stacked [L, ...], **outer}`.
      rules: tensor rules, as strategies take them.
      tokens: positions of a row, for tokens per second; 1 where that means nothing.
      block_flops: multiplications and additions of inner products in the forward of one block and one row. Backward is
        twice that.
      recompute_flops: what remat runs again of them: all but the products that the backward pass has no use for, such
        as the last of a residual branch.
      ends_flops: the forward flops of embed and loss together.
      boundary_bytes: bytes of what one row hands from block to block.
      residuals: bytes that one block keeps of a row from forward to backward, nothing recomputed.
      stage_residuals: the same in a pipeline and under fsdp, which compute elementwise operations again.
      deferred: bytes that the backward of a block leaves for its weight gradient, where a schedule splits that off.
      working: bytes that come and go while one block is differentiated, over and above its `residuals`.
      ends_working: bytes that come and go while the loss of a row is differentiated.
      tensor_sums: all-reduces of `boundary_bytes` over tensor in the forward of a block, and in its backward.
      model_flops: of a training step and one row, by the convention of model flops utilisation: no recomputation,
        causal attention counted as half.
      itemsize: bytes of a number in which blocks compute.
      loss_reads: key paths of the outer parameters that the loss reads; the others are done with after embed.
      named: the values of a block that have a name, which remat can keep.
      tables: key paths of the outer parameters that `so.nn.embedding` reads where they lie; see `BlockModel`.
      table_ids: how many ids of a row are looked up in them.
      table_numbers: how many numbers that gives.
      attention: what positions of a row see of each other, so that they can be split over context; None if nothing is known.
      experts: what an expert axis splits, and what tokens send; None without experts.
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
    attention: Attention | None = None
    experts: Experts | None = None

    @property
    def num_blocks(self) -> int:
        """L, the stacked blocks."""
        return jax.tree.leaves(self.params["blocks"])[0].shape[0]

    @property
    def num_parameters(self) -> int:
        """How many numbers the parameters are."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def tiled(self) -> "Workload":
        """The same where attention goes tile by tile and keeps no scores, as over a context axis."""
        scores = 0.0 if self.attention is None else self.attention.scores
        cut = lambda bytes: bytes._replace(sharded=max(bytes.sharded - scores, 0.0))  # noqa: E731
        parts = cut(self.residuals), cut(self.stage_residuals), cut(self.working)
        return self._replace(residuals=parts[0], stage_residuals=parts[1], working=parts[2])

    def over_experts(self, devices: int, tensor: int = 1) -> "Workload":
        """Return the same over an expert axis: a device has room for all tokens that could come, X min(K, E/X) / K times as many."""
        found = self.experts
        if found is None or devices == 1:
            return self
        times = min(found.top_k, found.num_experts // devices) * devices / found.top_k
        passing = max(found.passing, found.exchanged, key=lambda what: what.on(tensor))
        working = self.working.plus(passing, times).plus(found.passing, -1)
        if not found.kept:
            return self._replace(working=working.plus(found.buffers, times - 1))
        kept = [what.plus(found.buffers, times - 1) for what in (self.residuals, self.stage_residuals, self.deferred)]
        return self._replace(residuals=kept[0], stage_residuals=kept[1], deferred=kept[2], working=working)

    def recompute(self, remat: bool | str) -> Recompute | None:
        """Return what remat runs again: with True all but a block's input, with "save:NAME,..." all but these values too.

        Raises:
          ValueError: if it is neither, or names values that blocks do not have.
        """
        if remat is False:
            return None
        again, sums = self.recompute_flops, max(self.tensor_sums[0] - 1, 0)
        if remat is True:
            return Recompute(Bytes(), again, sums)
        read = read_remat("plan", remat)
        if not isinstance(read, Named) or read.offload:
            what = f"remat must be True, False or 'save:NAME,...', got {remat!r}."
            raise ValueError(format_error("plan", what, fix="write 'save:qkv,attention', or True for 'full'."))
        known = {one.name: one for one in self.named}
        if unknown := [name for name in read.names if name not in known]:
            what = f"remat names {plural(len(unknown), 'value')} that the blocks of {self.name} do not have."
            fix = f"use some of {', '.join(known)}." if known else "use True, or name values with checkpoint_name."
            raise ValueError(format_error("plan", what, unknown, fix))
        saved = [known[name] for name in read.names]
        return Recompute(
            Bytes(sum(one.bytes.replicated for one in saved), sum(one.bytes.sharded for one in saved)),
            max(again - sum(one.flops for one in saved), 0.0),
            max(sums - sum(one.tensor_sums for one in saved), 0),
        )

    def remat_choices(self) -> tuple[bool | str, ...]:
        """Return what of a block can be kept, from all to its input alone: named values first that spare most flops a byte."""
        useful = [one for one in self.named if one.flops > 0 and one.bytes.on(1) > 0]
        useful.sort(key=lambda one: one.flops / one.bytes.on(1), reverse=True)
        some = [",".join(one.name for one in useful[:count]) for count in range(len(useful), 0, -1)]
        return False, *(f"save:{names}" for names in some), True


def tensor_sums(params: PyTree, rules: Rules, expert_leaves: Sequence[str] = ()) -> tuple[int, int]:
    """Return how many sums over tensor the forward and the backward of a block need, by its rules.

    A weight that is sharded on its first dim, what it sums over, leaves partial results in the forward; one that is
    sharded on any other dim leaves partial gradients of its input in the backward. The first dim of experts only counts them,
    and gradients of the input of all of them are summed at once.
    """
    leaves = leaves_with_paths(params)
    specs = match_rules(rules, [(path, leaf.shape[path.startswith("blocks/") :]) for path, leaf in leaves], who="plan")
    blocks = [
        (any(re.search(pattern, path) for pattern in expert_leaves), tuple(spec))
        for (path, _), spec in zip(leaves, specs, strict=True)
        if path.startswith("blocks/") and "tensor" in tuple(spec)
    ]
    rows = sum(spec[of_experts] == "tensor" for of_experts, spec in blocks)
    columns = [of_experts for of_experts, spec in blocks if spec[of_experts] != "tensor"]
    return rows, columns.count(False) + (True in columns)


def trace(
    model: BlockModel,
    abstract_params: PyTree,
    abstract_batch: PyTree,
    *,
    rules: Rules = (),
    expert_leaves: Sequence[str] = (),
    name: str = "model",
    tokens: int = 1,
    compute_dtype: DTypeLike | None = None,
) -> Workload:
    """Return what a row of a model's batch costs, by tracing it for one row and for two; nothing is run or allocated.

    Flops are those of inner products and convolutions in the trace, forward and backward. What a block keeps is what
    its backward pass reads: the residuals of `jax.vjp` that are not weights. Over tensor, arrays of the shape of what
    blocks hand on, and statistics of it, count as replicated and all others as sharded, as in a block whose first
    product is sharded by column and whose second is sharded by row.

    Args:
      model: a `BlockModel`, or its `loss_fn`.
      abstract_params: its parameters, or their shapes: `jax.eval_shape(init, key)`.
      abstract_batch: a batch, or its shapes, with rows as the first dim of every leaf. The number of rows does not
        matter.
      rules: tensor rules, as strategies take them.
      expert_leaves: regexes of key paths of leaves whose first dim counts experts, as strategies take them.
      name: for tables.
      tokens: positions of a row.
      compute_dtype: dtype that weights arrive in, the `gather_dtype` of fsdp; None is their own.

    Returns:
      A `Workload`.

    Raises:
      TypeError: if `model` is not a `BlockModel`.
      ValueError: if the parameters have no "blocks", a batch leaf has no rows, or embed looks up none of the model's tables.

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
    """
    blocks = as_block_model(model)
    if blocks is None:
        fix = "use so.BlockModel(embed, block, loss), or describe a shape with so.planning.Transformer."
        raise TypeError(format_error("trace", f"model must be a BlockModel, got {type(model).__name__}.", fix=fix))
    if not isinstance(abstract_params, dict) or BLOCKS not in abstract_params:
        fix = 'pass {"blocks": leaves stacked [L, ...], **outer}.'
        raise ValueError(format_error("trace", "the parameters of a BlockModel must be a dict with 'blocks'.", fix=fix))
    if not all(np.ndim(leaf) for leaf in jax.tree.leaves(abstract_batch)):
        fix = "give every leaf of the batch its rows as first dim."
        raise ValueError(format_error("trace", "a leaf of the batch has no dim.", fix=fix))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract_params)
    parts = _Parts.of(blocks, params, compute_dtype)
    one, two = (_row_costs(parts, _with_rows(abstract_batch, count)) for count in (1, 2))
    row = jax.tree.map(lambda one, two: max(two - one, 0), one, two)
    num_blocks = jax.tree.leaves(params[BLOCKS])[0].shape[0]
    batch = _with_rows(abstract_batch, 1)
    named, sums = row.pop("named"), _named_sums(parts, batch)
    embed = jax.make_jaxpr(parts.embed)(parts.outer, batch, parts.key)
    looked_up = named_values(embed).get(LOOKED_UP, []) if blocks.tables else []
    if blocks.tables and not looked_up:
        fix = "read them by so.nn.embedding, or leave tables out."
        raise ValueError(format_error("trace", "embed looks up none of BlockModel.tables.", blocks.tables, fix))
    return Workload(
        name=name,
        params=params,
        rules=rules,
        tokens=tokens,
        **row,
        named=tuple(NamedValue(value, named[value][0], named[value][1], count) for value, count in sums.items()),
        tensor_sums=tensor_sums(params, rules, expert_leaves),
        model_flops=3.0 * (num_blocks * row["block_flops"] + row["ends_flops"]),
        itemsize=max(leaf.dtype.itemsize for leaf in jax.tree.leaves(parts.boundary(batch))),
        loss_reads=_reads(parts, batch),
        tables=blocks.tables,
        table_ids=float(sum(value.size / value.shape[-1] for value in looked_up)),
        table_numbers=float(sum(value.size for value in looked_up)),
        attention=_attention(parts, batch),
        experts=_experts(parts, batch, tuple(expert_leaves)),
    )


class _Parts(NamedTuple):
    """The three functions of a model, which take a key, and the shapes of their weights as they compute."""

    embed: Callable[..., PyTree]
    block: Callable[..., PyTree]
    loss: Callable[..., jax.Array]
    outer: PyTree
    weights: PyTree
    key: jax.ShapeDtypeStruct

    @staticmethod
    def of(model: BlockModel, params: PyTree, compute_dtype: DTypeLike | None) -> "_Parts":
        def computed(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
            narrowed = compute_dtype is not None and jnp.issubdtype(dtype, jnp.floating)
            return jax.ShapeDtypeStruct(shape, compute_dtype if narrowed else dtype)

        def loss(outer: PyTree, x: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
            value = call(model.loss, key, 0, outer, x, batch)
            value = value[0] if isinstance(value, tuple) and not isinstance(value, Weighted) else value
            return jax.tree.reduce(jnp.add, value.total) if isinstance(value, Weighted) else value

        outer = {name: value for name, value in params.items() if name != BLOCKS}
        return _Parts(
            embed=lambda outer, batch, key: call(model.embed, key, 0, outer, batch),
            block=lambda weights, x, key: call(model.block, key, 0, weights, x),
            loss=loss,
            outer=jax.tree.map(lambda leaf: computed(leaf.shape, leaf.dtype), outer),
            weights=jax.tree.map(lambda leaf: computed(leaf.shape[1:], leaf.dtype), params[BLOCKS]),
            key=jax.eval_shape(lambda: jax.random.key(0)),
        )

    def boundary(self, batch: PyTree) -> PyTree:
        """Return the shapes of what blocks take and give."""
        return jax.eval_shape(self.embed, self.outer, batch, self.key)


def _row_costs(parts: _Parts, batch: PyTree) -> dict[str, PyTree]:
    """Return what of a `Workload` grows with the rows."""
    outer, weights, key, x = parts.outer, parts.weights, parts.key, parts.boundary(batch)

    def flops(f: Callable[..., PyTree], *args: PyTree) -> float:
        return float(sum(count_flops(jax.make_jaxpr(f)(*args))))

    def backward(block: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda w, x, dy, key: jax.vjp(lambda w, x: block(w, x, key), w, x)[1](dy)

    def recomputed(policy: Callable[..., bool] | None = None) -> float:
        return flops(backward(jax.checkpoint(parts.block, policy=policy)), weights, x, x, key) - once

    once = flops(backward(parts.block), weights, x, x, key)
    full, save = recomputed(), jax.checkpoint_policies.save_only_these_names
    named = named_values(jax.make_jaxpr(parts.block)(weights, x, key))
    boundary = sum(map(_nbytes, jax.tree.leaves(x)))
    like = {leaf.shape for leaf in jax.tree.leaves(x)}
    kept, ends = _residuals(parts.block, weights, x, key), _residuals(parts.loss, outer, x, batch, key)
    stage, deferred = _stage_residuals(parts.block, weights, x)
    return {
        "block_flops": flops(parts.block, weights, x, key),
        "recompute_flops": full,
        "named": {name: (_by_shape(values, like), full - recomputed(save(name))) for name, values in named.items()},
        "ends_flops": flops(parts.loss, outer, x, batch, key) + flops(parts.embed, outer, batch, key),
        "boundary_bytes": boundary,
        "residuals": _by_shape(kept, like),
        "stage_residuals": _by_shape(stage, like),
        "deferred": _by_shape(deferred, like),
        "working": Bytes(boundary, max(map(_nbytes, kept), default=0)),
        "ends_working": Bytes(0, sum(map(_nbytes, ends))),
    }


def _named_sums(parts: _Parts, batch: PyTree) -> dict[str, int]:
    """Return of each name how many of its values are of the shape that blocks hand on: results of sums over tensor."""
    x = parts.boundary(batch)
    like = {leaf.shape for leaf in jax.tree.leaves(x)}
    named = named_values(jax.make_jaxpr(parts.block)(parts.weights, x, parts.key))
    return {name: sum(value.shape in like for value in values) for name, values in named.items()}


def _attention(parts: _Parts, batch: PyTree) -> Attention | None:
    """Return what a block gives `so.nn.attention`; several calls add up."""
    calls = [eqn for eqn in equations(_shown(parts, batch)) if eqn.params.get("name") == ATTENTION]
    if not calls:
        return None
    queries, keys = (sum(_nbytes(_aval(eqn.invars[i])) for eqn in calls) for i in (0, 1))
    lengths = {_aval(eqn.invars[0]).shape[1] for eqn in calls}
    kept = _residuals(parts.block, parts.weights, parts.boundary(batch), parts.key)
    scores = sum(_nbytes(one) for one in kept if one.shape[-2:] in {(length, length) for length in lengths})
    return Attention(queries, keys, min(_aval(eqn.invars[1]).shape[2] for eqn in calls), scores)


def _experts(parts: _Parts, batch: PyTree, leaves: tuple[str, ...]) -> Experts | None:
    """Return what a block gives `so.nn.mixture_of_experts`; several calls add up."""
    calls = [eqn for eqn in equations(_shown(parts, batch)) if str(eqn.params.get("name")).startswith(EXPERTS)]
    if not calls or not leaves:
        return None
    found = []
    for eqn in calls:
        given = [_aval(v) for v in eqn.invars]  # weights [E, D, F] each, x [B, T, D], router [D, E]
        router = next(i for i, one in enumerate(given) if one.ndim == 2)
        found.append((given[router].shape[1], int(eqn.params["name"].rsplit("_", 1)[1]), _nbytes(given[router - 1])))
    counts, chosen, tokens = zip(*found, strict=True)
    return Experts(leaves, max(counts), max(chosen), float(sum(tokens)))


def _shown(parts: _Parts, batch: PyTree) -> ClosedJaxpr:
    """Return the trace of a block in which layers show their plain form, by name."""
    with analysis():
        shown = lambda *args: parts.block(*args)  # noqa: E731 (not the function that jax has a trace of already)
        return jax.make_jaxpr(shown)(parts.weights, parts.boundary(batch), parts.key)


def _residuals(f: Callable[..., PyTree], weights: PyTree, x: PyTree, *rest: PyTree) -> list[ShapedArray]:
    """Return the arrays that the backward of f keeps, its weights and what is only a cast or view of them left out."""

    def keep(weights: PyTree, x: PyTree, rest: PyTree) -> list[jax.Array]:
        _, pullback = jax.vjp(lambda w, x: f(w, x, *rest), weights, x)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(keep)(weights, x, rest).jaxpr
    given = set(map(id, jaxpr.invars[: len(jax.tree.leaves(weights))]))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _VIEWS and id(eqn.invars[0]) in given:
            given.add(id(eqn.outvars[0]))
    return list({id(v): _aval(v) for v in jaxpr.outvars if isinstance(v, Var) and id(v) not in given}.values())


_VIEWS = ("convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim")


def _stage_residuals(
    block: Callable[..., PyTree], weights: PyTree, x: PyTree
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """Return what a pipeline keeps of a block until its backward, and from there to its weight gradient."""
    leaves, treedef = jax.tree.flatten(weights)
    inputs, x_treedef = jax.tree.flatten(x)

    def f(given: list[jax.Array], x: list[jax.Array]) -> list[jax.Array]:
        return jax.tree.leaves(block(treedef.unflatten(given), x_treedef.unflatten(x), jax.random.key(0)))

    trained = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    passes = split_backward(f, leaves, inputs, trained=trained)
    return passes.residuals, passes.deferred


def _by_shape(arrays: Iterable[ShapedArray | jax.ShapeDtypeStruct], like: set[tuple[int, ...]]) -> Bytes:
    """Return the bytes of arrays like what blocks hand on or statistics of it (last dim 1), and of all others."""
    shapes = like | {(*shape[:-1], 1) for shape in like}
    replicated, sharded = 0.0, 0.0
    for array in arrays:
        if array.shape in shapes:
            replicated += _nbytes(array)
        else:
            sharded += _nbytes(array)
    return Bytes(replicated, sharded)


def _reads(parts: _Parts, batch: PyTree) -> tuple[str, ...]:
    """Return the key paths of the outer parameters that the loss reads."""
    jaxpr = jax.make_jaxpr(parts.loss)(parts.outer, parts.boundary(batch), batch, parts.key).jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    paths = [path for path, _ in leaves_with_paths(parts.outer)]
    return tuple(path for path, v in zip(paths, jaxpr.invars, strict=False) if id(v) in used)


def _with_rows(batch: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), batch)


def _nbytes(array: ShapedArray | jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * getattr(array.dtype, "itemsize", 4)


def count_flops(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[float]:
    """Yield the flops of the inner products and convolutions of a jaxpr; scans are multiplied by their length.

    A `while` of unknown length counts once, a `cond` as its dearest branch.
    """
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(_aval(eqn.invars[0]).shape[dim] for dim in contract)
            yield 2.0 * _aval(eqn.outvars[0]).size * depth
        elif name == "conv_general_dilated":
            kernel = _aval(eqn.invars[1])
            features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
            yield 2.0 * _aval(eqn.outvars[0]).size * kernel.size / features
        elif eqn.params.get("name") == "shardopt_grouped_product":  # each row with the matrix of its group
            yield 2.0 * _aval(eqn.invars[0]).size * _aval(eqn.outvars[0]).shape[-1]
        elif name == "cond":
            yield max((sum(count_flops(branch)) for branch in eqn.params["branches"]), default=0.0)
        else:
            times = eqn.params.get("length", 1) if name == "scan" else 1
            for value in eqn.params.values():
                for inner in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(inner, ClosedJaxpr | Jaxpr):
                        yield times * sum(count_flops(inner))


def _aval(v: Var | Literal) -> ShapedArray:
    return cast(ShapedArray, v.aval)
