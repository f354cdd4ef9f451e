"""A model as embed, a stack of equal blocks, and a loss: what can be gathered or pipelined block by block."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from shardopt.core.types import PyTree

BLOCKS = "blocks"
GATHERED = "shardopt_gathered"
"""The `checkpoint_name` of weights gathered for the moment."""


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
      remat: what the backward pass recomputes of a block. None: nothing but weight gathers. "full": the
        whole block from its input. Otherwise a `jax.checkpoint` policy.

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

    embed: Callable[..., Any]
    block: Callable[..., Any]
    loss: Callable[..., Any]
    remat: Any = None

    def loss_fn(self, params: PyTree, batch: PyTree, rng: jax.Array | None = None) -> Any:
        """Return the loss of a batch, on any device, as `loss` returns it."""
        return run_blocks(self, params, batch, rng)


def as_block_model(loss_fn: Any) -> BlockModel | None:
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
    gather_block: Callable[[PyTree], PyTree] | None = None,
) -> Any:
    """Run embed, a scan over the blocks, and loss; a strategy's gathers make whole what it keeps split.

    `gather_block` runs inside the scan, so one block is whole at a time, and again in the backward pass.
    """
    blocks = params[BLOCKS]
    outer = gather_outer({name: value for name, value in params.items() if name != BLOCKS})
    num_blocks = jax.tree.leaves(blocks)[0].shape[0]

    def body(x, block_and_index):
        one_block, index = block_and_index
        whole = one_block if gather_block is None else gather_block(one_block)
        return call(model.block, rng, index, whole, x), None

    x = call(model.embed, rng, num_blocks, outer, batch)
    body = _remat(body, model.remat, gathers=gather_block is not None)
    x, _ = jax.lax.scan(body, x, (blocks, jax.numpy.arange(num_blocks)))
    return call(model.loss, rng, num_blocks + 1, outer, x, batch)


def call(fn: Callable[..., Any], rng: jax.Array | None, index: Any, *args: Any) -> Any:
    """Call `fn(*args)`, with the keyword `rng` folded with `index` if it takes one and one is given.

    Raises:
      TypeError: if `fn` cannot do without a key and none is given.
    """
    if not takes_rng(fn):
        return fn(*args)
    if rng is not None:
        return fn(*args, rng=jax.random.fold_in(rng, index))
    if as_block_model(fn) is None and inspect.signature(fn).parameters["rng"].default is inspect.Parameter.empty:
        name = getattr(fn, "__name__", type(fn).__name__)
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
    bound = isinstance(fn, functools.partial) and "rng" in fn.keywords
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY and not bound


def save_all_but_gathers(primitive: Any, *_: Any, **params: Any) -> bool:
    """Say, as a `jax.checkpoint` policy, that the backward pass recomputes weight gathers and nothing else.

    Every step from the gather (of bits, in half precision) to its named result is refused: one that was saved
    would keep the whole weight, and make recomputing the rest free.
    """
    return primitive.name not in ("all_gather", "bitcast_convert_type") and params.get("name") != GATHERED


def _remat(body: Callable[..., Any], remat: Any, *, gathers: bool) -> Callable[..., Any]:
    if remat == "full":
        return jax.checkpoint(body)
    if remat is None and not gathers:
        return body

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        # Saved gathers would stack every block's whole weights for the backward pass, whatever else is saved.
        if gathers and not save_all_but_gathers(primitive, *avals, **params):
            return False
        return True if remat is None else remat(primitive, *avals, **params)

    return jax.checkpoint(body, policy=policy)
