"""A state with the average of the parameters in place of the parameters, to
evaluate or to export it.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding

from shardopt.config._user_mesh import on_auto_axes, on_auto_mesh
from shardopt.core import (
    PyTree,
    TrainState,
    format_error,
    is_average,
    leaves_with_paths,
    value_error,
    wide_dtype,
)
from shardopt.core._tracebacks import api_boundary
from shardopt.mesh import without_mesh
from shardopt.runtime._turn import pass_stop_point
from shardopt.step._optimizer import Metrics
from shardopt.step._programs import Program

Source = tuple[jax.Array, ...]
"""The arrays that give one leaf: its average, or y, z and b1 of schedule-free."""


def average_of(state: TrainState) -> TrainState:
    """Return the state with the average of the parameters in place of the parameters.

    Args:
      state: a train state.

    Raises:
      ValueError: if the optimizer state has no average, several of one leaf, or schedule-free in
        separate replicas.
    """
    sources = _sources(state)
    paths, leaves = map(list, zip(*leaves_with_paths(state.params), strict=True))
    indices = [i for i, path in enumerate(paths) if path in sources]
    args = [sources[paths[i]] for i in indices]
    old = [leaves[i] for i in indices]
    program = _program(
        tuple((leaf.shape, leaf.dtype) for leaf in old), tuple(leaf.sharding for leaf in old)
    )
    with without_mesh(), jax.transfer_guard("allow"):
        for i, leaf in zip(
            indices, program(jax.device_put(args, jax.tree.map(_on_device, args))), strict=True
        ):
            leaves[i] = leaf
    return state._replace(params=jax.tree.structure(state.params).unflatten(leaves))


def check_selection(caller: str, params: str | None) -> None:
    """Refuse, by a ValueError, a `params` other than None and "average"."""
    if params not in (None, "average"):
        fix = 'leave it out for the parameters of the state, or use params="average".'
        raise ValueError(
            format_error(caller, f"params must be None or 'average', got {params!r:.80}.", fix=fix)
        )


def select_params(caller: str, state: TrainState, params: str | None) -> TrainState:
    """Return the state to evaluate: `state`, or with `params="average"` its `average_of`."""
    check_selection(caller, params)
    return state if params is None else average_of(state)


@dataclasses.dataclass(frozen=True)
class EvaluationFn:
    """`opt.evaluate`, of the parameters of a state or of their average.

    Attributes:
      of_params: the evaluation of the parameters.
    """

    of_params: Program

    @api_boundary
    def __call__(self, state: TrainState, batch: PyTree, params: str | None = None) -> Metrics:
        """Return the loss and metrics of a batch."""
        pass_stop_point()
        return self.of_params(select_params("evaluate", state, params), batch)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Return the lowered program, also for abstract arguments."""
        return self.of_params.lower(state, batch)


def _sources(state: TrainState) -> dict[str, Source]:
    """Return the arrays that give each averaged leaf, by key path."""

    def stops(node):
        return is_average(node) or isinstance(node, optax.contrib.ScheduleFreeState)

    params = dict(leaves_with_paths(state.params))
    sources = dict[str, Source]()
    repeated: list[str] = []
    for node in filter(stops, jax.tree.leaves(state.opt_state, is_leaf=stops)):
        if is_average(node):
            new_sources: dict[str, Source] = {
                path: (leaf,) for path, leaf in leaves_with_paths(node.average)
            }
        elif node.b1.ndim:
            problem = (
                "the replicas of local_sgd and diloco have no common average of schedule-free."
            )
            fix = (
                "put so.transforms.average_params into the chain of the replicas, or evaluate"
                " without an average."
            )
            raise value_error(problem, fix=fix)
        else:
            new_sources = {
                path: (params[path], leaf, node.b1) for path, leaf in leaves_with_paths(node.z)
            }
        repeated += sorted(sources.keys() & new_sources.keys())
        sources |= new_sources
    if repeated:
        fix = "keep one average in the chain: average_params, or schedule-free."
        raise value_error("the optimizer state has several averages.", repeated, fix)
    if not sources:
        fix = (
            "train with optax.chain(tx, so.transforms.average_params(decay=0.999)), or optax's"
            " schedule-free."
        )
        raise value_error("the optimizer state has no average of the parameters.", fix=fix)
    return sources


def _on_device(leaf: jax.Array) -> Sharding:
    """Return the sharding of an array on axes that are Auto, in device memory."""
    return on_auto_axes(leaf.sharding).with_memory_kind("device")


@functools.lru_cache(maxsize=64)
def _program(
    shapes: Sequence[tuple[tuple[int, ...], jnp.dtype]], shardings: Sequence[Sharding]
) -> jax.stages.Wrapped:
    """Return the function from the sources of some leaves to the leaves, with these shapes, dtypes
    and shardings.
    """

    def leaf_of(source: Source, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        if len(source) == 1:
            (average,) = source
            return (average if average.shape == shape else jnp.mean(average, 0)).astype(dtype)
        y, z, b1 = source
        y = y.astype(wide_dtype(dtype))
        z = z.astype(wide_dtype(dtype))
        b1 = b1.astype(jnp.finfo(y.dtype).dtype)
        # as optax.contrib.schedule_free_eval_params
        return (y / b1 + (1 - 1 / b1) * z).astype(dtype)

    def run(sources: list[Source]) -> list[PyTree]:
        return [leaf_of(source, *form) for source, form in zip(sources, shapes, strict=True)]

    return jax.jit(on_auto_mesh(shardings[0], run), out_shardings=list(shardings))
