"""Whether a loss of a whole batch is that of its pieces put together: plain jax on one device, in float64.

The pieces are equal, contiguous cuts of the rows. Values and gradients are compared at the given numbers and at others
around them, so that zeros, masks of ones and equal labels hide nothing. `proved` is the judge that this is held against.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shardopt as so
from shardopt.core.types import abstract
from shardopt.engine.separable import find_mixing

TOLERANCE = 1e-9
"""Relative difference up to which results are equal."""
SINGLE = 16 * np.finfo(np.float32).eps
"""The same of results in single precision."""
PIECE_SCALE = 0.25
"""Strategies differentiate a share of a piece's loss: its part of the mean, or of a weight that only all pieces know.

A power of two does not change how numbers are rounded.
"""
POINTS = 8
"""Points at which results are compared: the given one, and those with noise."""
SMALL = 1e-3
"""Scale of results that are smaller: a gradient of zero is rounding."""
KINDS = {so.Sum: "sum", so.Max: "max", so.Min: "min"}


class Comparison(NamedTuple):
    """The whole batch beside its pieces.

    Attributes:
      differences: result -> largest relative difference over all points; NaN where no point is finite.
      error: why the loss cannot be traced on a piece, or None.
    """

    differences: dict[str, float]
    error: str | None = None

    @property
    def separable(self) -> bool:
        """Whether the loss of the whole is that of the pieces."""
        return self.error is None and all(one <= TOLERANCE for one in self.differences.values())

    @property
    def undecided(self) -> bool:
        """Whether nothing differs, but some result is finite nowhere."""
        worst = [one for one in self.differences.values() if not np.isnan(one)]
        return self.error is None and len(worst) < len(self.differences) and all(one <= TOLERANCE for one in worst)


@contextlib.contextmanager
def as_users_have_it():
    """Double precision, and broadcasting over ranks as it is outside tests."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def proved(loss_fn: Callable, params: Any, batch: Any, pieces: int) -> bool:
    """Whether shardopt takes the loss for a (weighted) mean over rows, from its trace."""
    with as_users_have_it():
        params, batch = abstract(doubled((params, batch)))
        return find_mixing(loss_fn, params, batch, pieces=pieces) is None


def compare(loss_fn: Callable, params: Any, batch: Any, pieces: int, *, seed: int = 0, jit: bool = True) -> Comparison:
    """Compare a loss, its metrics and its gradient on the whole batch with those of its pieces together.

    With pieces b_i: a scalar is mean_i f(b_i), `Weighted` is sum_i total(b_i) / sum_i weight(b_i), `Sum`, `Max` and
    `Min` are what they say. The gradient is that of total / weight, the gradient of the weight included. Each piece is
    differentiated by itself, at another scale than the whole: so a backward rule meets other cotangents, as on a device.

    Args:
      loss_fn: `loss_fn(params, batch)`.
      params: a tree of arrays.
      batch: a tree of arrays, rows along dim 0; scalars are the same for all pieces.
      pieces: how many.
      seed: of the noise.
      jit: whether to compile, which is fast. Operation by operation, nothing is fused: without optimisation XLA:CPU computes
        a fused operand of a maximum twice, with other roundings, so its gradient finds no maximum and is NaN.
    """
    with as_users_have_it():
        run = functools.partial(_parts, loss_fn)
        run = jax.jit(run) if jit else run
        pairs = []
        for params_at, batch_at in points(params, batch, seed):
            rows = next(leaf.shape[0] for leaf in jax.tree.leaves(batch_at) if leaf.ndim)
            try:
                parts = [run(params_at, _piece(batch_at, rows // pieces, i), PIECE_SCALE) for i in range(pieces)]
            except Exception as error:
                return Comparison({}, f"{type(error).__name__}: {error}".splitlines()[0])
            pairs.append((_together([run(params_at, batch_at)]), _together(parts)))
    return Comparison({name: _difference([(whole[name], cut[name]) for whole, cut in pairs]) for name in pairs[0][0]})


def points(params: Any, batch: Any, seed: int) -> list[tuple[Any, Any]]:
    """Return (params, batch) as given, and others around them.

    Floating leaves get additive noise, other leaves of the batch their rows in another order, each leaf its own.
    """
    draw = np.random.default_rng(seed)

    def noisy(leaf: Any) -> np.ndarray:
        return leaf + 0.5 * draw.normal(size=leaf.shape) if leaf.dtype == np.float64 else leaf

    def moved(leaf: Any) -> np.ndarray:
        return draw.permutation(leaf) if leaf.dtype != np.float64 and leaf.ndim else noisy(leaf)

    params, batch = doubled((params, batch))
    others = [(jax.tree.map(noisy, params), jax.tree.map(moved, batch)) for _ in range(POINTS - 1)]
    return [(params, batch), *others]


def doubled(tree: Any) -> Any:
    """Return numpy arrays, floating ones in float64."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays)


def _piece(batch: Any, size: int, number: int) -> Any:
    return jax.tree.map(lambda x: x[number * size : (number + 1) * size] if x.ndim else x, batch)


def _parts(loss_fn: Callable, params: Any, batch: Any, scale: float = 1.0) -> dict[str, Any]:
    """Return of every result its kind's sums; of the loss, (totals, weights, their gradients).

    The gradients are those of total * scale and weight * scale, divided by the scale.
    """

    def of_loss(params: Any) -> tuple[Any, Any]:
        returned = loss_fn(params, batch)
        loss, metrics = returned if type(returned) is tuple else (returned, {})
        return _terms(loss), {f"metric {name}": _metric(value) for name, value in metrics.items()}

    terms, pull, metrics = jax.vjp(of_loss, params, has_aux=True)
    leaves, treedef = jax.tree.flatten(terms)
    slopes = [
        pull(treedef.unflatten([(i == j) * scale * jnp.ones_like(x) for j, x in enumerate(leaves)]))
        for i in range(len(leaves))
    ]
    slopes = treedef.unflatten([jax.tree.map(lambda x: x / scale, slope[0]) for slope in slopes])
    return {"loss": (terms, slopes), **metrics}


def _terms(loss: Any) -> list[tuple[Any, Any]]:
    if not isinstance(loss, so.Weighted):
        return [(jnp.asarray(loss, float), jnp.ones(()))]
    several = type(loss.total) is tuple
    pairs = zip(loss.total, loss.weight, strict=True) if several else [(loss.total, loss.weight)]
    return [(jnp.asarray(total, float), jnp.asarray(weight, float)) for total, weight in pairs]


def _metric(value: Any) -> dict[str, Any]:
    if isinstance(value, so.Weighted):
        return {"ratio": _terms(value)}
    kind = KINDS.get(type(value))
    return {"mean": jnp.asarray(value)} if kind is None else {kind: jnp.asarray(value.value)}


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of all rows from the parts of pieces."""
    stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *parts)
    how = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}
    with np.errstate(all="ignore"):
        results = _of_terms(*stacked.pop("loss"))
        for name, part in stacked.items():
            ((kind, value),) = part.items()
            results[name] = _quotients(value) if kind == "ratio" else how[kind](value, axis=0)
    return results


def _of_terms(terms: list[tuple[Any, Any]], slopes: list[tuple[Any, Any]]) -> dict[str, Any]:
    gradient: Any = 0.0
    for (total, weight), (total_slope, weight_slope) in zip(terms, slopes, strict=True):
        value, weight = np.sum(total) / np.sum(weight), np.sum(weight)
        leaves = zip(jax.tree.leaves(total_slope), jax.tree.leaves(weight_slope), strict=True)
        flat = [(np.sum(t, 0) - value * np.sum(w, 0)).ravel() / weight for t, w in leaves]
        gradient = gradient + np.concatenate(flat or [np.zeros(1)])
    return {"loss": _quotients(terms), "gradient": gradient}


def _quotients(terms: list[tuple[Any, Any]]) -> Any:
    return sum(np.sum(total, 0) / np.sum(weight, 0) for total, weight in terms)


def _difference(pairs: list[tuple[Any, Any]]) -> float:
    """Return the largest difference over points, relative to the largest entry at that point.

    Some results are float32 in double precision too, such as the mean of booleans: there its rounding is no difference.
    """
    worst = []
    for expected, found in pairs:
        single = np.result_type(expected) == np.float32
        expected, found = np.asarray(expected, float), np.asarray(found, float)
        if not (np.isfinite(expected).any() or np.isfinite(found).any()):
            continue
        same = (expected == found) | (np.isnan(expected) & np.isnan(found))
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=SMALL)
        with np.errstate(invalid="ignore"):
            relative = np.where(same, 0.0, np.abs(expected - found) / scale)
            relative = np.where(single & (relative < SINGLE), 0.0, relative)
        worst.append(np.where(np.isnan(relative), np.inf, relative).max(initial=0.0))
    return float(max(worst, default=np.nan))
