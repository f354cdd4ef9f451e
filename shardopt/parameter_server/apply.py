"""One update on one server: average the pushed gradients, apply the rule, then apply the optimizer."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

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


class ShardPrograms(NamedTuple):
    """The programs that one of several servers runs on its shard, in this process or in another.

    Attributes:
      begin: `begin(shard) -> (opt_state, rule_state)`.
      has_sums: `has_sums(shard)`: does the optimizer need sums over all servers, in a first phase?
      sums: `sums(shard, opt_state, rule_state, updates, pulled, delay)`: the terms that this shard adds to those sums.
      apply: `apply(server_sums, shard, opt_state, rule_state, updates, pulled, delay) -> UpdateResult`, with the terms of
        all servers.
    """

    begin: Callable[[PyTree], tuple[PyTree, PyTree]]
    has_sums: Callable[[PyTree], bool]
    sums: Callable[..., list[jax.Array]]
    apply: Callable[..., UpdateResult]


class Mathematics(NamedTuple):
    """The placement of parameters and optimizer state, and the functions that update them: on one server, or on several.

    Attributes:
      begin: `begin(params) -> (params, opt_state, rule_state)`, as a `ServerState` has them.
      adopt: `adopt(params, opt_state, rule_state)`: the same triple, from a checkpoint.
      abstract_params: `abstract_params(params)`: the parameters as users know them, or their shapes and dtypes.
      full_params: `full_params(params)`: the parameters as users know them.
      check: `check(update, params, worker) -> update`; refuses an update that does not fit.
      apply: `apply(params, opt_state, rule_state, updates, pulled, delay) -> UpdateResult`.
      copy: `copy(params, opt_state, rule_state)`: copies for a checkpoint, which the next update does not overwrite.
      programs: the programs of one server, if there are several.
      pushed_params: `pushed_params(update, params)`: the parameters that an update changes, if it does not change all.
    """

    begin: Callable[[PyTree], tuple[PyTree, PyTree, PyTree]]
    adopt: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
    abstract_params: Callable[[PyTree], PyTree]
    full_params: Callable[[PyTree], PyTree]
    check: Callable[[Update | None, PyTree, int], Update]
    apply: Callable[[PyTree, PyTree, PyTree, Sequence[Any], PyTree, int], UpdateResult]
    copy: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
    programs: ShardPrograms | None = None
    pushed_params: Callable[[Update, PyTree], PyTree] = lambda update, params: params


def make_unsharded_mathematics(
    tx: optax.GradientTransformation, rule: Rule, *, donate: bool, codec: Compressor | None = None
) -> Mathematics:
    """Return the mathematics of one server, which has all parameters."""
    update = make_apply(tx, rule, donate=donate, codec=codec)
    expected_messages: dict[Hashable, PyTree] = {}  # shapes and dtypes of parameters -> shapes of their message

    def begin(params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        params = jax.tree.map(copy_without_weak_type, params)
        return params, *begin_states(tx, rule, trained(params))

    def check(update: Update | None, params: PyTree, worker: int) -> Update:
        trained_params, message = trained(params), None
        if codec is not None:
            leaf_types = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trained_params))
            key = jax.tree.structure(trained_params), leaf_types
            message = expected_messages.get(key) or expected_messages.setdefault(key, codec.message(trained_params))
        return check_update(update, params, worker, message)

    def apply(
        params: PyTree, opt_state: PyTree, rule_state: PyTree, updates: Sequence[Update], pulled: PyTree, delay: int
    ) -> UpdateResult:
        pulled_params = None if pulled is None else trained(pulled)
        result = update(trained(params), opt_state, rule_state, updates, pulled_params, delay)
        return result._replace(params=replace_trained(params, result.params))

    identity = lambda params: params  # noqa: E731
    return Mathematics(begin, lambda *states: states, identity, identity, check, apply, copy_states)


def copy_states(params: PyTree, opt_state: PyTree, rule_state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Return the same parameters and copies of the states, because the next update takes over the states' memory."""
    return params, *jax.tree.map(jnp.copy, (opt_state, rule_state))


def begin_states(tx: optax.GradientTransformation, rule: Rule, params: PyTree) -> tuple[PyTree, PyTree]:
    """Return the initial states of the optimizer and of the rule, over trained parameters."""
    init = tx.init
    return jax.jit(lambda params: jax.tree.map(jnp.copy, init(params)))(params), jax.jit(rule.init)(params)


RunUpdate = Callable[[PyTree, PyTree, PyTree, Sequence[Any], jax.Array, PyTree, jax.Array], UpdateResult]
"""`(params, opt_state, rule_state, [(grads, loss, metrics)], rows, pulled, delay)`, traceable, over trained leaves."""


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


def make_apply(
    tx: optax.GradientTransformation, rule: Rule, *, donate: bool, codec: Compressor | None = None
) -> Callable[..., UpdateResult]:
    """Return the jitted `apply(params, opt_state, rule_state, updates, pulled, delay) -> UpdateResult`, over trained leaves.

    The updates are summed in list order, so that the same updates give the same bits. With `donate`, an update takes over
    the memory of the optimizer's and the rule's state. The parameters are never donated: workers may still hold them.
    """
    run = update_program(tx, rule, codec)
    jitted = jax.jit(run, donate_argnums=(1, 2) if donate else ())
    jitted_on_rows = jax.jit(restrict_to_rows(tx, run), donate_argnums=(2, 3) if donate else ())

    def apply(
        params: PyTree, opt_state: PyTree, rule_state: PyTree, updates: Sequence[Update], pulled: PyTree, delay: int
    ) -> UpdateResult:
        rows = np.asarray([update.rows for update in updates], np.float32)
        if any(is_rows(leaf) for leaf in jax.tree.leaves(updates[0].grads, is_leaf=is_rows)):
            grads, row_indices = gather_union_rows([update.grads for update in updates], params)
            pushed = [(g, update.loss, dict(update.metrics)) for g, update in zip(grads, updates, strict=True)]
            return jitted_on_rows(row_indices, params, opt_state, rule_state, pushed, rows, pulled, np.int32(delay))
        pushed = [(update.grads, update.loss, dict(update.metrics)) for update in updates]
        return jitted(params, opt_state, rule_state, pushed, rows, pulled, np.int32(delay))

    return apply


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
