"""Whether an optimizer looks beyond single elements: one that does means something else on a shard."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardopt.core.errors import complaint
from shardopt.core.types import PyTree, abstract
from shardopt.reducers.axis import tracks_varying
from shardopt.transforms.dataflow import ELEMENTS, Findings, follow, join


def check_elementwise(
    who: str,
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    grads: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
) -> None:
    """Refuse a transformation that mixes elements, or draws random numbers.

    What it reduces over a leaf is let through if a collective makes it whole before it is used otherwise. Nothing is
    computed: `init` and `update` are traced for whole leaves.

    Raises:
      ValueError: if it does.
    """
    found = _findings(tx, names, grads, params, extra_args)
    if found.mixing:
        mixing = ", ".join(sorted(found.mixing))
        what = f"inner mixes elements of a leaf ({mixing}), which means something else on a shard of it."
        fix = (
            "use so.zero, which runs any optimizer; or one that works element by element, with "
            "so.transforms.clip_by_global_norm(..., split=True) inside of it for clipping."
        )
        raise ValueError(complaint(who, what, fix=fix))
    if found.drawing:
        drawing = ", ".join(sorted(found.drawing))
        what = f"inner draws random numbers ({drawing}), which would be the same on each shard."
        fix = (
            "draw them before it: optax.chain(so.transforms.average_gradients(...), what draws, "
            "so.transforms.shard_updates(...))."
        )
        raise ValueError(complaint(who, what, fix=fix))


def _findings(
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    grads: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
) -> Findings:
    def update(grads, state, params):
        return tx.update(grads, state, params, **extra_args)

    found = Findings(set(), set())
    whole = _as_split(params if params is not None else grads, names)
    state = jax.eval_shape(tx.init, whole)
    labels = follow(jax.make_jaxpr(tx.init)(whole).jaxpr, [ELEMENTS] * len(jax.tree.leaves(whole)), found)
    given = None if params is None else whole
    jaxpr = jax.make_jaxpr(update)(_as_split(grads, names), state, given).jaxpr
    num_grads = len(jax.tree.leaves(grads))
    others = [ELEMENTS] * (len(jaxpr.invars) - num_grads - len(labels))
    while True:  # what the state is made of, once elements have reached all of it that they can
        outs = follow(jaxpr, [*[ELEMENTS] * num_grads, *labels, *others], found)
        merged = [join(pair) for pair in zip(labels, outs[-len(labels) :] if labels else (), strict=True)]
        found.mixing.update(*(label for label in [*outs, *merged] if label))
        merged = [label and ELEMENTS for label in merged]
        if merged == labels:
            return found
        labels = merged


def _as_split(tree: PyTree, names: tuple[str, ...]) -> PyTree:
    """Return abstract whole leaves; where types track what varies, of such as shards have."""
    shapes = abstract(tree)
    if not tracks_varying(names):
        return shapes

    def make():
        return jax.tree.map(lambda x: jax.lax.pcast(jnp.zeros(x.shape, x.dtype), names, to="varying"), shapes)

    return jax.eval_shape(make)
