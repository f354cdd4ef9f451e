"""`BlockModel`: a model made of embed, a stack of equal blocks, and a loss.

Strategies gather or pipeline it by blocks.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from shardopt.core._block_remat import Remat, checkpointed
from shardopt.core._rounding import Rounding
from shardopt.core._types import Loss, PyTree, is_key

BLOCKS = "blocks"


class BlockModel(NamedTuple):
    """A model whose blocks are stacked, so that strategies can gather or pipeline them one at a
    time.

    Parameters are a dict `{"blocks": leaves stacked [L, ...], **outer}`; "outer" below is that dict
    without "blocks". Any of the three functions may take a keyword `rng`. It then gets a new random
    key for each step, piece of the batch and block.

    Attributes:
      embed: `embed(outer, batch) -> x`.
      block: `block(one_block, x) -> x`, same shape and dtype.
      loss: `loss(outer, x, batch) -> scalar | Weighted`, or `(loss, aux dict)`. Outer parameters
        reach both ends, so tied embeddings work.
      remat: which values of a block the backward pass computes again; the forms are listed below.
      tables: key paths of outer parameters [V, D] that only `embed` reads, and only through
        `so.nn.embedding`. If fsdp shards parameters, these are sharded by columns where data
        divides D. They are not gathered where it takes fewer bytes to exchange the rows of a batch.
        Only in the per-device view and not in a pipeline.
      rounded: key path within a block -> `Rounding`, for weights that `block` reads through
        `so.nn.quantized_einsum` alone. If fsdp shards such a weight, each device rounds its shard,
        and the numbers in 8 bits are gathered. The result is the same. Only in the per-device view.
        A weight is gathered as it is where tensor shards it, or where fsdp shards neither the first
        dim that the product sums over nor an only dim of channels.
      check_batch: `check_batch(batch)` raises an error for a batch that the model cannot read, such
        as a token that it does not have. A strategy calls it before the batch is placed; arrays
        that are still on the host are numpy arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> model = BlockModel(
      ...     embed=lambda outer, batch: batch["x"] * outer["scale"],
      ...     block=lambda w, x: jnp.tanh(x @ w["kernel"]),
      ...     loss=lambda outer, x, batch: jnp.mean((x - batch["y"]) ** 2),
      ... )
      >>> params = {"blocks": {"kernel": jnp.zeros((3, 2, 2))}, "scale": jnp.ones(())}
      >>> model.loss_fn(params, {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 2))})
      Array(1., dtype=float32)

    **Forms of `remat`**:

    - None computes only cheap values again: elementwise results and, if a device gathers weights,
      all that follows from weights and keys alone. A block whose weights are whole keeps what jax
      keeps, if several results with gradients depend on weights, or an operation has no derivative.
    - "full" computes the whole block again from its input.
    - "save:qkv,attention" computes all again except the values with these names, given by
      `jax.ad_checkpoint.checkpoint_name`.
    - "offload:qkv,attention" does the same, and keeps the named values in host memory (CPU has no
      separate host memory). Not in a pipeline.
    - "offload" computes the whole block again, as "full", and keeps the inputs of blocks in host
      memory. Not in a pipeline.
    - A `jax.checkpoint` policy decides for each value.

    A `jax.checkpoint` within the block works with every form. A name that the blocks do not have
    raises an error when the first step is traced; the error lists the names that they have.
    """

    embed: Callable[..., PyTree]
    block: Callable[..., PyTree]
    loss: Callable[..., Loss]
    remat: Remat = None
    tables: tuple[str, ...] = ()
    rounded: Mapping[str, Rounding] = MappingProxyType({})
    check_batch: Callable[[PyTree], None] | None = None

    def loss_fn(self, params: PyTree, batch: PyTree, rng: jax.Array | None = None) -> Loss:
        """Return the loss of a batch, in the form that `loss` returns."""
        return run_blocks(self, params, batch, rng)


LossFn = Callable[..., Loss] | BlockModel
"""`(params, batch) -> loss`, or a `BlockModel`; see `shardopt.ddp`."""


def as_block_model(loss_fn: LossFn | None) -> BlockModel | None:
    """Return the `BlockModel` of a loss, if the loss is a `BlockModel` or its `loss_fn` method.

    Else None.
    """
    owner = getattr(loss_fn, "__self__", loss_fn)
    return owner if isinstance(owner, BlockModel) else None


EMBED, LOSS, BLOCK = range(3)
"""The first number that the key of a function of a model is folded with.

Keys of blocks are folded with the index of the block after that. An index in a loop is any number for
the proof, so it must come second: then no other function can have the key of a block.
"""


def outer_of(params: PyTree) -> PyTree:
    """Return the parameters outside of the blocks, or what else has their structure."""
    return {name: value for name, value in params.items() if name != BLOCKS}


def run_blocks(
    model: BlockModel,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None,
    *,
    gather_outer: Callable[[PyTree], PyTree] | None = None,
    run_block: Callable[..., PyTree] | None = None,
    before_loss: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None,
) -> Loss:
    """Run embed, a scan over the blocks, and loss.

    Hooks of a strategy gather parameters that it keeps sharded.

    `run_block(one_block, index, rng, x)` runs inside the scan instead of the model's block, and
    applies its `remat`. `before_loss(outer, x)` returns the `outer` and `x` that the loss is called
    with.
    """
    blocks = params[BLOCKS]
    sharded_outer = outer_of(params)
    outer = sharded_outer if gather_outer is None else gather_outer(sharded_outer)
    num_blocks = jax.tree.leaves(blocks)[0].shape[0]
    run = run_block or plain_block(model)

    def body(x, block_and_index):
        one_block, index = block_and_index
        return run(one_block, index, rng, x), None

    x = call(model.embed, rng, EMBED, outer, batch)
    x, _ = jax.lax.scan(body, x, (blocks, jax.numpy.arange(num_blocks)))
    if before_loss is not None:
        outer, x = before_loss(sharded_outer, x)
    return call(model.loss, rng, LOSS, outer, x, batch)


def plain_block(model: BlockModel) -> Callable[..., PyTree]:
    """Return `run(one_block, index, rng, x) -> x`: the block of a model, with the model's `remat`
    applied.
    """
    return checkpointed(
        model.remat, lambda one_block, index, rng, x: call_block(model, rng, index, one_block, x)
    )


def call_block(
    model: BlockModel,
    rng: jax.Array | None,
    index: jax.typing.ArrayLike,
    weights: PyTree,
    x: PyTree,
) -> PyTree:
    """Call the block of a model with the key of the block at `index`, if it takes one."""
    return call(model.block, None if rng is None else _folded(rng, BLOCK), index, weights, x)


def call(fn: LossFn, rng: jax.Array | None, index: jax.typing.ArrayLike, *args: PyTree) -> PyTree:
    """Call `fn(*args)`.

    If `fn` takes a keyword `rng` and there is a key, pass the key folded with `index`.

    For a `BlockModel`, call its loss.

    Raises:
      TypeError: if `fn` requires a key and `rng` is None.
    """
    if isinstance(fn, BlockModel):
        fn = fn.loss_fn
    if not takes_rng(fn):
        return fn(*args)
    if rng is not None:
        return fn(*args, rng=_folded(rng, index))
    if (
        as_block_model(fn) is None
        and inspect.signature(fn).parameters["rng"].default is inspect.Parameter.empty
    ):
        name = getattr(inspect.unwrap(fn), "__name__", type(inspect.unwrap(fn)).__name__)
        raise TypeError(
            f"{name}: there is no random key to give outside of training.\nFix: give rng the"
            " default None."
        )
    return fn(*args)


def _folded(rng: jax.Array, number: jax.typing.ArrayLike) -> jax.Array:
    return rng if is_key_of_each_row(rng) else jax.random.fold_in(rng, number)


def is_key_of_each_row(rng: jax.Array) -> bool:
    """Return whether this is a random key for each row [rows], for a loss of `so.per_row`."""
    return is_key(rng) and rng.ndim == 1


def abstract_key(fn: Any) -> Any:
    """Return the shape of a random key; None for a function that takes none."""
    return jax.eval_shape(lambda: jax.random.key(0)) if takes_rng(fn) else None


def takes_rng(fn: Any) -> bool:
    """Return whether a loss or block function takes a keyword `rng` that is not bound yet."""
    model = as_block_model(fn)
    if model is not None:
        return any(map(takes_rng, (model.embed, model.block, model.loss)))
    try:
        parameter = inspect.signature(fn).parameters.get("rng")
    except (TypeError, ValueError):  # builtins and some C callables have no signature
        return False
    fn = inspect.unwrap(fn)
    bound = isinstance(fn, functools.partial) and "rng" in fn.keywords
    return (
        parameter is not None
        and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
        and not bound
    )
