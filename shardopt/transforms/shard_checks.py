"""What may stand inside of `shard_updates`: what does with a shard of a leaf what it does with all of it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract
from shardopt.reducers.axis import tracks_varying
from shardopt.transforms.elementwise import compare
from shardopt.transforms.primitives import ELEMENT, SAME, SHAPE, Label, Scope, join, mixed

DRAWS = frozenset(["random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma"])
"""Primitives that make random numbers."""
FIX = (
    "use so.zero, which runs any optimizer; or one that works element by element, with "
    "so.transforms.clip_by_global_norm(..., split=True) inside of it for clipping."
)


def check_elementwise(
    who: str,
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    whole: tuple[PyTree, PyTree],
    shards: tuple[PyTree, PyTree],
    extra_args: dict[str, Any],
) -> None:
    """Refuse a transformation that cannot be shown to act element by element, or draws random numbers.

    What it sums over a leaf is let through if a collective completes the sum before it is used otherwise. Nothing is
    computed: `init` and `update` are traced for whole leaves on one device, and for shards.

    Args:
      who: for the message.
      tx: the transformation.
      names: the axes that leaves are sharded over.
      whole: gradients and parameters (or None).
      shards: those of one device.
      extra_args: of `update`.

    Raises:
      ValueError: if it cannot be shown.
    """
    found = frozenset[str]().union(*(label.by for label in _labels(who, tx, names, whole, shards, extra_args)))
    if not found:
        return
    fix = FIX
    if mixing := ", ".join(sorted(found - DRAWS - {SHAPE})):
        problem = f"inner mixes elements of a leaf ({mixing}), which means something else on a shard of it."
    elif drawing := ", ".join(sorted(found & DRAWS)):
        problem = f"inner draws random numbers ({drawing}), which would be the same on each shard."
        fix = (
            "draw them before it: optax.chain(so.transforms.average_gradients(...), what draws, "
            "so.transforms.shard_updates(...))."
        )
    else:
        problem = "inner computes something else for shards: it depends on shapes, or on the number of devices."
    raise ValueError(format_error(who, problem, fix=fix))


def _labels(
    who: str,
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    whole: tuple[PyTree, PyTree],
    shards: tuple[PyTree, PyTree],
    extra_args: dict[str, Any],
) -> list[Label]:
    """Return the labels of updates and state that cannot be let through."""
    scope = Scope(frozenset(names))
    both = [_as_sharded(one, names) for one in (whole, shards)]
    seen = [grads if params is None else params for grads, params in both]
    states = [jax.eval_shape(tx.init, one) for one in seen]
    if jax.tree.structure(states[0]) != jax.tree.structure(states[1]):
        return [mixed(SHAPE)]
    elements = [Label(ELEMENT, pad=0.0)] * len(jax.tree.leaves(both[0]))
    num_params = len(jax.tree.leaves(both[0][1]))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return tx.update(grads, state, params, **extra_args)

    def traced(f: Callable[..., Any], args: Sequence[tuple[PyTree, ...]]) -> tuple[Any, Any]:
        on_one = jax.make_jaxpr(f, axis_env=[(name, 1) for name in names])(*args[0])
        try:
            return on_one, jax.make_jaxpr(f)(*args[1])
        except TypeError as error:  # of an array that has the shape of the leaf
            problem = "inner can be traced for leaves, but not for shards of them."
            raise ValueError(format_error(who, problem, [str(error).split("\n")[0]], FIX)) from error

    kept = compare(*traced(tx.init, [(one,) for one in seen]), elements[: len(jax.tree.leaves(seen[0]))], scope)
    args = [(grads, state, params) for (grads, params), state in zip(both, states, strict=True)]
    traces = traced(update, args)
    first = len(elements) - num_params
    while True:  # until another update adds nothing to what the state is made of
        outs = compare(*traces, [*elements[:first], *kept, *elements[first:]], scope)
        merged = [join(*pair) for pair in zip(kept, outs[len(outs) - len(kept) :], strict=True)]
        if merged == kept:
            break
        kept = merged
    updates = outs[: len(outs) - len(kept)]
    bad = [x for x in kept if x.kind not in (SAME, ELEMENT)]
    return bad + [x if x.by else mixed(SHAPE) for x in updates if not (x.kind in (SAME, ELEMENT) and not x.lead)]


def _as_sharded(trees: tuple[PyTree, PyTree], names: tuple[str, ...]) -> tuple[PyTree, PyTree]:
    """Return abstract leaves; where types track what varies, of such as shards have."""
    shapes = abstract(trees)
    if not tracks_varying(names):
        return shapes

    def make():
        return jax.tree.map(lambda x: jax.lax.pcast(jnp.zeros(x.shape, x.dtype), names, to="varying"), shapes)

    return jax.eval_shape(make)
