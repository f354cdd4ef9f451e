"""A step of a strategy in plain jax and optax, on one device, for `check`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.config._transformation import ExtraArgs, call_update
from shardopt.core import (
    Arrays,
    Max,
    Min,
    PyTree,
    Sum,
    Updated,
    Weighted,
    is_floating,
    leaves_with_paths,
)
from shardopt.diagnose._piece_loss import PieceLoss
from shardopt.mesh import without_mesh
from shardopt.transforms._skip_anomalies import unless_skipped


class Evaluation(NamedTuple):
    """A loss of a whole batch.

    Attributes:
      loss: the loss.
      metrics: name -> value.
      updates: key path -> new value of a frozen leaf.
    """

    loss: jax.Array
    metrics: dict[str, jax.Array]
    updates: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class OneDevice:
    """The mathematics that a strategy promises: no mesh, no wire, no micro-batches.

    It shares the user's loss and optimizer with the strategy, and calls nothing that a step of the
    strategy calls between them. Arguments and results are on the host.

    Attributes:
      config: of the strategy; its loss takes no random key.
      layout: of the parameters.
    """

    config: StrategyConfig
    layout: Layout

    def evaluate(self, params: PyTree, batch: PyTree) -> Evaluation:
        """Return the loss and metrics that an evaluation reports."""
        loss = dataclasses.replace(self._trained, config=self.config.of_evaluation)
        return self._run(jax.jit(functools.partial(self._evaluate, loss)), params, batch)

    def differentiate(self, params: PyTree, batch: PyTree) -> tuple[Evaluation, Arrays]:
        """Return the loss of a step, and the gradients of the trained leaves."""
        return self._run(self._differentiate, params, batch)

    def first_state(self, params: PyTree) -> PyTree:
        """Return the first state of the optimizer."""
        return self._run(jax.jit(self.config.update.tx.init), self.layout.trainable(params))

    def update(
        self, params: PyTree, opt_state: PyTree, grads: PyTree, taken: Evaluation, batch: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the new parameters and optimizer state for some gradients."""
        return self._run(self._update, params, opt_state, grads, taken, batch)

    def _run(self, function: Callable[..., Any], *args: PyTree) -> Any:
        device = self.config.mesh.local_devices[0]
        with without_mesh(), jax.default_device(device):
            return jax.device_get(function(*args))

    @property
    def _trained(self) -> PieceLoss:
        return PieceLoss(self.config, self.layout, hide_rows=False, params=None, batch=None)

    def _evaluate(self, loss: PieceLoss, params: PyTree, batch: PyTree) -> Evaluation:
        returned = loss.returned(self._as_sent(params), batch, None)
        value = returned
        metrics = {}
        if type(returned) is tuple:  # Weighted is a named tuple
            value, metrics = returned
        updates = [x for x in metrics.values() if isinstance(x, Updated)]
        return Evaluation(
            _value(value),
            {name: _value(x) for name, x in metrics.items() if not isinstance(x, Updated)},
            {path: leaf for x in updates for path, leaf in leaves_with_paths(x.values)},
        )

    def _as_sent(self, params: PyTree) -> PyTree:
        """Return the parameters in the dtype that the loss should read."""
        dtype = self.config.wire.gather_dtype
        if dtype is None:
            return params
        leaves = self.layout.trained_leaves(self.layout.treedef.flatten_up_to(params))
        cast = [x.astype(dtype) if is_floating(x) else x for x in leaves]
        return self.layout.merge(self.layout.treedef.flatten_up_to(params), cast)

    @functools.cached_property
    def _differentiate(self) -> Callable[..., tuple[Evaluation, Arrays]]:
        def differentiate(params, batch):
            leaves = self.layout.treedef.flatten_up_to(params)

            def loss_at(trained):
                taken = self._evaluate(self._trained, self.layout.merge(leaves, trained), batch)
                return taken.loss, taken

            grads, taken = jax.grad(loss_at, has_aux=True)(self.layout.trained_leaves(leaves))
            return taken, grads

        return jax.jit(differentiate)

    @functools.cached_property
    def _update(self) -> Callable[..., tuple[PyTree, PyTree]]:
        layout = self.layout

        def update(params, opt_state, grads, taken, batch):
            leaves = layout.treedef.flatten_up_to(params)
            trained = layout.trainable(params)

            def loss_at(trained):
                merged = layout.merge(leaves, jax.tree.leaves(trained))
                return self._evaluate(self._trained, merged, batch).loss

            def grad_at(trained, _=0):  # sam passes the number of its step
                return jax.grad(loss_at)(trained)

            extra_args = ExtraArgs(taken.loss, grads, loss_at, grad_at)
            updates, new_opt_state = call_update(
                self.config.update.tx, grads, opt_state, trained, extra_args
            )
            updated = jax.tree.leaves(optax.apply_updates(trained, updates))
            paths = [plan.path for plan in layout.plans]
            replaced = [
                jnp.asarray(taken.updates.get(path, leaf)).astype(leaf.dtype)
                for path, leaf in zip(paths, leaves, strict=True)
            ]
            new_params = layout.merge(replaced, updated)
            return unless_skipped(opt_state, new_opt_state, params, new_params), new_opt_state

        return jax.jit(update)


def _value(result: Any) -> Any:
    """Return the value of a loss or a metric on a whole batch."""
    if isinstance(result, Weighted):
        totals = jax.tree.leaves(result.total)
        weights = jax.tree.leaves(result.weight)
        return sum(total / weight for total, weight in zip(totals, weights, strict=True))
    return jnp.asarray(result.value if isinstance(result, Sum | Max | Min) else result)
