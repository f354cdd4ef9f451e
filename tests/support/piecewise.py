"""The oracle of the proof: compares a loss on the whole batch with its pieces, in plain jax on one
device, in float64.

The pieces are equal, contiguous cuts of the rows. Values and gradients are compared at several
points: the given numbers, and numbers with noise. So zeros, masks of ones and equal labels hide
nothing. The tests compare `proved` with this oracle."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shardopt as so
from shardopt.core._types import abstract
from shardopt.losses._separable import Cut, find_mixing

TOLERANCE = 1e-9
"""The largest relative difference of results that count as equal."""
SINGLE = 16 * np.finfo(np.float32).eps
"""The same for results in single precision."""
PIECE_SCALE = 0.25
"""The factor on a piece's loss when it is differentiated.

Strategies also scale the loss of a piece: by its share of the mean, or by a weight that only all
pieces together know. A power of two does not change how numbers are rounded. """
POINTS = 8
"""The number of points at which results are compared: the given numbers, and numbers with noise."""
SMALL = 1e-3
"""The smallest scale of a relative difference: a gradient of zero holds only rounding errors."""
KINDS = {so.losses.Sum: "sum", so.losses.Max: "max", so.losses.Min: "min"}


class Comparison(NamedTuple):
    """The differences between the whole batch and its pieces.

    Attributes:
      differences: result -> largest relative difference over all points; NaN if no point is finite.
      error: why the loss cannot be traced on a piece, or None.
    """

    differences: dict[str, float]
    error: str | None = None

    @property
    def separable(self) -> bool:
        """Whether the whole batch gives the same as its pieces together."""
        return self.error is None and all(
            difference <= TOLERANCE for difference in self.differences.values()
        )

    @property
    def undecided(self) -> bool:
        """Whether no result differs, but a result is finite at no point."""
        decided = [
            difference for difference in self.differences.values() if not np.isnan(difference)
        ]
        return (
            self.error is None
            and len(decided) < len(self.differences)
            and all(difference <= TOLERANCE for difference in decided)
        )

    @property
    def differs(self) -> bool:
        """Whether some result is shown to differ."""
        return not self.separable and not self.undecided


@contextlib.contextmanager
def as_users_have_it():
    """Use double precision, and allow broadcasting over ranks as outside of tests."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def proved(loss_fn: Callable, params: Any, batch: Any, pieces: int) -> bool:
    """Return whether shardopt proves that a loss is a (weighted) mean over rows."""
    with as_users_have_it():
        params, batch = abstract(doubled((params, batch)))
        return find_mixing(loss_fn, params, batch, Cut(pieces)) is None


def compare(
    loss_fn: Callable, params: Any, batch: Any, pieces: int, *, seed: int = 0, jit: bool = True
) -> Comparison:
    """Compare a loss, its metrics and its gradient on the whole batch with the results of its
    pieces together.

    With pieces b_i, the pieces together give mean_i f(b_i) for a scalar, and sum_i total(b_i) /
    sum_i weight(b_i) for `Weighted`. `Sum`, `Max` and `Min` are the sum and the extremes over
    pieces. The gradient is the gradient of total / weight, the gradient of the weight included.
    Each piece is differentiated separately, at another scale than the whole batch. So a backward
    rule gets other cotangents, as on a device.

    Args:
      loss_fn: `loss_fn(params, batch)`.
      params: a tree of arrays.
      batch: a tree of arrays, rows along dim 0; scalars are the same for all pieces.
      pieces: the number of pieces.
      seed: the seed of the noise.
      jit: whether to compile, which is fast. If False, XLA fuses no operations. Without
        optimisation XLA:CPU computes a fused operand of a maximum twice, with other roundings. Then
        the gradient finds no maximum and is NaN.
    """
    with as_users_have_it():
        run = functools.partial(_parts, loss_fn)
        run = jax.jit(run) if jit else run
        pairs = []
        for params_at, batch_at in points(params, batch, seed):
            rows = next(leaf.shape[0] for leaf in jax.tree.leaves(batch_at) if leaf.ndim)
            try:
                parts = [
                    run(params_at, _piece(batch_at, rows // pieces, i), PIECE_SCALE)
                    for i in range(pieces)
                ]
            except Exception as error:
                return Comparison({}, f"{type(error).__name__}: {error}".splitlines()[0])
            pairs.append((_together([run(params_at, batch_at)]), _together(parts)))
    return Comparison(
        {
            name: _difference(
                [(whole_result[name], pieces_result[name]) for whole_result, pieces_result in pairs]
            )
            for name in pairs[0][0]
        }
    )


def points(params: Any, batch: Any, seed: int) -> list[tuple[Any, Any]]:
    """Return (params, batch), and versions of them with noise.

    Floating leaves get additive noise. Other leaves of the batch get their rows in another order,
    which differs by leaf."""
    draw = np.random.default_rng(seed)

    def noisy(leaf: Any) -> np.ndarray:
        return leaf + 0.5 * draw.normal(size=leaf.shape) if leaf.dtype == np.float64 else leaf

    def permuted(leaf: Any) -> np.ndarray:
        return draw.permutation(leaf) if leaf.dtype != np.float64 and leaf.ndim else noisy(leaf)

    params, batch = doubled((params, batch))
    noisy_points = [
        (jax.tree.map(noisy, params), jax.tree.map(permuted, batch)) for _ in range(POINTS - 1)
    ]
    return [(params, batch), *noisy_points]


def doubled(tree: Any) -> Any:
    """Return a tree as numpy arrays, with floating leaves in float64."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(
        lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays
    )


def _piece(batch: Any, size: int, number: int) -> Any:
    return jax.tree.map(lambda x: x[number * size : (number + 1) * size] if x.ndim else x, batch)


def _parts(loss_fn: Callable, params: Any, batch: Any, scale: float = 1.0) -> dict[str, Any]:
    """Return the results of a loss on a batch: the metrics by kind, and for the loss its terms and
    their gradients.

    The terms are pairs (total, weight). They are differentiated times `scale`, and the gradients
    are divided by it."""

    def loss_and_metrics(params: Any) -> tuple[Any, Any]:
        returned = loss_fn(params, batch)
        loss, metrics = returned if type(returned) is tuple else (returned, {})
        return _terms(loss), {f"metric {name}": _metric(value) for name, value in metrics.items()}

    terms, pull_back, metrics = jax.vjp(loss_and_metrics, params, has_aux=True)
    leaves, treedef = jax.tree.flatten(terms)
    gradients = [
        pull_back(
            treedef.unflatten([(i == j) * scale * jnp.ones_like(x) for j, x in enumerate(leaves)])
        )
        for i in range(len(leaves))
    ]
    gradients = treedef.unflatten(
        [jax.tree.map(lambda x: x / scale, params_gradient) for (params_gradient,) in gradients]
    )
    return {"loss": (terms, gradients), **metrics}


def _terms(loss: Any) -> list[tuple[Any, Any]]:
    if not isinstance(loss, so.losses.Weighted):
        return [(jnp.asarray(loss, float), jnp.ones(()))]
    has_several_terms = type(loss.total) is tuple
    pairs = (
        zip(loss.total, loss.weight, strict=True)
        if has_several_terms
        else [(loss.total, loss.weight)]
    )
    return [(jnp.asarray(total, float), jnp.asarray(weight, float)) for total, weight in pairs]


def _metric(value: Any) -> dict[str, Any]:
    if isinstance(value, so.losses.Weighted):
        return {"ratio": _terms(value)}
    kind = KINDS.get(type(value))
    return {"mean": jnp.asarray(value)} if kind is None else {kind: jnp.asarray(value.value)}


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of all rows, computed from the results of pieces."""
    stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *parts)
    reductions = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}
    with np.errstate(all="ignore"):
        results = _loss_and_gradient(*stacked.pop("loss"))
        for name, part in stacked.items():
            ((kind, value),) = part.items()
            results[name] = (
                _quotients(value) if kind == "ratio" else reductions[kind](value, axis=0)
            )
    return results


def _loss_and_gradient(
    terms: list[tuple[Any, Any]], slopes: list[tuple[Any, Any]]
) -> dict[str, Any]:
    gradient: Any = 0.0
    for (total, weight), (total_slope, weight_slope) in zip(terms, slopes, strict=True):
        value = np.sum(total) / np.sum(weight)
        weight = np.sum(weight)
        leaves = zip(jax.tree.leaves(total_slope), jax.tree.leaves(weight_slope), strict=True)
        flat = [(np.sum(t, 0) - value * np.sum(w, 0)).ravel() / weight for t, w in leaves]
        gradient = gradient + np.concatenate(flat or [np.zeros(1)])
    return {"loss": _quotients(terms), "gradient": gradient}


def _quotients(terms: list[tuple[Any, Any]]) -> Any:
    return sum(np.sum(total, 0) / np.sum(weight, 0) for total, weight in terms)


def _difference(pairs: list[tuple[Any, Any]]) -> float:
    """Return the largest difference over points, relative to the largest entry at the point.

    Some results are float32 even in double precision, such as the mean of booleans. Rounding in
    float32 counts as equal."""
    differences = []
    for expected, actual in pairs:
        is_float32 = np.result_type(expected) == np.float32
        expected = np.asarray(expected, float)
        actual = np.asarray(actual, float)
        if not (np.isfinite(expected).any() or np.isfinite(actual).any()):
            continue
        equal = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=SMALL)
        with np.errstate(invalid="ignore"):
            relative_difference = np.where(equal, 0.0, np.abs(expected - actual) / scale)
            relative_difference = np.where(
                is_float32 & (relative_difference < SINGLE), 0.0, relative_difference
            )
        differences.append(
            np.where(np.isnan(relative_difference), np.inf, relative_difference).max(initial=0.0)
        )
    return float(max(differences, default=np.nan))
