"""A model as embed, a stack of equal blocks, and a loss: what can be gathered or pipelined block by block."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from shardopt.core.block_remat import Remat, checkpointed
from shardopt.core.types import Loss, PyTree

BLOCKS = "blocks"


class BlockModel(NamedTuple):
    """A model whose blocks are stacked, so that strategies can treat them one at a time.

    Parameters are a dict `{"blocks": leaves stacked [L, ...], **outer}`; "outer" below is that dict without
    "blocks". Any of the three functions may take a keyword `rng` and then gets a fresh key per step, example
    shard and block.

    Attributes:
      embed: `embed(outer, batch) -> x`.
      block: `block(one_block, x) -> x`, same shape and dtype.
      loss: `loss(outer, x, batch) -> scalar | Weighted`, or `(that, aux dict)`. Outer parameters reach both
        ends, so tied embeddings work.
      remat: what the backward pass recomputes of a block. None: nothing that costs much; gathered weights, what
        follows from them alone, and elementwise results where weights are sharded. "full": all of the block from its
        input. "save:qkv,attention": all but the values that `jax.ad_checkpoint.checkpoint_name` gave these names.
        "offload:qkv,attention": the same, and these values wait in host memory (on CPU there is no other); "offload": the
        inputs of blocks alone, as "full", and they wait there. Neither in a pipeline. Otherwise a `jax.checkpoint` policy. A `jax.checkpoint` within the block is heeded everywhere. A name that
        blocks do not have is refused when the first step is traced, with those that they have.

      tables: key paths of outer parameters [V, D] that only `embed` reads, and only by `so.nn.embedding`. Where fsdp shards
        parameters, in the per-device view and not in a pipeline, these are sharded by columns if data divides D, and are not
        gathered where it costs fewer bytes to exchange the rows that a batch asks for.

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
    """

    embed: Callable[..., PyTree]
    block: Callable[..., PyTree]
    loss: Callable[..., Loss]
    remat: Remat = None
    tables: tuple[str, ...] = ()

    def loss_fn(self, params: PyTree, batch: PyTree, rng: jax.Array | None = None) -> Loss:
        """Return the loss of a batch, on any device, as `loss` returns it."""
        return run_blocks(self, params, batch, rng)


LossFn = Callable[..., Loss] | BlockModel
"""`(params, batch) -> loss`, or a `BlockModel`; see `shardopt.ddp`."""


def as_block_model(loss_fn: LossFn) -> BlockModel | None:
    """Return the `BlockModel` behind a loss: itself, or the owner of its `loss_fn` method; else None."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    return owner if isinstance(owner, BlockModel) else None


def run_blocks(
    model: BlockModel,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None,
    *,
    gather_outer: Callable[[PyTree], PyTree] = lambda outer: outer,
    run_block: Callable[..., PyTree] | None = None,
    before_loss: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None,
) -> Loss:
    """Run embed, a scan over the blocks, and loss; a strategy's hooks gather what it keeps sharded.

    `run_block(one_block, index, rng, x)` runs inside the scan instead of the model's block, and applies its `remat`;
    `before_loss(outer, x)` gives what the loss is called with.
    """
    blocks = params[BLOCKS]
    kept = {name: value for name, value in params.items() if name != BLOCKS}
    outer = gather_outer(kept)
    num_blocks, run = jax.tree.leaves(blocks)[0].shape[0], run_block or plain_block(model)

    def body(x, block_and_index):
        one_block, index = block_and_index
        return run(one_block, index, rng, x), None

    x = call(model.embed, rng, num_blocks, outer, batch)
    x, _ = jax.lax.scan(body, x, (blocks, jax.numpy.arange(num_blocks)))
    if before_loss is not None:
        outer, x = before_loss(kept, x)
    return call(model.loss, rng, num_blocks + 1, outer, x, batch)


def plain_block(model: BlockModel) -> Callable[..., PyTree]:
    """Return `run(one_block, index, rng, x) -> x`, the block of a model, with its `remat`."""
    return checkpointed(model.remat, lambda one_block, index, rng, x: call(model.block, rng, index, one_block, x))


def call(fn: LossFn, rng: jax.Array | None, index: jax.typing.ArrayLike, *args: PyTree) -> PyTree:
    """Call `fn(*args)`, of a model its loss, with the keyword `rng` folded with `index` if it takes one and one is given.

    Raises:
      TypeError: if `fn` cannot do without a key and none is given.
    """
    if isinstance(fn, BlockModel):
        fn = fn.loss_fn
    if not takes_rng(fn):
        return fn(*args)
    if rng is not None:
        return fn(*args, rng=jax.random.fold_in(rng, index))
    if as_block_model(fn) is None and inspect.signature(fn).parameters["rng"].default is inspect.Parameter.empty:
        name = getattr(inspect.unwrap(fn), "__name__", type(inspect.unwrap(fn)).__name__)
        raise TypeError(f"{name}: there is no random key to give outside of training.\nFix: give rng the default None.")
    return fn(*args)


def takes_rng(fn: Any) -> bool:
    """Return whether a loss or block function takes a keyword named `rng` that is not bound already."""
    model = as_block_model(fn)
    if model is not None:
        return any(takes_rng(part) for part in (model.embed, model.block, model.loss))
    try:
        parameter = inspect.signature(fn).parameters.get("rng")
    except (TypeError, ValueError):  # builtins and some C callables have no signature
        return False
    fn = inspect.unwrap(fn)
    bound = isinstance(fn, functools.partial) and "rng" in fn.keywords
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY and not bound
