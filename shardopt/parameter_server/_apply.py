"""One update on one server: average the pushed gradients, apply the rule, then apply the optimizer."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.config._transformation import check_updates, refuse_unsupported
from shardopt.core import Metric, PyTree, Weighted, wide_dtype
from shardopt.losses._metrics import combined, of_rows, value_of
from shardopt.parameter_server._updates import Update, check_update, replace_trained, trained
from shardopt.parameter_server.rules import StalenessRule
from shardopt.reducers._compressor import Compressor
from shardopt.step._inputs import copied
from shardopt.transforms._skip_anomalies import unless_skipped


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


class Pushes(NamedTuple):
    """The pushes of an update.

    Attributes:
      pushed: [(gradient, loss, metrics)].
      rows: the number of rows of each push.
      pulled: the parameters that the pushes were computed from, if the rule needs them.
      delay: versions between the pull and the push.
    """

    pushed: Sequence[Any]
    rows: Any
    pulled: PyTree
    delay: Any


RunUpdate = Callable[[PyTree, tuple[PyTree, PyTree], Pushes], UpdateResult]
"""`(params, (opt_state, rule_state), pushes)`, traceable, over trained leaves."""


ServerArrays = tuple[PyTree, PyTree, PyTree]
"""`(params, opt_state, rule_state)`, as a `ServerState` has them."""


def copy_states(arrays: ServerArrays) -> ServerArrays:
    """Return the same parameters and copies of the states, because the next update takes over the
    states' memory.
    """
    return arrays[0], *jax.tree.map(jnp.copy, arrays[1:])


@dataclass(frozen=True)
class Mathematics:
    """How a push changes the parameters and states of a server.

    Attributes:
      tx: the optimizer.
      rule: the staleness rule.
      donate: let each update take over the memory of the optimizer's and the rule's state. The
        parameters are never donated: workers may still hold them.
      codec: the decoder of pushes; None if they are not encoded.
      messages: shapes and dtypes of trained parameters -> shapes of their message.
    """

    tx: optax.GradientTransformation
    rule: StalenessRule
    donate: bool
    codec: Compressor | None = None
    messages: dict[Hashable, PyTree] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def _program(self) -> RunUpdate:
        run = update_program(self.tx, self.rule, self.codec)
        # A delay is an argument and no constant: one program serves all delays.
        return jax.jit(run, donate_argnums=(1,) if self.donate else ())

    def begin(self, params: PyTree) -> ServerArrays:
        """Return copies of the parameters, and the initial states of the optimizer and the rule."""
        params = copied(params)
        init = self.tx.init
        leaves = trained(params)
        opt_state = jax.jit(lambda leaves: jax.tree.map(jnp.copy, init(leaves)))(leaves)
        refuse_unsupported("parameter_server", opt_state)
        return params, opt_state, jax.jit(self.rule.init)(leaves)

    def check(self, update: Any, params: PyTree, worker: int) -> None:
        """Refuse an update that does not match the parameters, or their message."""
        old = trained(params)
        check_update(update, old, worker, self._message(old))

    def apply(
        self, arrays: ServerArrays, updates: Sequence[Any], pulled: PyTree, delay: int
    ) -> UpdateResult:
        """Apply the mean of the updates to the parameters and states."""
        params, *states = arrays
        old = trained(params)
        pulled = None if pulled is None else trained(pulled)
        result = self._program(*run_arguments((old, *states), updates, pulled, delay))
        return result._replace(params=replace_trained(params, result.params))

    def _message(self, trained_params: PyTree) -> PyTree:
        """Return the shapes of the message of a push; None if pushes are not encoded."""
        if self.codec is None:
            return None
        leaf_types = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trained_params))
        key = jax.tree.structure(trained_params), leaf_types
        if key not in self.messages:
            self.messages[key] = self.codec.message(trained_params)
        return self.messages[key]


def update_program(
    tx: optax.GradientTransformation, rule: StalenessRule, codec: Compressor | None = None
) -> RunUpdate:
    """Return the update as a pure function: average the pushed gradients, then the rule, then the
    optimizer.
    """
    update = optax.with_extra_args_support(tx).update

    def run(params: PyTree, states: tuple[PyTree, PyTree], pushes: Pushes) -> UpdateResult:
        (opt_state, rule_state), (pushed, rows, pulled, delay) = states, pushes
        if codec is not None:
            pushed = [(codec.decode(message, params), loss, aux) for message, loss, aux in pushed]
        grads, metrics = _average(pushed, rows)
        # None: the rule does not read it, or nothing changed since the pull.
        pulled = params if pulled is None else pulled
        old_rule_state = rule_state
        grads, rule_state = rule.gradient(
            grads, rule_state, params=params, pulled=pulled, delay=delay
        )
        old_opt_state = opt_state
        # The optimizer sees the parameters of now, although the gradient belongs to older ones.
        step, opt_state = update(grads, opt_state, params, value=metrics["loss"], grad=grads)
        check_updates("parameter_server", params, step)
        if rule.scale is not None:
            factor = rule.scale(delay)
            # After the optimizer: Adam divides by the size of gradients, so a factor before it has
            # no effect.
            step = jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), step)
        # a refused push changes nothing
        rule_state = unless_skipped(old_opt_state, opt_state, old_rule_state, rule_state)
        return UpdateResult(optax.apply_updates(params, step), opt_state, rule_state, metrics)

    return run


def run_arguments(
    arrays: Sequence[PyTree], updates: Sequence[Update], pulled: PyTree, delay: int
) -> tuple[Any, ...]:
    """Return the arguments of a `RunUpdate`."""
    pushed = [(update.grads, update.loss, dict(update.metrics)) for update in updates]
    rows = np.asarray([update.rows for update in updates], np.float32)
    params, *states = arrays
    return params, tuple(states), Pushes(pushed, rows, pulled, np.int32(delay))


def _average(
    pushed: Sequence[tuple[PyTree, Weighted, dict[str, Metric]]], rows: jax.Array
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Return the gradient and the metrics on the union of the rows of all pushes."""
    losses = [loss for _, loss, _ in pushed]
    # Totals and weights are per row. Times the rows of each push, they add up over pushes.
    counts = [rows[i].astype(loss.weight.dtype) for i, loss in enumerate(losses)]
    weight = sum(n * loss.weight for n, loss in zip(counts, losses, strict=True))
    loss = sum(n * loss.total for n, loss in zip(counts, losses, strict=True)) / weight
    factors = [n / weight for n in counts]

    def mean(*leaves):
        wide = wide_dtype(leaves[0].dtype)
        scaled = [
            leaf.astype(wide) * factor.astype(wide)
            for leaf, factor in zip(leaves, factors, strict=True)
        ]
        return sum(scaled[1:], start=scaled[0]).astype(leaves[0].dtype)

    grads = jax.tree.map(mean, *[pushed_grads for pushed_grads, _, _ in pushed])

    means = {}
    for name in pushed[0][2]:
        push_metrics = [
            of_rows(metrics[name], n) for (_, _, metrics), n in zip(pushed, counts, strict=True)
        ]
        total = functools.reduce(
            lambda a, b: combined(a, jnp.add, jnp.maximum, jnp.minimum, b), push_metrics
        )
        means[name] = jnp.asarray(value_of(total))
    return grads, {"loss": jnp.asarray(loss), **means}
