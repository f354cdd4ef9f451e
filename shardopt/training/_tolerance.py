"""Find the steps that the optimizer skipped (`optax.apply_if_finite`, `skip_anomalies`); their loss may be NaN or infinite."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from shardopt.config._transformation import closed_over, functions_within
from shardopt.core._types import PyTree
from shardopt.transforms._skip_anomalies import states_of_anomalies


class Tolerance:
    """`tolerance(opt_state)`: whether the last update was skipped and allowed, as a boolean on the device.

    A step is tolerated if the gradient was not finite and at most `max_consecutive_errors` such steps came in a row.
    For such a step `apply_if_finite` leaves parameters and state unchanged. After more such steps it applies the
    gradient. A step that `skip_anomalies` skipped is tolerated until more than `max_in_a_row` in a row were not finite.

    Args:
      tx: the optimizer.
      opt_state: its state, as the strategy holds it.
    """

    def __init__(self, tx: optax.GradientTransformation, opt_state: PyTree):
        limits = [_limit_of(function) for function in functions_within(tx)]
        known_limits = [limit for limit in limits if limit is not None]
        leaves = jax.tree_util.tree_leaves_with_path(opt_state)
        leaf_indices: dict[str, list[int]] = {"notfinite_count": [], "last_finite": []}
        if known_limits:
            for index, (path, _) in enumerate(leaves):
                name = getattr(path[-1], "name", "")
                if name in leaf_indices:
                    leaf_indices[name].append(index)
        # The strictest of several limits: the state does not say which limit belongs to which transformation.
        self._limit = min(known_limits, default=0)
        self._counts, self._finite = leaf_indices["notfinite_count"], leaf_indices["last_finite"]

    def __call__(self, opt_state: PyTree) -> jax.Array | None:
        """Return whether the step that made this state is tolerated; None if the optimizer never skips a step."""
        if anomaly_states := states_of_anomalies(opt_state):
            return _is_skipped([(state.skipped, state.hopeless) for state in anomaly_states])
        if not self._finite:
            return None
        leaves = jax.tree.leaves(opt_state)
        return _is_tolerated([leaves[i] for i in self._counts], [leaves[i] for i in self._finite], self._limit)


@jax.jit
def _is_skipped(flags: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    skipped, hopeless = (jnp.stack([jnp.any(flag) for flag in column]).any() for column in zip(*flags, strict=True))
    return skipped & ~hopeless


@jax.jit
def _is_tolerated(counts: list[jax.Array], finite: list[jax.Array], limit: int) -> jax.Array:
    skipped = jnp.stack([jnp.any(~is_finite) for is_finite in finite]).any()
    return skipped & jnp.stack([jnp.all(count <= limit) for count in counts]).all()


def _limit_of(function: Callable[..., object]) -> int | None:
    """Return `max_consecutive_errors` if this is the update of `optax.apply_if_finite`, else None."""
    names = function.__code__.co_freevars
    if not function.__qualname__.startswith("apply_if_finite.") or "max_consecutive_errors" not in names:
        return None
    return int(closed_over(function)[names.index("max_consecutive_errors")])
