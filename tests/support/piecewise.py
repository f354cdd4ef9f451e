"""Whether a loss of a whole batch is that of its pieces put together: plain jax on one device, in float64.

The pieces are equal, contiguous cuts of the rows. Values and gradients are compared at the given numbers and at others
around them, so that zeros, masks of ones and equal labels hide nothing. `proved` is the judge that this is held against.
"""

import contextlib
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
POINTS = 4
"""Points at which results are compared: the given one, and those with noise."""
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
    def worst(self) -> float:
        """The largest of the differences."""
        return max(self.differences.values(), key=lambda x: np.inf if np.isnan(x) else x, default=np.inf)

    @property
    def separable(self) -> bool:
        """Whether the loss of the whole is that of the pieces."""
        return self.error is None and self.worst <= TOLERANCE


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


def compare(loss_fn: Callable, params: Any, batch: Any, pieces: int, *, seed: int = 0) -> Comparison:
    """Compare a loss, its metrics and its gradient on the whole batch with those of its pieces together.

    With pieces b_i: a scalar is mean_i f(b_i), `Weighted` is sum_i total(b_i) / sum_i weight(b_i), `Sum`, `Max` and
    `Min` are what they say. The gradient is that of total / weight, the gradient of the weight included. Each piece is
    differentiated by itself, so that a backward rule meets the cotangents that it would meet on a device.

    Args:
      loss_fn: `loss_fn(params, batch)`.
      params: a tree of arrays.
      batch: a tree of arrays, rows along dim 0; scalars are the same for all pieces.
      pieces: how many.
      seed: of the noise.
    """
    with as_users_have_it():
        whole_points = points(params, batch, seed)
        rows = next(leaf.shape[1] for leaf in jax.tree.leaves(whole_points[1]) if leaf.ndim > 1)
        piece = jax.tree.map(lambda x: _piece(x[0], rows, pieces, 0), whole_points[1])
        try:
            jax.eval_shape(loss_fn, jax.tree.map(lambda x: x[0], params_at := whole_points[0]), piece)
        except Exception as error:
            return Comparison({}, f"{type(error).__name__}: {error}".splitlines()[0])

        def at_a_point(point: tuple[Any, Any]) -> tuple[dict, dict]:
            params, batch = point
            cuts = [jax.tree.map(lambda x, i=i: _piece(x, rows, pieces, i), batch) for i in range(pieces)]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cuts)
            parts = jax.lax.map(lambda cut: _parts(loss_fn, params, cut), stacked)
            return _values(_parts(loss_fn, params, batch)), _together(parts)

        both = jax.jit(lambda *point: jax.lax.map(at_a_point, point))(params_at, whole_points[1])
        whole, cut = jax.tree.map(np.asarray, both)
    return Comparison({name: _difference(whole[name], cut[name]) for name in whole})


def points(params: Any, batch: Any, seed: int) -> tuple[Any, Any]:
    """Return trees whose leaves are stacked over points: the given one first, then others around it.

    Floating leaves get additive noise, other leaves of the batch their rows in another order, each leaf its own.
    """
    draw = np.random.default_rng(seed)

    def around(leaf: Any, is_rows: bool) -> np.ndarray:
        leaf = np.asarray(leaf)
        others = [leaf] * (POINTS - 1)
        if np.issubdtype(leaf.dtype, np.floating):
            others = [leaf + 0.5 * draw.normal(size=leaf.shape) for _ in others]
        elif is_rows and leaf.ndim:
            others = [draw.permutation(leaf) for _ in others]
        return np.stack([leaf, *others])

    params, batch = doubled((params, batch))
    return jax.tree.map(lambda x: around(x, False), params), jax.tree.map(lambda x: around(x, True), batch)


def doubled(tree: Any) -> Any:
    """Return numpy arrays, floating ones in float64."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays)


def _piece(leaf: Any, rows: int, pieces: int, number: int) -> Any:
    size = rows // pieces
    return leaf[number * size : (number + 1) * size] if leaf.ndim else leaf


def _parts(loss_fn: Callable, params: Any, batch: Any) -> dict[str, Any]:
    """Return of every result its kind's sums; of the loss, (totals, weights, their gradients)."""

    def of_loss(params: Any) -> tuple[Any, Any]:
        returned = loss_fn(params, batch)
        loss, metrics = returned if type(returned) is tuple else (returned, {})
        return _terms(loss), {f"metric {name}": _metric(value) for name, value in metrics.items()}

    terms, pull, metrics = jax.vjp(of_loss, params, has_aux=True)
    leaves, treedef = jax.tree.flatten(terms)
    slopes = [
        pull(treedef.unflatten([jnp.ones_like(x) * (i == j) for j, x in enumerate(leaves)])) for i in range(len(leaves))
    ]
    slopes = treedef.unflatten([slope[0] for slope in slopes])
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


def _values(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the results of one whole."""
    return _together(jax.tree.map(lambda x: x[None], parts))


def _together(parts: dict[str, Any]) -> dict[str, Any]:
    """Return results from parts whose leaves are stacked over pieces."""
    results = {"loss": 0.0, "gradient": None}
    for (total, weight), (total_slope, weight_slope) in zip(*parts["loss"], strict=True):
        total, weight = jnp.sum(total), jnp.sum(weight)
        results["loss"] += total / weight
        slope = jax.tree.map(
            lambda t, w, total=total, weight=weight: (jnp.sum(t, 0) - total / weight * jnp.sum(w, 0)) / weight,
            total_slope,
            weight_slope,
        )
        first = results["gradient"] is None
        results["gradient"] = slope if first else jax.tree.map(jnp.add, results["gradient"], slope)
    how = {"mean": lambda x: jnp.mean(x, 0), "sum": lambda x: jnp.sum(x, 0), "max": lambda x: jnp.max(x, 0)}
    how["min"] = lambda x: jnp.min(x, 0)
    how["ratio"] = lambda terms: sum(jnp.sum(total, 0) / jnp.sum(weight, 0) for total, weight in terms)
    metrics = {name: part for name, part in parts.items() if name != "loss"}
    return results | {name: how[kind](value) for name, part in metrics.items() for kind, value in part.items()}


def _difference(whole: Any, cut: Any) -> float:
    """Return the largest difference over points and leaves, relative to the largest entry of all leaves at that point."""
    pairs = [
        (np.asarray(a, float).reshape(POINTS, -1), np.asarray(b, float).reshape(POINTS, -1))
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True)
    ]
    expected, found = (np.concatenate(side, axis=1) for side in zip(*pairs, strict=True))
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    relevant = np.isfinite(expected).any(1) | np.isfinite(found).any(1)
    if not relevant.any():
        return float("nan")
    scale = np.maximum(np.where(np.isfinite(expected), np.abs(expected), 0).max(1, initial=1e-3), 1e-3)
    with np.errstate(invalid="ignore"):
        relative = np.where(same, 0.0, np.abs(expected - found) / scale[:, None])
    return float(np.max(np.where(np.isnan(relative), np.inf, relative)[relevant], initial=0.0))
