"""How far a value of a strategy is from the same value of one device."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from shardopt.core import PyTree, is_key, leaves_with_paths
from shardopt.diagnose._pieces import values_on_host

ROUNDINGS = 16
"""How many machine epsilons of a value an update of it may differ by."""


class Difference(NamedTuple):
    """The difference between one value of the strategy and the same value of one device.

    Attributes:
      name: "first parameters", "first optimizer state", "evaluated <name>", "loss", "metric <name>",
        "gradient of <key path>", "update of <key path>", "optimizer state" or "step". A state that
        differs is named with its key path, and so are "copies of <key path>" that differ. See
        `_same_bits` for "bits of ...".
      relative: the largest difference of an entry, divided by the largest entry.
      tolerance: the largest relative difference that counts as rounding.
      is_of_bits: whether a strategy with `exact(tile_rows=...)` has other bits on its mesh.
    """

    name: str
    relative: float
    tolerance: float
    is_of_bits: bool = False

    @property
    def differs(self) -> bool:
        """Whether the difference is more than rounding; NaN always is."""
        return not self.relative <= self.tolerance

    @property
    def excess(self) -> float:
        """The difference in units of the tolerance."""
        if math.isnan(self.relative):
            return math.inf
        return self.relative / (self.tolerance or np.finfo(float).tiny)


def largest(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Return of the differences with one name the largest, in the order of the names."""
    by_name: dict[str, Difference] = {}
    for difference in differences:
        before = by_name.get(difference.name)
        if before is None or difference.excess > before.excess:
            by_name[difference.name] = difference
    return tuple(by_name.values())


def rounding_of(dtype: DTypeLike | None) -> float:
    """Return the relative difference that counts as rounding: the root of the machine epsilon."""
    is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    return float(jnp.finfo(dtype).eps) ** 0.5 if is_inexact else 0.0


def compare(
    name: str, actual: PyTree, expected: PyTree, tolerance: float, floor: float = 0.0
) -> Difference:
    """Return the difference of two arrays.

    Args:
      name: of the value.
      actual: the value of the strategy.
      expected: the value of one device.
      tolerance: the relative difference that counts as rounding.
      floor: the least value that the difference is divided by.
    """
    actual = as_numbers(actual)
    expected = as_numbers(expected)
    scale = max(_size(expected), floor) or 1.0
    return Difference(name, _largest_error(actual, expected) / scale, tolerance)


def compare_change(
    name: str, before: PyTree, actual: PyTree, expected: PyTree, tolerance: float
) -> Difference:
    """Return the difference of two new values of a leaf, relative to what changed.

    A small update of a large number would not show next to the number itself.
    """
    dtype = expected.dtype
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    epsilon = float(jnp.finfo(dtype).eps) if is_inexact else 0.0
    before, actual, expected = map(as_numbers, (before, actual, expected))
    # the best loss so far begins at infinity
    old, new = (np.where(np.isfinite(values), values, 0) for values in (before, expected))
    scale = _size(new - old) or _size(new) or 1.0
    rounding = ROUNDINGS * epsilon * max(_size(new), _size(old)) / scale
    allowed = (tolerance if is_inexact else 0.0) + rounding
    return Difference(name, _largest_error(actual, expected) / scale, allowed)


def compare_copies(state: PyTree) -> list[Difference]:
    """Return the leaves whose copies on several devices are not the same bits."""
    differences = []
    for path, leaf in leaves_with_paths(state):
        copies: dict[str, bytes] = {}
        for shard in getattr(leaf, "addressable_shards", ()):
            bits = as_numbers(values_on_host(shard.data)).tobytes()
            if copies.setdefault(str(shard.index), bits) != bits:
                differences.append(Difference(f"copies of {path}", np.inf, 0.0))
                break
    return differences


def as_numbers(leaf: PyTree) -> np.ndarray:
    """Return a leaf on the host in double precision; a random key as its data."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(complex if np.iscomplexobj(array) else float)


def _largest_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference; numbers that are infinite in both do not differ."""
    with np.errstate(invalid="ignore"):
        return _size(np.where(actual == expected, 0, actual - expected))


def _size(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))
