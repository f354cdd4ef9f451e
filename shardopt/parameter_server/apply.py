"""One update: what is pushed is averaged, then the rule, then the optimizer; on one server."""

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
from shardopt.parameter_server.sparse import is_rows, on_rows, on_union
from shardopt.parameter_server.updates import Update, check_update, merge, trained
from shardopt.reducers import Compressor


class Applied(NamedTuple):
    """What one update leaves behind.

    Attributes:
      params: the parameters.
      opt_state: the state of the optax transformation.
      rule_state: the state of the rule.
      metrics: the loss and aux metrics of the rows that the update came from.
    """

    params: PyTree
    opt_state: PyTree
    rule_state: PyTree
    metrics: dict[str, jax.Array]


class PartPrograms(NamedTuple):
    """What one of several servers does with its part, wherever it is.

    Attributes:
      begin: `begin(part) -> (opt_state, rule_state)`.
      has_sums: `has_sums(part)`: does the optimizer ask for sums over servers, in a first phase?
      sums: `sums(part, opt_state, rule_state, updates, pulled, delay)`: what this part adds to these.
      apply: `apply(sums_of, part, opt_state, rule_state, updates, pulled, delay) -> Applied`, given those of all servers.
    """

    begin: Callable[[PyTree], tuple[PyTree, PyTree]]
    has_sums: Callable[[PyTree], bool]
    sums: Callable[..., list[jax.Array]]
    apply: Callable[..., Applied]


class Mathematics(NamedTuple):
    """Where parameters and optimizer state are, and how an update changes them: on one server, or on several.

    Attributes:
      begin: `begin(params) -> (params, opt_state, rule_state)`, as a `ServerState` has them.
      adopt: `adopt(params, opt_state, rule_state)`, the same from a checkpoint.
      like: `like(params)`: the parameters as users know them, or shapes and dtypes of them.
      whole: `whole(params)`: the parameters as users know them.
      check: `check(update, params, worker) -> update`; refuses one that does not fit.
      apply: `apply(params, opt_state, rule_state, updates, pulled, delay) -> Applied`.
      copy: `copy(params, opt_state, rule_state)`: copies that the next update leaves alone, for a checkpoint.
      programs: what one of several servers does.
      part: `part(update, params)`: the parameters that an update speaks of, where these are not all.
    """

    begin: Callable[[PyTree], tuple[PyTree, PyTree, PyTree]]
    adopt: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
    like: Callable[[PyTree], PyTree]
    whole: Callable[[PyTree], PyTree]
    check: Callable[[Update | None, PyTree, int], Update]
    apply: Callable[[PyTree, PyTree, PyTree, Sequence[Any], PyTree, int], Applied]
    copy: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
    programs: PartPrograms | None = None
    part: Callable[[Update, PyTree], PyTree] = lambda update, params: params


def on_one_server(
    tx: optax.GradientTransformation, rule: Rule, *, donate: bool, codec: Compressor | None = None
) -> Mathematics:
    """Return the mathematics of one server, which has all parameters."""
    update = make_apply(tx, rule, donate=donate, codec=codec)
    expected: dict[Hashable, PyTree] = {}  # the message for parameters of these shapes

    def begin(params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        params = jax.tree.map(own, params)
        return params, *begin_states(tx, rule, trained(params))

    def check(update: Update | None, params: PyTree, worker: int) -> Update:
        part, message = trained(params), None
        if codec is not None:
            key = jax.tree.structure(part), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(part))
            message = expected.get(key) or expected.setdefault(key, codec.message(part))
        return check_update(update, params, worker, message)

    def apply(
        params: PyTree, opt_state: PyTree, rule_state: PyTree, updates: Sequence[Update], pulled: PyTree, delay: int
    ) -> Applied:
        kept = None if pulled is None else trained(pulled)
        new = update(trained(params), opt_state, rule_state, updates, kept, delay)
        return new._replace(params=merge(params, new.params))

    same = lambda params: params  # noqa: E731
    return Mathematics(begin, lambda *states: states, same, same, check, apply, copied)


def copied(params: PyTree, opt_state: PyTree, rule_state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Return states copied, because the next update takes over their memory; parameters are not."""
    return params, *jax.tree.map(jnp.copy, (opt_state, rule_state))


def begin_states(tx: optax.GradientTransformation, rule: Rule, part: PyTree) -> tuple[PyTree, PyTree]:
    """Return the states that optimizer and rule begin with, over trained parameters."""
    begin = tx.init
    return jax.jit(lambda part: jax.tree.map(jnp.copy, begin(part)))(part), jax.jit(rule.init)(part)


RunUpdate = Callable[[PyTree, PyTree, PyTree, Sequence[Any], jax.Array, PyTree, jax.Array], Applied]
"""`(params, opt_state, rule_state, [(grads, loss, metrics)], rows, pulled, delay)`, traceable, over trained leaves."""


def update_program(tx: optax.GradientTransformation, rule: Rule, codec: Compressor | None = None) -> RunUpdate:
    """Return the update as a pure function: average what was pushed, then the rule, then the optimizer."""
    update = optax.with_extra_args_support(tx).update

    def run(params, opt_state, rule_state, pushed, rows, pulled, delay) -> Applied:
        if codec is not None:
            pushed = [(codec.decode(message, params), loss, aux) for message, loss, aux in pushed]
        grads, metrics = _average(pushed, rows)
        pulled = params if pulled is None else pulled
        grads, rule_state = rule.gradient(grads, rule_state, params=params, pulled=pulled, delay=delay)
        step, opt_state = update(grads, opt_state, params, value=metrics["loss"], grad=grads)
        if rule.scale is not None:
            factor = rule.scale(delay)
            step = jax.tree.map(lambda one: one * factor.astype(one.dtype), step)
        return Applied(optax.apply_updates(params, step), opt_state, rule_state, metrics)

    return run


def make_apply(
    tx: optax.GradientTransformation, rule: Rule, *, donate: bool, codec: Compressor | None = None
) -> Callable[..., Applied]:
    """Return the jitted `apply(params, opt_state, rule_state, updates, pulled, delay) -> Applied` over trained leaves.

    The updates are summed in the order given, so that the same updates give the same bits. With `donate`, the memory
    of the optimizer's and the rule's state is taken over; the parameters, which workers may still hold, never are.
    """
    run = update_program(tx, rule, codec)
    jitted = jax.jit(run, donate_argnums=(1, 2) if donate else ())
    jitted_on_rows = jax.jit(on_rows(tx, run), donate_argnums=(2, 3) if donate else ())

    def apply(
        params: PyTree, opt_state: PyTree, rule_state: PyTree, updates: Sequence[Update], pulled: PyTree, delay: int
    ) -> Applied:
        rows = np.asarray([one.rows for one in updates], np.float32)
        if any(is_rows(leaf) for leaf in jax.tree.leaves(updates[0].grads, is_leaf=is_rows)):
            grads, where = on_union([one.grads for one in updates], params)
            pushed = [(g, one.loss, dict(one.metrics)) for g, one in zip(grads, updates, strict=True)]
            return jitted_on_rows(where, params, opt_state, rule_state, pushed, rows, pulled, np.int32(delay))
        pushed = [(one.grads, one.loss, dict(one.metrics)) for one in updates]
        return jitted(params, opt_state, rule_state, pushed, rows, pulled, np.int32(delay))

    return apply


def metrics_of(updates: Sequence[Update]) -> dict[str, jax.Array]:
    """Return the loss and aux metrics of the rows that these updates came from."""
    rows = np.asarray([one.rows for one in updates], np.float32)
    return _metrics([({}, one.loss, dict(one.metrics)) for one in updates], rows)


@jax.jit
def _metrics(pushed: Sequence[tuple[PyTree, Weighted, dict[str, Metric]]], rows: jax.Array) -> dict[str, jax.Array]:
    return _average(pushed, rows)[1]


def _average(
    pushed: Sequence[tuple[PyTree, Weighted, dict[str, Metric]]], rows: jax.Array
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Return the gradient and metrics of the union of the rows."""
    losses = [loss for _, loss, _ in pushed]
    counts = [rows[i].astype(loss.weight.dtype) for i, loss in enumerate(losses)]
    weight = sum(n * loss.weight for n, loss in zip(counts, losses, strict=True))
    loss = sum(n * loss.total for n, loss in zip(counts, losses, strict=True)) / weight
    factors = [n / weight for n in counts]

    def mean(*leaves):
        wide = wide_dtype(leaves[0].dtype)
        scaled = [leaf.astype(wide) * factor.astype(wide) for leaf, factor in zip(leaves, factors, strict=True)]
        return sum(scaled[1:], start=scaled[0]).astype(leaves[0].dtype)

    grads = jax.tree.map(mean, *[one for one, _, _ in pushed])

    means = {}
    for name in pushed[0][2]:
        parts = [of_rows(metrics[name], n) for (_, _, metrics), n in zip(pushed, counts, strict=True)]
        together = functools.reduce(lambda a, b: combined(a, jnp.add, jnp.maximum, jnp.minimum, b), parts)
        means[name] = jnp.asarray(value_of(together))
    return grads, {"loss": jnp.asarray(loss), **means}


def own(leaf: jax.Array | np.ndarray | float) -> jax.Array:
    """Copy a leaf, without the weak type that would make the second update another program than the first."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.copy(leaf)
    return jnp.array(leaf, dtype=leaf.dtype, copy=True)
