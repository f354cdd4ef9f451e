"""Which steps `optax.apply_if_finite` skipped, whose loss may then be NaN or infinite."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from shardopt.core.types import PyTree
from shardopt.engine.transformation import closed_over, functions_within


class Tolerance:
    """`tolerance(opt_state)`: whether the update before was skipped, and may be, as a boolean on the device.

    A step is tolerated where the gradient was not finite, and `max_consecutive_errors` were not yet exceeded in a row. Where
    that was so `apply_if_finite` left parameters and state as they were. Beyond it applies the gradient.

    Args:
      tx: the optimizer.
      opt_state: its state, in whatever a strategy keeps it.
    """

    def __init__(self, tx: optax.GradientTransformation, opt_state: PyTree):
        limits = [_limit_of(f) for f in functions_within(tx)]
        known = [limit for limit in limits if limit is not None]
        leaves = jax.tree_util.tree_leaves_with_path(opt_state)
        at: dict[str, list[int]] = {"notfinite_count": [], "last_finite": []}
        if known:
            for i, (path, _) in enumerate(leaves):
                name = getattr(path[-1], "name", "")
                if name in at:
                    at[name].append(i)
        # of several the strictest: which limit is whose, the state does not say
        self._limit = min(known, default=0)
        self._counts, self._finite = at["notfinite_count"], at["last_finite"]

    def __call__(self, opt_state: PyTree) -> jax.Array | None:
        """Return whether the step that made this state is tolerated; None without `apply_if_finite`."""
        if not self._finite:
            return None
        leaves = jax.tree.leaves(opt_state)
        return _is_tolerated([leaves[i] for i in self._counts], [leaves[i] for i in self._finite], self._limit)


@jax.jit
def _is_tolerated(counts: list[jax.Array], finite: list[jax.Array], limit: int) -> jax.Array:
    skipped = jnp.stack([jnp.any(~one) for one in finite]).any()
    return skipped & jnp.stack([jnp.all(count <= limit) for count in counts]).all()


def _limit_of(f: Callable[..., object]) -> int | None:
    """Return `max_consecutive_errors` of the update of `optax.apply_if_finite`; None of another function."""
    names = f.__code__.co_freevars
    if not f.__qualname__.startswith("apply_if_finite.") or "max_consecutive_errors" not in names:
        return None
    return int(closed_over(f)[names.index("max_consecutive_errors")])
