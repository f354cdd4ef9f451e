"""Convert a flax nnx module, and a loss that calls it, to a parameter tree and a pure loss."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core import (
    PyTree,
    Rule,
    Updated,
    Weighted,
    calling,
    is_key,
    leaves_with_paths,
    type_error,
    value_error,
)
from shardopt.core._block_model import LossFn, call
from shardopt.core._extras import require

CALLER = "interop.nnx"


class NnxLoss(NamedTuple):
    """The parameters and the loss of an nnx module, for a strategy; see `nnx`.

    Attributes:
      params: an `nnx.State` of all values in the module except its random keys. For a model given
        as a function of `rngs`, a function `key -> nnx.State`.
      loss_fn: `loss_fn(params, batch, rng=None)`.
      rules: rules that freeze the leaves that are not trained.
    """

    params: PyTree
    loss_fn: LossFn
    rules: tuple[Rule, ...]


@calling(CALLER)
def nnx(model: Any, loss: Callable[..., Any], *, wrt: Any = None) -> NnxLoss:
    """Return the parameters and the pure loss of a flax nnx module.

    Args:
      model: an `nnx.Module`, in the mode to train in; or a function `rngs -> nnx.Module`, such as
        the class of the module. With a function, `opt.init(params, key)` creates the parameters
        sharded.
      loss: `loss(model, batch)` -> scalar or `Weighted`, or a pair of either and an aux dict. With
        a keyword `rng` it gets the random key of the step.
      wrt: an nnx filter of the variables to train: by default `nnx.Param`; `nnx.LoRAParam` for
        adapters.

    Returns:
      An `NnxLoss`. `nnx.update(model, state.params)` copies trained parameters into a module. The
      next `opt.step` reuses their memory, so copy them first if training continues.

    Raises:
      ModuleNotFoundError: if flax is not installed.
      TypeError: if `model` is neither a module nor a function that returns one.
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
      >>> params, loss_fn, rules = so.interop.nnx(model, loss)
      >>> opt = so.fsdp(optax.adam(0.1), so.make_mesh(), loss_fn, rules=rules)
      >>> state = opt.init(params)
      >>> state, metrics = opt.step(state, {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 2))})
      >>> nnx.update(model, state.params)

    **Random keys and state**: with g the structure of the module, s its values and k the key of the
    step, `loss_fn(s, batch, rng=k)` is `loss(nnx.merge(g, s, [fold_in(k, 1), fold_in(k, 2), ...]),
    batch)`. Each stream of the module's `Rngs` gets its own key, so dropout draws a new mask in
    each step. State that the call changes (`BatchStat`, counters) is passed to the next step
    through `Updated`. Without `rng`, as in `opt.evaluate`, the module runs as after `model.eval()`.

    **Equivalence**: the same as for the strategy. A loss with BatchNorm is not a mean over rows; it
    is exact with `view="global"`.

    References:
      Heek et al., "Flax: A neural network library and ecosystem for JAX", 2024.
    """
    require("flax", extra="flax")
    from flax import nnx as flax

    is_module = isinstance(model, flax.Module)
    abstract_module = (
        flax.eval_shape(lambda: model if is_module else model(flax.Rngs(0)))
        if callable(model) or is_module
        else model
    )
    if not isinstance(abstract_module, flax.Module):
        problem = (
            "model must be an nnx.Module, or a function rngs -> nnx.Module, got"
            f" {type(model).__name__}."
        )
        raise type_error(problem)
    structure, streams, values = flax.split(abstract_module, flax.RngState, ...)
    trained_paths = {
        path
        for path, _ in leaves_with_paths(
            flax.filter_state(values, flax.Param if wrt is None else wrt)
        )
    }
    if not trained_paths:
        problem = f"wrt={wrt} matches nothing that {type(abstract_module).__name__} holds."
        raise value_error(problem, fix="pass a filter of nnx, such as nnx.Param.")

    def state_of(module: Any) -> PyTree:
        return flax.state(module, flax.Not(flax.RngState))

    def loss_fn(params: PyTree, batch: PyTree, rng: jax.Array | None = None) -> Any:
        keys = _draw_keys(streams, jax.random.key(0) if rng is None else rng)
        module = flax.merge(structure, keys, params, copy=True)
        if rng is None:
            module.eval()
            return call(loss, None, 0, module, batch)
        old_leaves = leaves_with_paths(params)
        loss_result = call(loss, rng, 0, module, batch)
        new_leaves = dict(leaves_with_paths(state_of(module)))
        changed = {
            path: new_leaves[path]
            for path, value in old_leaves
            if new_leaves.get(path, value) is not value
        }
        return _with_updates(loss_result, changed)

    params = state_of(model) if is_module else lambda rng: state_of(model(flax.Rngs(rng)))
    rules: list[Rule] = [
        (f"^{re.escape(path)}$", "frozen")
        for path, _ in leaves_with_paths(values)
        if path not in trained_paths
    ]
    return NnxLoss(params, loss_fn, tuple(rules))


def _draw_keys(streams: PyTree, rng: jax.Array) -> PyTree:
    """Return the state of random streams with keys drawn from `rng` and counts at zero.

    `streams` gives the shapes.
    """
    leaves, treedef = jax.tree.flatten(streams)

    def draw(leaf: jax.ShapeDtypeStruct, index: int) -> jax.Array:
        if is_key(leaf):
            # stacked modules have stacks of keys
            return jax.random.split(jax.random.fold_in(rng, index), leaf.shape)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return treedef.unflatten([draw(leaf, index) for index, leaf in enumerate(leaves, 1)])


def _with_updates(loss_result: Any, changed: dict[str, jax.Array]) -> Any:
    """Return the result of a loss with the changed state added to its aux dict."""
    has_aux = (
        isinstance(loss_result, tuple)
        and not isinstance(loss_result, Weighted)
        and len(loss_result) == 2
    )
    loss, aux = loss_result if has_aux else (loss_result, None)
    if not changed or not isinstance(aux, dict | None):
        return loss_result
    return loss, {**(aux or {}), "nnx_state": Updated(changed)}
