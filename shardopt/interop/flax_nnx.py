"""flax nnx: a module and a loss that calls it, as a parameter tree and a pure loss."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.block_model import LossFn, call
from shardopt.core.errors import format_error
from shardopt.core.extras import require
from shardopt.core.types import PyTree, Updated, Weighted, leaves_with_paths

WHO = "interop.nnx"


class NnxLoss(NamedTuple):
    """What a strategy needs of an nnx module; see `nnx`.

    Attributes:
      params: an `nnx.State` of all that the module holds but its random keys; or a function `key -> nnx.State`, if it
        was given as a function of `rngs`.
      loss_fn: `loss_fn(params, batch, rng=None)`.
      frozen: regexes of the key paths of leaves that are not trained.
    """

    params: PyTree
    loss_fn: LossFn
    frozen: tuple[str, ...]


def nnx(model: Any, loss: Callable[..., Any], *, wrt: Any = None) -> NnxLoss:
    """Return the parameters and the pure loss of a flax nnx module.

    With g the module's structure, s what it holds and k the key of the step, `loss_fn(s, batch, rng=k)` is
    `loss(nnx.merge(g, s, [fold_in(k, 1), fold_in(k, 2), ...]), batch)`: each stream of the module's `Rngs` gets a key of
    its own, so dropout draws a new mask each step. State that the call changes (`BatchStat`, counters) is carried to the
    next step through `Updated`. Without `rng`, as in `opt.evaluate`, the module runs as after `model.eval()`.

    **Equivalence**: that of the strategy. BatchNorm makes a loss no mean over rows: it is exact with `view="global"`.

    Args:
      model: an `nnx.Module`, in the mode it is to be trained in; or a function `rngs -> nnx.Module`, such as its class,
        and then `opt.init(params, key)` creates the parameters sharded.
      loss: `loss(model, batch)` -> scalar or `Weighted`, or (that, aux dict); with a keyword `rng`, the key of the step.
      wrt: an nnx filter, what is trained: by default `nnx.Param`; `nnx.LoRAParam` for adapters.

    Returns:
      An `NnxLoss`. `nnx.update(model, state.params)` brings what was learned into a module. The next `opt.step` takes
      over that memory: copy it if training goes on.

    Raises:
      ModuleNotFoundError: if flax is not installed.
      TypeError: if `model` is neither a module nor a function that makes one.
      ValueError: if `wrt` matches nothing.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> from flax import nnx
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.linear, self.dropout = nnx.Linear(4, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.dropout(self.linear(x))
      >>> loss = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
      >>> model = Net(nnx.Rngs(0))
      >>> params, loss_fn, frozen = so.interop.nnx(model, loss)
      >>> opt = so.fsdp(optax.adam(0.1), so.make_mesh(), loss_fn, frozen=frozen)
      >>> state = opt.init(params)
      >>> state, metrics = opt.step(state, {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 2))})
      >>> nnx.update(model, state.params)

    References:
      Heek et al., "Flax: A neural network library and ecosystem for JAX", 2024.
    """
    require("flax", extra="flax", who=WHO)
    from flax import nnx as flax

    made = isinstance(model, flax.Module)
    shapes = flax.eval_shape(lambda: model if made else model(flax.Rngs(0))) if callable(model) or made else model
    if not isinstance(shapes, flax.Module):
        what = f"model must be an nnx.Module, or a function rngs -> nnx.Module, got {type(model).__name__}."
        raise TypeError(format_error(WHO, what))
    structure, streams, held = flax.split(shapes, flax.RngState, ...)
    trained = {path for path, _ in leaves_with_paths(flax.filter_state(held, flax.Param if wrt is None else wrt))}
    if not trained:
        what = f"wrt={wrt} matches nothing that {type(shapes).__name__} holds."
        raise ValueError(format_error(WHO, what, fix="pass a filter of nnx, such as nnx.Param."))

    def state_of(net: Any) -> PyTree:
        return flax.state(net, flax.Not(flax.RngState))

    def loss_fn(params: PyTree, batch: PyTree, rng: jax.Array | None = None) -> Any:
        keys = _draw_keys(streams, jax.random.key(0) if rng is None else rng)
        net = flax.merge(structure, keys, params, copy=True)
        if rng is None:
            net.eval()
            return call(loss, None, 0, net, batch)
        before, returned = leaves_with_paths(params), call(loss, rng, 0, net, batch)
        after = dict(leaves_with_paths(state_of(net)))
        new = {path: after[path] for path, value in before if after.get(path, value) is not value}
        return _with_updates(returned, new)

    params = state_of(model) if made else lambda rng: state_of(model(flax.Rngs(rng)))
    frozen = tuple(f"^{re.escape(path)}$" for path, _ in leaves_with_paths(held) if path not in trained)
    return NnxLoss(params, loss_fn, frozen)


def _draw_keys(streams: PyTree, rng: jax.Array) -> PyTree:
    """Return the state of random streams (keys and counts, given as shapes) with keys drawn from one, counts at zero."""
    leaves, treedef = jax.tree.flatten(streams)

    def draw(leaf: jax.ShapeDtypeStruct, index: int) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.fold_in(rng, index), leaf.shape)  # stacked modules have stacks of keys
        return jnp.zeros(leaf.shape, leaf.dtype)

    return treedef.unflatten([draw(leaf, index) for index, leaf in enumerate(leaves, 1)])


def _with_updates(returned: Any, new: dict[str, jax.Array]) -> Any:
    """Return what a loss returned, with new values of state in its aux dict."""
    pair = isinstance(returned, tuple) and not isinstance(returned, Weighted) and len(returned) == 2
    main, aux = returned if pair else (returned, None)
    if not new or not isinstance(aux, dict | None):
        return returned
    return main, {**(aux or {}), "nnx_state": Updated(new)}
