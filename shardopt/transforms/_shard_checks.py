"""The check of `shard_updates`: its inner transformation must treat a shard of a leaf as it treats
the whole leaf.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardopt.core._errors import error_text
from shardopt.core._types import PyTree, abstract
from shardopt.reducers._axis import tracks_varying
from shardopt.trace._walk import fixed_point
from shardopt.transforms._elementwise import compare
from shardopt.transforms._primitives import ELEMENT, SAME, SHAPE, Label, LeafSplit, mixed

DRAWS = frozenset(
    ["random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma"]
)
"""Primitives that draw random numbers."""
FIX = (
    "use so.zero, which runs any optimizer; or one that works element by element, with "
    "so.transforms.clip_by_global_norm(..., split=True) inside of it for clipping."
)


def check_elementwise(
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    whole_trees: tuple[PyTree, PyTree],
    shard_trees: tuple[PyTree, PyTree],
    extra_args: dict[str, Any],
) -> None:
    """Raise an error unless a transformation is shown to act element by element and to draw no
    random numbers.

    A sum over a leaf is allowed if a collective completes the sum before any other use. Nothing is
    computed: `init` and `update` are traced for whole leaves on one device, and for shards.

    Args:
      tx: the transformation.
      names: the axes that leaves are sharded over.
      whole_trees: gradients, and parameters or None.
      shard_trees: the shards of these trees on one device.
      extra_args: the extra arguments of `update`.

    Raises:
      ValueError: if the transformation is not shown to act element by element, or draws random
        numbers.
    """
    primitives = frozenset[str]().union(
        *(
            label.primitives
            for label in _refused_labels(tx, names, whole_trees, shard_trees, extra_args)
        )
    )
    if not primitives:
        return
    fix = FIX
    if mixing := ", ".join(sorted(primitives - DRAWS - {SHAPE})):
        problem = (
            f"inner mixes elements of a leaf ({mixing}), which means something else on a shard"
            " of it."
        )
    elif drawing := ", ".join(sorted(primitives & DRAWS)):
        problem = f"inner draws random numbers ({drawing}), which would be the same on each shard."
        fix = (
            "draw them before it: optax.chain(so.transforms.average_gradients(...), what draws, "
            "so.transforms.shard_updates(...))."
        )
    else:
        problem = (
            "inner computes something else for shards: it depends on shapes, or on the number of"
            " devices."
        )
    raise ValueError(error_text(problem, fix=fix))


def _refused_labels(
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    whole_trees: tuple[PyTree, PyTree],
    shard_trees: tuple[PyTree, PyTree],
    extra_args: dict[str, Any],
) -> list[Label]:
    """Return the labels of updates and state that `check_elementwise` refuses.

    None if `tx` acts element by element.
    """
    split = LeafSplit(frozenset(names))
    abstract_trees = [_as_sharded(trees, names) for trees in (whole_trees, shard_trees)]
    init_trees = [grads if params is None else params for grads, params in abstract_trees]
    states = [jax.eval_shape(tx.init, tree) for tree in init_trees]
    if jax.tree.structure(states[0]) != jax.tree.structure(states[1]):
        return [mixed(SHAPE)]
    elements = [Label(ELEMENT, pad_value=0.0)] * len(jax.tree.leaves(abstract_trees[0]))
    num_params = len(jax.tree.leaves(abstract_trees[0][1]))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return tx.update(grads, state, params, **extra_args)

    def trace_both(f: Callable[..., Any], args: Sequence[tuple[PyTree, ...]]) -> tuple[Any, Any]:
        whole_trace = jax.make_jaxpr(f, axis_env=[(name, 1) for name in names])(*args[0])
        try:
            return whole_trace, jax.make_jaxpr(f)(*args[1])
        except TypeError as error:
            # raised where `tx` closes over an array with the shape of the whole leaf
            problem = "inner can be traced for leaves, but not for shards of them."
            raise ValueError(error_text(problem, [str(error).split("\n")[0]], FIX)) from error

    state_labels = compare(
        *trace_both(tx.init, [(tree,) for tree in init_trees]),
        elements[: len(jax.tree.leaves(init_trees[0]))],
        split,
    )
    args = [
        (grads, state, params)
        for (grads, params), state in zip(abstract_trees, states, strict=True)
    ]
    traces = trace_both(update, args)
    num_grads = len(elements) - num_params

    def state_first(state: list[Label]) -> list[Label]:
        results = compare(*traces, [*elements[:num_grads], *state, *elements[num_grads:]], split)
        return [*results[len(results) - len(state) :], *results[: len(results) - len(state)]]

    state_labels, update_labels = fixed_point(state_first, state_labels, Label.join)
    refused = [label for label in state_labels if label.kind not in (SAME, ELEMENT)]
    return refused + [
        label if label.primitives else mixed(SHAPE)
        for label in update_labels
        if not (label.kind in (SAME, ELEMENT) and not label.leading_dims)
    ]


def _as_sharded(trees: tuple[PyTree, PyTree], names: tuple[str, ...]) -> tuple[PyTree, PyTree]:
    """Return abstract leaves.

    Where types track varying axes, the leaves have the types of shards.
    """
    shapes = abstract(trees)
    if not tracks_varying(names):
        return shapes

    def make_varying_zeros():
        return jax.tree.map(
            lambda x: jax.lax.pcast(jnp.zeros(x.shape, x.dtype), names, to="varying"), shapes
        )

    return jax.eval_shape(make_varying_zeros)
