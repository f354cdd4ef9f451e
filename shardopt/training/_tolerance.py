"""Find the steps that the optimizer skipped (`optax.apply_if_finite`, `skip_anomalies`).

Their loss may be NaN or infinite.
"""

import jax
import jax.numpy as jnp
import optax

from shardopt.core import Arrays, PyTree, TrainState, is_inexact, states_of
from shardopt.local_updates._state import ReplicaStates
from shardopt.transforms._skip_anomalies import SkipAnomaliesState


def may_skip(state: TrainState) -> bool:
    """Return whether the optimizer may skip a step."""
    return bool(_counts(state))


def num_skipped(state: TrainState) -> jax.Array:
    """Return how many updates were skipped so far, on the device, if the optimizer `may_skip`."""
    return _total(_counts(state))


def tolerated(state: TrainState, num_before: jax.Array) -> jax.Array:
    """Return whether the last step was skipped, as a boolean on the device.

    A step that `skip_anomalies` skipped is tolerated until more than `max_in_a_row` in a row were
    not finite. `apply_if_finite` skips a gradient that is not finite, but applies it after
    `max_consecutive_errors` in a row. Its state does not say whether it did. The parameters do: a
    gradient that was applied leaves NaN in them.

    Args:
      state: the state after the step.
      num_before: `num_skipped` of the state before it. Inside of `optax.MultiSteps` a flag still
        speaks of the last update, which may be steps ago.
    """
    counts = _counts(state)
    anomaly_states = states_of(SkipAnomaliesState, state.opt_state)
    if anomaly_states:
        return _is_skipped(num_before, counts, [anomalies.hopeless for anomalies in anomaly_states])
    replicas = state.opt_state.params if isinstance(state.opt_state, ReplicaStates) else ()
    return _is_harmless(num_before, counts, (state.params, replicas))


def _counts(state: TrainState) -> Arrays:
    """Return the counts of skipped updates, of `skip_anomalies` if there is one, else of
    `apply_if_finite`.
    """
    anomaly_counts = [
        anomalies.num_skipped for anomalies in states_of(SkipAnomaliesState, state.opt_state)
    ]
    return anomaly_counts or [
        finite.total_notfinite for finite in states_of(optax.ApplyIfFiniteState, state.opt_state)
    ]


@jax.jit
def _total(counts: Arrays) -> jax.Array:
    return jnp.stack([jnp.sum(count) for count in counts]).sum()


@jax.jit
def _is_skipped(num_before: jax.Array, counts: Arrays, hopeless: Arrays) -> jax.Array:
    return (num_before != _total(counts)) & ~jnp.stack([jnp.any(flag) for flag in hopeless]).any()


@jax.jit
def _is_harmless(num_before: jax.Array, counts: Arrays, params: PyTree) -> jax.Array:
    """Return whether a gradient was not finite, and no parameter is NaN.

    Parameters are read only after such a gradient.
    """
    leaves = [leaf for leaf in jax.tree.leaves(params) if is_inexact(leaf)]

    def no_nan():
        return ~jnp.stack([jnp.isnan(leaf).any() for leaf in leaves]).any()

    # A branch: reading all parameters in every step would cost a pass over them.
    return jax.lax.cond(num_before != _total(counts), no_nan, lambda: jnp.zeros((), bool))
