"""Find the steps that the optimizer skipped (`optax.apply_if_finite`, `skip_anomalies`); their loss may be NaN or infinite."""

import jax
import jax.numpy as jnp
import optax

from shardopt.core._types import PyTree, TrainState, states_of
from shardopt.local_updates._state import Replicas
from shardopt.transforms._skip_anomalies import SkipAnomaliesState


def tolerated(state: TrainState) -> jax.Array | None:
    """Return whether the last update was skipped, as a boolean on the device; None if the optimizer never skips one.

    A step that `skip_anomalies` skipped is tolerated until more than `max_in_a_row` in a row were not finite.
    `apply_if_finite` skips a gradient that is not finite, but applies it after `max_consecutive_errors` in a row. Its
    state does not say whether it did. The parameters do: a gradient that was applied leaves NaN in them.
    """
    if anomaly_states := states_of(SkipAnomaliesState, state.opt_state):
        return _is_skipped([(anomalies.skipped, anomalies.hopeless) for anomalies in anomaly_states])
    finite = [finite_state.last_finite for finite_state in states_of(optax.ApplyIfFiniteState, state.opt_state)]
    if not finite:
        return None
    replicas = state.opt_state.params if isinstance(state.opt_state, Replicas) else ()
    return _is_harmless(finite, (state.params, replicas))


@jax.jit
def _is_skipped(flags: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    skipped, hopeless = (jnp.stack([jnp.any(flag) for flag in column]).any() for column in zip(*flags, strict=True))
    return skipped & ~hopeless


@jax.jit
def _is_harmless(finite: list[jax.Array], params: PyTree) -> jax.Array:
    """Return whether a gradient was not finite, and no parameter is NaN; parameters are read only after such a gradient."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    no_nan = lambda: ~jnp.stack([jnp.isnan(leaf).any() for leaf in leaves]).any()  # noqa: E731
    return jax.lax.cond(jnp.stack([jnp.any(~flag) for flag in finite]).any(), no_nan, lambda: jnp.zeros((), bool))
