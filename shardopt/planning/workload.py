"""What training a model asks of a machine, in numbers: the input of every prediction."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.block_model import BLOCKS, BlockModel, as_block_model, call
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, Weighted, leaves_with_paths
from shardopt.partition.rules import match_rules
from shardopt.remat.split_backward import split_backward


class Bytes(NamedTuple):
    """Bytes of activations, by whether the tensor axis splits them.

    Attributes:
      whole: on every device of the tensor axis.
      split: each device of the tensor axis has its part.
    """

    whole: float = 0.0
    split: float = 0.0

    def on(self, tensor: int) -> float:
        """Return the bytes on one of `tensor` devices."""
        return self.whole + self.split / tensor

    def times(self, factor: float) -> "Bytes":
        """Return both multiplied."""
        return Bytes(self.whole * factor, self.split * factor)

    def plus(self, other: "Bytes") -> "Bytes":
        """Return both added."""
        return Bytes(self.whole + other.whole, self.split + other.split)


class Workload(NamedTuple):
    """A model of blocks and the work of one example (row) of its batch.

    `so.planning.trace` makes one of any `BlockModel`, `so.planning.Transformer(...).workload()` of a shape. Costs of a
    row are taken to be proportional to rows, which holds wherever examples do not see each other.

    Attributes:
      name: for tables.
      params: abstract parameters, `{"blocks": leaves stacked [L, ...], **outer}`.
      rules: tensor rules, as strategies take them.
      tokens: positions of a row, for tokens a second; 1 where that means nothing.
      block_flops: multiplications and additions of inner products in the forward of one block and one row. Backward is
        twice that.
      again_flops: what remat runs again of them: all but the products that the backward pass has no use for, such as
        the last of a residual branch.
      ends_flops: the forward flops of embed and loss together.
      message: bytes of what one row hands from block to block.
      kept: bytes that one block keeps of a row from forward to backward, nothing recomputed.
      stage_kept: the same in a pipeline and under fsdp, which compute elementwise operations again.
      deferred: bytes that the backward of a block leaves for its weight gradient, where a schedule splits that off.
      working: bytes that come and go while one block is differentiated, over and above `kept` of that block.
      ends_working: bytes that come and go while the loss of a row is differentiated.
      tensor_sums: all-reduces of a message over tensor in the forward of a block, and in its backward; see
        `tensor_sums`.
      model_flops: of a training step and one row, by the convention of model flops utilisation: no recomputation,
        causal attention counted as half.
      itemsize: bytes of a number in which blocks compute.
      loss_reads: key paths of the outer parameters that the loss reads; the others are done with after embed.
    """

    name: str
    params: PyTree
    rules: Any
    tokens: int
    block_flops: float
    again_flops: float
    ends_flops: float
    message: int
    kept: Bytes
    stage_kept: Bytes
    deferred: Bytes
    working: Bytes
    ends_working: Bytes
    tensor_sums: tuple[int, int]
    model_flops: float
    itemsize: int
    loss_reads: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """L, the stacked blocks."""
        return jax.tree.leaves(self.params["blocks"])[0].shape[0]

    @property
    def num_parameters(self) -> int:
        """How many numbers the parameters are."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def tensor_sums(params: PyTree, rules: Any) -> tuple[int, int]:
    """Return how many sums over tensor the forward and the backward of a block need, by its rules.

    A weight that is split on its first dim, what it sums over, leaves partial results in the forward; one that is split
    on any other dim leaves partial gradients of its input in the backward.
    """
    leaves = leaves_with_paths(params)
    specs = match_rules(rules, [(path, leaf.shape[path.startswith("blocks/") :]) for path, leaf in leaves], who="plan")
    split = [tuple(spec) for (path, _), spec in zip(leaves, specs, strict=True) if path.startswith("blocks/")]
    rows = sum(spec[:1] == ("tensor",) for spec in split)
    return rows, sum("tensor" in spec for spec in split) - rows


# `trace`: a workload read off any `BlockModel`, by tracing it for one row and for two.


def trace(
    model: BlockModel,
    abstract_params: PyTree,
    abstract_batch: PyTree,
    *,
    rules: Any = (),
    name: str = "model",
    tokens: int = 1,
    compute_dtype: Any = None,
) -> Workload:
    """Return what a row of a model's batch costs, by tracing it; nothing is run or allocated.

    Flops are those of inner products and convolutions in the trace, forward and backward. What a block keeps is what
    its backward pass reads: the residuals of `jax.vjp` that are not weights. Over tensor, arrays of the shape of the
    message between blocks, and statistics of it, count as whole and all others as split, as in a block whose first
    product is split by column and whose second is split by row.

    Args:
      model: a `BlockModel`, or its `loss_fn`.
      abstract_params: its parameters, or their shapes: `jax.eval_shape(init, key)`.
      abstract_batch: a batch, or its shapes, with rows as the first dim of every leaf. The number of rows does not
        matter.
      rules: tensor rules, as strategies take them.
      name: for tables.
      tokens: positions of a row.
      compute_dtype: dtype that weights arrive in, the `gather_dtype` of fsdp; None is their own.

    Returns:
      A `Workload`.

    Raises:
      TypeError: if `model` is not a `BlockModel`.
      ValueError: if the parameters have no "blocks", or a batch leaf has no rows.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> model = so.BlockModel(
      ...     embed=lambda outer, batch: batch["x"],
      ...     block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
      ...     loss=lambda outer, x, batch: jnp.mean(x**2),
      ... )
      >>> shapes = {"blocks": {"up": jnp.zeros((3, 8, 32)), "down": jnp.zeros((3, 32, 8))}}
      >>> work = trace(model, shapes, {"x": jnp.zeros((4, 8))})
      >>> work.num_blocks, work.block_flops, work.message
      (3, 1024.0, 32)
    """
    blocks = as_block_model(model)
    if blocks is None:
        fix = "use so.BlockModel(embed, block, loss), or describe a shape with so.planning.Transformer."
        raise TypeError(format_error("trace", f"model must be a BlockModel, got {type(model).__name__}.", fix=fix))
    if not isinstance(abstract_params, dict) or BLOCKS not in abstract_params:
        fix = 'pass {"blocks": leaves stacked [L, ...], **outer}.'
        raise ValueError(format_error("trace", "the parameters of a BlockModel must be a dict with 'blocks'.", fix=fix))
    params = jax.tree.map(lambda leaf: _shape(leaf.shape, leaf.dtype), abstract_params)
    one, two = (_costs(blocks, params, _rows(abstract_batch, count), compute_dtype) for count in (1, 2))
    slope = {key: max(two[key] - one[key], 0) for key in one if key != "loss_reads"}
    return Workload(
        name=name,
        params=params,
        rules=rules,
        tokens=tokens,
        block_flops=float(slope["block_flops"]),
        again_flops=float(slope["again_flops"]),
        ends_flops=float(slope["ends_flops"]),
        message=int(slope["message"]),
        kept=Bytes(slope["kept_whole"], slope["kept_split"]),
        stage_kept=Bytes(slope["stage_whole"], slope["stage_split"]),
        deferred=Bytes(slope["deferred_whole"], slope["deferred_split"]),
        working=Bytes(slope["message"], slope["working"]),
        ends_working=Bytes(0, slope["ends"]),
        tensor_sums=tensor_sums(params, rules),
        model_flops=3.0 * (jax.tree.leaves(params[BLOCKS])[0].shape[0] * slope["block_flops"] + slope["ends_flops"]),
        itemsize=int(one["itemsize"]),
        loss_reads=tuple(one["loss_reads"]),
    )


def _costs(model: BlockModel, params: PyTree, batch: PyTree, compute_dtype: Any) -> dict[str, Any]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    cast = lambda leaf: _shape(leaf.shape, _computes(leaf.dtype, compute_dtype))  # noqa: E731
    outer = jax.tree.map(cast, {name: value for name, value in params.items() if name != BLOCKS})
    block = jax.tree.map(lambda leaf: _shape(leaf.shape[1:], _computes(leaf.dtype, compute_dtype)), params[BLOCKS])
    x = jax.eval_shape(lambda outer, batch, key: call(model.embed, key, 0, outer, batch), outer, batch, key)

    def run(w, x, key):
        return call(model.block, key, 0, w, x)

    def loss(outer, x, batch, key):
        value = call(model.loss, key, 0, outer, x, batch)
        value = value[0] if isinstance(value, tuple) and not isinstance(value, Weighted) else value
        return value.total if isinstance(value, Weighted) else value

    message = sum(_nbytes(leaf) for leaf in jax.tree.leaves(x))
    like = {leaf.shape for leaf in jax.tree.leaves(x)}
    whole, split, largest = _residuals(run, block, x, key, like)
    ends_whole, ends_split, _ = _residuals(loss, outer, x, batch, key, like)
    stage, deferred = _stage(run, block, x, like)
    flops = lambda f, *args: sum(count_flops(jax.make_jaxpr(f)(*args)))  # noqa: E731

    def again(w, x, dy, key):
        return jax.vjp(jax.checkpoint(lambda w, x: run(w, x, key)), w, x)[1](dy)

    def once(w, x, dy, key):
        return jax.vjp(lambda w, x: run(w, x, key), w, x)[1](dy)

    return {
        "block_flops": flops(run, block, x, key),
        "again_flops": flops(again, block, x, x, key) - flops(once, block, x, x, key),
        "ends_flops": flops(loss, outer, x, batch, key)
        + flops(lambda outer, batch, key: call(model.embed, key, 0, outer, batch), outer, batch, key),
        "message": message,
        "kept_whole": whole,
        "kept_split": split,
        "stage_whole": stage[0],
        "stage_split": stage[1],
        "deferred_whole": deferred[0],
        "deferred_split": deferred[1],
        "working": largest,
        "ends": ends_whole + ends_split,
        "loss_reads": _reads(loss, outer, x, batch, key),
        "itemsize": max(leaf.dtype.itemsize for leaf in jax.tree.leaves(x)),
    }


def _residuals(f: Callable[..., Any], weights: PyTree, *args: Any) -> tuple[float, float, float]:
    """Return the bytes that the backward of f keeps: whole over tensor, split, and those of the largest array."""
    *inputs, like = args
    x, rest = inputs[0], inputs[1:]

    def keep(weights, x, rest):
        _, pullback = jax.vjp(lambda w, x: f(w, x, *rest), weights, x)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(keep)(weights, x, rest).jaxpr
    num_weights = len(jax.tree.leaves(weights))
    given = set(map(id, jaxpr.invars[:num_weights]))
    casts = {id(eqn.outvars[0]) for eqn in jaxpr.eqns if _reshapes_a_weight(eqn, given)}
    kept = {id(v): v.aval for v in jaxpr.outvars if not hasattr(v, "val") and id(v) not in given | casts}
    largest = max((_nbytes(aval) for aval in kept.values()), default=0)
    return *_whole_and_split(kept.values(), like), float(largest)


def _reads(loss: Callable[..., Any], outer: PyTree, *args: Any) -> list[str]:
    """Return the key paths of the outer parameters that the loss reads."""
    jaxpr = jax.make_jaxpr(loss)(outer, *args).jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    return [path for (path, _), v in zip(leaves_with_paths(outer), jaxpr.invars, strict=False) if id(v) in used]


def _stage(run: Callable[..., Any], block: PyTree, x: PyTree, like: set[tuple[int, ...]]) -> tuple[Any, Any]:
    """Return what a pipeline keeps of a block until its backward, and from there to its weight gradient."""
    weights, treedef = jax.tree.flatten(block)
    inputs, x_treedef = jax.tree.flatten(x)

    def f(given, x):
        return jax.tree.leaves(run(treedef.unflatten(given), x_treedef.unflatten(x), jax.random.key(0)))

    trained = [i for i, leaf in enumerate(weights) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    passes = split_backward(f, weights, inputs, trained=trained)
    return _whole_and_split(passes.residuals, like), _whole_and_split(passes.deferred, like)


def _whole_and_split(avals: Iterable[Any], like: set[tuple[int, ...]]) -> tuple[float, float]:
    """Return the bytes of arrays like the message or statistics of it (last dim 1), and of all others."""
    shapes = like | {(*shape[:-1], 1) for shape in like}
    whole, split = 0.0, 0.0
    for aval in avals:
        if aval.shape in shapes:
            whole += _nbytes(aval)
        else:
            split += _nbytes(aval)
    return whole, split


def _reshapes_a_weight(eqn: Any, given: set[int]) -> bool:
    """Say whether an equation only casts, transposes or reshapes a weight; those that follow it count likewise."""
    moves = ("convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim")
    if eqn.primitive.name in moves and id(eqn.invars[0]) in given:
        given.add(id(eqn.outvars[0]))
        return True
    return False


def count_flops(closed: Any) -> Iterator[float]:
    """Yield the flops of the inner products and convolutions of a jaxpr; scans are multiplied by their length.

    A `while` of unknown length counts once, a `cond` as its dearest branch.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contract)
            yield 2.0 * eqn.outvars[0].aval.size * depth
        elif name == "conv_general_dilated":
            numbers = eqn.params["dimension_numbers"]
            kernel = eqn.invars[1].aval
            yield 2.0 * eqn.outvars[0].aval.size * kernel.size / kernel.shape[numbers.rhs_spec[0]]
        elif name == "cond":
            yield max((sum(count_flops(branch)) for branch in eqn.params["branches"]), default=0.0)
        else:
            times = eqn.params.get("length", 1) if name == "scan" else 1
            for value in eqn.params.values():
                for inner in value if isinstance(value, list | tuple) else (value,):
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        yield times * sum(count_flops(inner))


def _rows(batch: PyTree, count: int) -> PyTree:
    if not all(np.ndim(leaf) for leaf in jax.tree.leaves(batch)):
        fix = "give every leaf of the batch its rows as first dim."
        raise ValueError(format_error("trace", "a leaf of the batch has no dim.", fix=fix))
    return jax.tree.map(lambda leaf: _shape((count, *leaf.shape[1:]), leaf.dtype), batch)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _computes(dtype: Any, compute_dtype: Any) -> Any:
    return compute_dtype if compute_dtype is not None and jnp.issubdtype(dtype, jnp.floating) else dtype


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)
