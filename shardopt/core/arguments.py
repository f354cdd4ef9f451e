"""Checks of arguments, in the same words everywhere."""

import math
from typing import TypeGuard

import jax
import numpy as np
import optax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a Python or numpy integer, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a Python or numpy real number, and no bool."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def check_count(who: str, name: str, value: int, *, least: int = 1, allow_array: bool = False) -> None:
    """Refuse what is not an integer of at least `least`.

    With `allow_array` a scalar integer `jax.Array`, as `optax.inject_hyperparams` makes, is taken unread.

    Raises:
      TypeError: if it is of another kind.
      ValueError: if it is below.
    """
    if allow_array and isinstance(value, jax.Array) and np.issubdtype(value.dtype, np.integer) and not value.ndim:
        return
    if not is_integer(value):
        raise TypeError(f"{who}: {name} must be an integer, got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{who}: {name} must be at least {least}, got {value}.")


def check_is_number(who: str, name: str, value: float) -> None:
    """Refuse what is not a real number.

    Raises:
      TypeError: if it is of another kind.
    """
    if not is_number(value):
        raise TypeError(f"{who}: {name} must be a number, got {value!r} ({type(value).__name__}).")


def check_number(
    who: str, name: str, value: float, *, least: float = 0.0, below: float = math.inf, positive: bool = False
) -> None:
    """Refuse what is not a finite number in [least, below), or not above 0 if `positive`.

    Raises:
      TypeError: if it is of another kind.
      ValueError: if it is out of range.
    """
    check_is_number(who, name, value)
    if math.isfinite(value) and least <= value < below and (value > 0 or not positive):
        return
    bounds = "above 0" if positive else f"at least {least:g}"
    if below != math.inf:
        bounds += f" and below {below:g}"
    raise ValueError(f"{who}: {name} must be finite, {bounds}; got {value}.")


def check_transformation(
    who: str, name: str, tx: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation as one that takes extra arguments.

    Raises:
      TypeError: if it has no callable `init` and `update`.
    """
    if isinstance(tx, type) or not all(callable(getattr(tx, part, None)) for part in ("init", "update")):
        fix = "pass a transformation such as optax.adamw(1e-3), called, not the function itself."
        shown = getattr(tx, "__name__", type(tx).__name__)
        raise TypeError(format_error(who, f"{name} must be an optax.GradientTransformation, got {shown}.", fix=fix))
    return optax.with_extra_args_support(tx)


def check_params(who: str, params: PyTree | None) -> PyTree:
    """Return the parameters that `update` of a transformation was given.

    Raises:
      ValueError: if there are none.
    """
    if params is None:
        fix = "call update(grads, state, params)."
        raise ValueError(format_error(who, "update needs the parameters.", fix=fix))
    return params
