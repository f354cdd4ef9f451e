"""The mathematics of the server: average the pushes, apply the rule, apply the optimizer."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.core.types import PyTree, Weighted, wide_dtype
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.sparse import is_rows, on_rows, on_union
from shardopt.parameter_server.updates import Update
from shardopt.reducers import Encoding


class Applied(NamedTuple):
    """What one update leaves behind.

    Attributes:
      params: the trained parameters, None for other leaves.
      opt_state: the state of the optax transformation.
      rule_state: the state of the rule.
      metrics: the loss and aux metrics of the rows that the update came from.
    """

    params: PyTree
    opt_state: PyTree
    rule_state: Any
    metrics: dict[str, Any]


def make_apply(
    tx: optax.GradientTransformation, rule: Rule, *, donate: bool, code: Encoding | None = None
) -> Callable[..., Applied]:
    """Return the jitted `apply(params, opt_state, rule_state, updates, pulled, delay) -> Applied`.

    The updates are summed in the order given, so that the same updates give the same bits. With `donate`, the memory
    of the optimizer's and the rule's state is taken over; the parameters, which workers may still hold, never are.

    Args:
      tx: the optimizer. It gets `value` (the loss) and `grad` if it takes extra arguments.
      rule: the staleness rule.
      donate: see above.
      code: how gradients are encoded; None if they come as they are.
    """
    update = optax.with_extra_args_support(tx).update

    def run(params, opt_state, rule_state, pushed, rows, pulled, delay) -> Applied:
        if code is not None:
            pushed = [(code.decode(message, params), loss, aux) for message, loss, aux in pushed]
        grads, metrics = _average(pushed, rows)
        pulled = params if pulled is None else pulled
        grads, rule_state = rule.gradient(grads, rule_state, params=params, pulled=pulled, delay=delay)
        step, opt_state = update(grads, opt_state, params, value=metrics["loss"], grad=grads)
        if rule.scale is not None:
            factor = rule.scale(delay)
            step = jax.tree.map(lambda one: one * factor.astype(one.dtype), step)
        return Applied(optax.apply_updates(params, step), opt_state, rule_state, metrics)

    jitted = jax.jit(run, donate_argnums=(1, 2) if donate else ())
    jitted_on_rows = jax.jit(on_rows(tx, run), donate_argnums=(2, 3) if donate else ())

    def apply(
        params: PyTree, opt_state: PyTree, rule_state: Any, updates: Sequence[Update], pulled: PyTree, delay: int
    ) -> Applied:
        rows = np.asarray([one.rows for one in updates], np.float32)
        if any(is_rows(leaf) for leaf in jax.tree.leaves(updates[0].grads, is_leaf=is_rows)):
            grads, where = on_union([one.grads for one in updates], params)
            pushed = [(g, one.loss, dict(one.metrics)) for g, one in zip(grads, updates, strict=True)]
            return jitted_on_rows(where, params, opt_state, rule_state, pushed, rows, pulled, np.int32(delay))
        pushed = [(one.grads, one.loss, dict(one.metrics)) for one in updates]
        return jitted(params, opt_state, rule_state, pushed, rows, pulled, np.int32(delay))

    return apply


def _average(
    pushed: Sequence[tuple[PyTree, Weighted, dict[str, Weighted]]], rows: Any
) -> tuple[PyTree, dict[str, Any]]:
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
    names = pushed[0][2]
    aux = {name: [metrics[name] for _, _, metrics in pushed] for name in names}
    means = {name: sum(m.total for m in all_) / sum(m.weight for m in all_) for name, all_ in aux.items()}
    return grads, {"loss": jnp.asarray(loss), **means}
