"""Checks of calls that jax cannot run on a mesh."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from shardopt.config._config import StrategyConfig
from shardopt.core import format_error


def check_jit(caller: str) -> None:
    """Refuse, by a ValueError, to run op by op: a single operation has no mesh to be sharded over."""
    jax_options: Any = jax.config  # type checkers do not know its attributes
    if jax_options.jax_disable_jit:
        problem = "jax_disable_jit is set, and what runs on a mesh must be compiled."
        fix = (
            "call it under jax.disable_jit(False), with jax.debug.print or jax.debug.breakpoint in"
            " the loss; or call loss_fn(params, batch) by itself, which runs op by op."
        )
        raise ValueError(format_error(caller, problem, fix=fix))


def checks_numbers() -> bool:
    """Return whether jax is asked to find the operation that makes a NaN or an infinity."""
    return jax.debug_nans.value or jax.debug_infs.value


def check_traced(config: StrategyConfig, leaves: Sequence[jax.Array]) -> None:
    """Refuse to be traced into a user's jitted function under another mesh than ours.

    Raises:
      TypeError: if axes are Explicit, or `jax.set_mesh` was called with other axes.
    """
    user_mesh = jax.sharding.get_abstract_mesh()
    our_axes = config.mesh.axis_names
    explicit = any(
        AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves
    )
    if explicit or not (user_mesh.empty or set(user_mesh.axis_names) >= set(our_axes)):
        obstacle = (
            "arrays with Explicit axes"
            if explicit
            else f"jax.set_mesh of axes {user_mesh.axis_names}"
        )
        problem = f"this program cannot be traced into another one with {obstacle}."
        fix = (
            "call it outside jit, where it is compiled already; or use a mesh with Auto axes"
            f" {our_axes}."
        )
        raise TypeError(format_error(config.strategy, problem, fix=fix))


def check_has_norms(config: StrategyConfig) -> None:
    """Refuse, by a ValueError, norms of a step whose replicas train apart."""
    if config.per_replica:
        problem = (
            "the replicas train apart, each with gradients of its own, so there are no norms of"
            " all of them."
        )
        fix = "use step, or the norms of the strategy inside."
        raise ValueError(format_error(config.strategy, problem, fix=fix))
