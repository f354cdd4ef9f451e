"""One update on one server: average the pushed gradients, apply the rule, then apply the optimizer."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.core.types import Metric, PyTree, Weighted, wide_dtype
from shardopt.engine.metrics import combined, of_rows, value_of
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.sparse import gather_union_rows, is_rows, restrict_to_rows
from shardopt.parameter_server.updates import Update, check_update, replace_trained, trained
from shardopt.reducers import Compressor


class UpdateResult(NamedTuple):
    """The parameters, states and metrics after one update.

    Attributes:
      params: the new parameters.
      opt_state: the new state of the optax transformation.
      rule_state: the new state of the rule.
      metrics: the loss and aux metrics of the rows that the update was computed from.
    """

    params: PyTree
    opt_state: PyTree
    rule_state: PyTree
    metrics: dict[str, jax.Array]


RunUpdate = Callable[[PyTree, PyTree, PyTree, Sequence[Any], jax.Array, PyTree, jax.Array], UpdateResult]
"""`(params, opt_state, rule_state, [(grads, loss, metrics)], rows, pulled, delay)`, traceable, over trained leaves."""


ServerArrays = tuple[PyTree, PyTree, PyTree]
"""`(params, opt_state, rule_state)`, as a `ServerState` has them."""


class Mathematics(Protocol):
    """The placement of parameters and optimizer state, and the functions that update them: on one server, or on several."""

    def begin(self, params: PyTree, /) -> ServerArrays:
        """Return the parameters and the initial states."""
        ...

    def adopt(self, arrays: ServerArrays, /) -> ServerArrays:
        """Place the parameters and states from a checkpoint."""
        ...

    def full_params(self, params: PyTree, /) -> PyTree:
        """Return the parameters as users know them."""
        ...

    def pushed_params(self, update: Update, params: PyTree, /) -> PyTree:
        """Return the parameters that an update changes, as users know them, or their shapes and dtypes."""
        ...

    def check(self, update: Update | None, params: PyTree, worker: int, /) -> Update:
        """Return the update, or refuse it if it does not fit."""
        ...

    def apply(self, arrays: ServerArrays, updates: Sequence[Any], pulled: PyTree, delay: int, /) -> UpdateResult:
        """Apply the mean of the updates."""
        ...

    def copy(self, arrays: ServerArrays, /) -> ServerArrays:
        """Return copies for a checkpoint, which the next update does not overwrite."""
        ...


def copy_states(arrays: ServerArrays) -> ServerArrays:
    """Return the same parameters and copies of the states, because the next update takes over the states' memory."""
    return arrays[0], *jax.tree.map(jnp.copy, arrays[1:])


@dataclass(frozen=True)
class UnshardedMathematics:
    """The mathematics of one server, which has all parameters.

    Attributes:
      tx: the optimizer.
      rule: the staleness rule.
      donate: let each update take over the memory of the optimizer's and the rule's state. The parameters are never
        donated: workers may still hold them.
      codec: the decoder of pushes; None if they are not encoded.
      messages: shapes and dtypes of parameters -> shapes of their message.
    """

    tx: optax.GradientTransformation
    rule: Rule
    donate: bool
    codec: Compressor | None = None
    messages: dict[Hashable, PyTree] = field(default_factory=dict, init=False, repr=False, compare=False)
    adopt = full_params = staticmethod(lambda value: value)
    copy = staticmethod(copy_states)

    @cached_property
    def _jitted(self) -> tuple[RunUpdate, Callable[..., UpdateResult]]:
        """The update of all rows, and the update of some rows."""
        run, donated = update_program(self.tx, self.rule, self.codec), (1, 2) if self.donate else ()
        run_on_rows = restrict_to_rows(self.tx, run)
        return jax.jit(run, donate_argnums=donated), jax.jit(run_on_rows, donate_argnums=[1 + i for i in donated])

    def begin(self, params: PyTree) -> ServerArrays:
        """Return copies of the parameters, and the initial states."""
        params = jax.tree.map(copy_without_weak_type, params)
        return params, *begin_states(self.tx, self.rule, trained(params))

    def pushed_params(self, update: Update, params: PyTree) -> PyTree:
        """Return the parameters: an update changes all."""
        return params

    def check(self, update: Update | None, params: PyTree, worker: int) -> Update:
        """Return the update, or refuse it if it does not match the parameters, or their message."""
        trained_params, message = trained(params), None
        if self.codec is not None:
            leaf_types = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trained_params))
            key = jax.tree.structure(trained_params), leaf_types
            message = self.messages.get(key) or self.messages.setdefault(key, self.codec.message(trained_params))
        return check_update(update, params, worker, message)

    def apply(self, arrays: ServerArrays, updates: Sequence[Update], pulled: PyTree, delay: int) -> UpdateResult:
        """Apply the mean of the updates, summed in list order, so that the same updates give the same bits."""
        params, *states = arrays
        run, run_on_rows = self._jitted
        trained_params, pulled = trained(params), None if pulled is None else trained(pulled)
        if any(is_rows(leaf) for leaf in jax.tree.leaves(updates[0].grads, is_leaf=is_rows)):
            grads, row_indices = gather_union_rows([update.grads for update in updates], trained_params)
            updates = [update._replace(grads=g) for g, update in zip(grads, updates, strict=True)]
            run = partial(run_on_rows, row_indices)
        result = run(*run_arguments((trained_params, *states), updates, pulled, delay))
        return result._replace(params=replace_trained(params, result.params))


def begin_states(tx: optax.GradientTransformation, rule: Rule, params: PyTree) -> tuple[PyTree, PyTree]:
    """Return the initial states of the optimizer and of the rule, over trained parameters."""
    init = tx.init
    return jax.jit(lambda params: jax.tree.map(jnp.copy, init(params)))(params), jax.jit(rule.init)(params)


def update_program(tx: optax.GradientTransformation, rule: Rule, codec: Compressor | None = None) -> RunUpdate:
    """Return the update as a pure function: average the pushed gradients, then the rule, then the optimizer."""
    update = optax.with_extra_args_support(tx).update

    def run(params, opt_state, rule_state, pushed, rows, pulled, delay) -> UpdateResult:
        if codec is not None:
            pushed = [(codec.decode(message, params), loss, aux) for message, loss, aux in pushed]
        grads, metrics = _average(pushed, rows)
        pulled = params if pulled is None else pulled
        grads, rule_state = rule.gradient(grads, rule_state, params=params, pulled=pulled, delay=delay)
        step, opt_state = update(grads, opt_state, params, value=metrics["loss"], grad=grads)
        if rule.scale is not None:
            factor = rule.scale(delay)
            step = jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), step)
        return UpdateResult(optax.apply_updates(params, step), opt_state, rule_state, metrics)

    return run


def run_arguments(arrays: Sequence[PyTree], updates: Sequence[Update], pulled: PyTree, delay: int) -> tuple[Any, ...]:
    """Return the arguments of a `RunUpdate`."""
    pushed = [(update.grads, update.loss, dict(update.metrics)) for update in updates]
    rows = np.asarray([update.rows for update in updates], np.float32)
    return *arrays, pushed, rows, pulled, np.int32(delay)


def metrics_of(updates: Sequence[Update]) -> dict[str, jax.Array]:
    """Return the loss and aux metrics of the rows that these updates were computed from."""
    rows = np.asarray([update.rows for update in updates], np.float32)
    return _metrics([({}, update.loss, dict(update.metrics)) for update in updates], rows)


@jax.jit
def _metrics(pushed: Sequence[tuple[PyTree, Weighted, dict[str, Metric]]], rows: jax.Array) -> dict[str, jax.Array]:
    return _average(pushed, rows)[1]


def _average(
    pushed: Sequence[tuple[PyTree, Weighted, dict[str, Metric]]], rows: jax.Array
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Return the gradient and the metrics on the union of the rows of all pushes."""
    losses = [loss for _, loss, _ in pushed]
    counts = [rows[i].astype(loss.weight.dtype) for i, loss in enumerate(losses)]
    weight = sum(n * loss.weight for n, loss in zip(counts, losses, strict=True))
    loss = sum(n * loss.total for n, loss in zip(counts, losses, strict=True)) / weight
    factors = [n / weight for n in counts]

    def mean(*leaves):
        wide = wide_dtype(leaves[0].dtype)
        scaled = [leaf.astype(wide) * factor.astype(wide) for leaf, factor in zip(leaves, factors, strict=True)]
        return sum(scaled[1:], start=scaled[0]).astype(leaves[0].dtype)

    grads = jax.tree.map(mean, *[pushed_grads for pushed_grads, _, _ in pushed])

    means = {}
    for name in pushed[0][2]:
        push_metrics = [of_rows(metrics[name], n) for (_, _, metrics), n in zip(pushed, counts, strict=True)]
        total = functools.reduce(lambda a, b: combined(a, jnp.add, jnp.maximum, jnp.minimum, b), push_metrics)
        means[name] = jnp.asarray(value_of(total))
    return grads, {"loss": jnp.asarray(loss), **means}


def copy_without_weak_type(leaf: jax.Array | np.ndarray | float) -> jax.Array:
    """Copy a leaf and drop its weak type: with it, the second update would compile another program than the first."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.copy(leaf)
    return jnp.array(leaf, dtype=leaf.dtype, copy=True)
