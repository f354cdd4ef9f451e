"""Checks of arguments, with the same error messages in every function."""

import math
from typing import TypeGuard

import jax
import numpy as np
import optax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a Python or numpy integer, but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a Python or numpy real number, but not a bool."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def check_count(who: str, name: str, value: int, *, least: int = 1, allow_array: bool = False) -> None:
    """Raise an error unless `value` is an integer of at least `least`.

    With `allow_array`, a scalar integer `jax.Array` passes without a look at its value: `optax.inject_hyperparams` makes
    such arrays.

    Raises:
      TypeError: if it has another type.
      ValueError: if it is below `least`.
    """
    if allow_array and isinstance(value, jax.Array) and np.issubdtype(value.dtype, np.integer) and not value.ndim:
        return
    if not is_integer(value):
        raise TypeError(f"{who}: {name} must be an integer, got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{who}: {name} must be at least {least}, got {value}.")


def check_is_number(who: str, name: str, value: float) -> None:
    """Raise an error unless `value` is a real number.

    Raises:
      TypeError: if it has another type.
    """
    if not is_number(value):
        raise TypeError(f"{who}: {name} must be a number, got {value!r} ({type(value).__name__}).")


def check_number(
    who: str, name: str, value: float, *, least: float = 0.0, below: float = math.inf, positive: bool = False
) -> None:
    """Raise an error unless `value` is a finite number in [least, below), and above 0 if `positive`.

    Raises:
      TypeError: if it has another type.
      ValueError: if it is out of range.
    """
    check_is_number(who, name, value)
    if math.isfinite(value) and least <= value < below and (value > 0 or not positive):
        return
    allowed_range = "above 0" if positive else f"at least {least:g}"
    if below != math.inf:
        allowed_range += f" and below {below:g}"
    raise ValueError(f"{who}: {name} must be finite, {allowed_range}; got {value}.")


def check_transformation(
    who: str, name: str, tx: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation in the form that takes extra arguments.

    Raises:
      TypeError: if it has no callable `init` and `update`.
    """
    if isinstance(tx, type) or not all(callable(getattr(tx, method, None)) for method in ("init", "update")):
        fix = "pass a transformation such as optax.adamw(1e-3), called, not the function itself."
        tx_name = getattr(tx, "__name__", type(tx).__name__)
        raise TypeError(format_error(who, f"{name} must be an optax.GradientTransformation, got {tx_name}.", fix=fix))
    return optax.with_extra_args_support(tx)


def check_params(who: str, params: PyTree | None) -> PyTree:
    """Return the parameters that were passed to `update` of a transformation.

    Raises:
      ValueError: if they are None.
    """
    if params is None:
        fix = "call update(grads, state, params)."
        raise ValueError(format_error(who, "update needs the parameters.", fix=fix))
    return params
