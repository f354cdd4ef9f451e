"""Checks of arguments, with the same error messages in every function."""

import math
from collections.abc import Collection
from typing import Any, TypeGuard

import jax
import numpy as np
import optax

from shardopt.core._errors import type_error, value_error
from shardopt.core._types import PyTree, is_floating


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a Python or numpy integer, but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a Python or numpy real number, but not a bool."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def check_integer(name: str, value: int) -> None:
    """Raise an error unless `value` is an integer.

    Raises:
      TypeError: if it has another type.
    """
    if not is_integer(value):
        raise type_error(f"{name} must be an integer, got {value!r} ({type(value).__name__}).")


def check_flag(name: str, value: bool) -> None:
    """Raise an error unless `value` is True or False.

    Raises:
      TypeError: if it has another type.
    """
    if not isinstance(value, bool):
        raise type_error(f"{name} must be True or False, got {value!r}.")


def check_choice(name: str, value: str, choices: Collection[str], fix: str) -> None:
    """Raise an error unless `value` is one of several strings.

    Raises:
      TypeError: if it is not a string.
      ValueError: if it is another string.
    """
    if not isinstance(value, str):
        raise type_error(f"{name} must be a string, got {value!r}.", fix=fix)
    if value not in choices:
        raise value_error(f"unknown {name} {value!r}.", fix=fix)


def check_count(name: str, value: int, *, minimum: int = 1, allow_array: bool = False) -> None:
    """Raise an error unless `value` is an integer of at least `minimum`.

    With `allow_array`, a scalar integer `jax.Array` passes without a look at its value:
    `optax.inject_hyperparams` makes such arrays.

    Raises:
      TypeError: if it has another type.
      ValueError: if it is below `minimum`.
    """
    if (
        allow_array
        and isinstance(value, jax.Array)
        and np.issubdtype(value.dtype, np.integer)
        and not value.ndim
    ):
        return
    check_integer(name, value)
    if value < minimum:
        raise value_error(f"{name} must be at least {minimum}, got {value}.")


def check_is_number(name: str, value: float) -> None:
    """Raise an error unless `value` is a real number.

    Raises:
      TypeError: if it has another type.
    """
    if not is_number(value):
        raise type_error(f"{name} must be a number, got {value!r} ({type(value).__name__}).")


def check_number(
    name: str,
    value: float,
    *,
    minimum: float = 0.0,
    below: float = math.inf,
    positive: bool = False,
) -> None:
    """Raise an error unless `value` is a finite number in [minimum, below), and above 0 if
    `positive`.

    Raises:
      TypeError: if it has another type.
      ValueError: if it is out of range.
    """
    check_is_number(name, value)
    if math.isfinite(value) and minimum <= value < below and (value > 0 or not positive):
        return
    allowed_range = "above 0" if positive else f"at least {minimum:g}"
    if below != math.inf:
        allowed_range += f" and below {below:g}"
    raise value_error(f"{name} must be finite, {allowed_range}; got {value}.")


def check_floating(**arrays: Any) -> None:
    """Raise a TypeError unless arrays hold real floating numbers; None is no array."""
    wrong_arrays = [
        f"{name}: {x.dtype}" for name, x in arrays.items() if x is not None and not is_floating(x)
    ]
    if wrong_arrays:
        raise type_error("arrays must hold real floating numbers.", wrong_arrays, "cast them.")


def check_transformation(
    name: str, tx: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation in the form that takes extra arguments.

    Its `init` copies an array that optax has in two leaves, or shares with the parameters, as in
    `optax.contrib.dog`. A step that donates the state must not get one buffer twice.

    Raises:
      TypeError: if it has no callable `init` and `update`.
    """
    if isinstance(tx, type) or not all(
        callable(getattr(tx, method, None)) for method in ("init", "update")
    ):
        fix = "pass a transformation such as optax.adamw(1e-3), called, not the function itself."
        tx_name = getattr(tx, "__name__", type(tx).__name__)
        raise type_error(f"{name} must be an optax.GradientTransformation, got {tx_name}.", fix=fix)

    def init(params: PyTree) -> PyTree:
        arrays = {id(leaf) for leaf in jax.tree.leaves(params)}

        def own(leaf: Any) -> Any:
            if isinstance(leaf, jax.Array) and id(leaf) in arrays:
                leaf = leaf.copy()
            arrays.add(id(leaf))
            return leaf

        return jax.tree.map(own, tx.init(params))

    return optax.GradientTransformationExtraArgs(init, optax.with_extra_args_support(tx).update)


def check_params(params: PyTree | None) -> PyTree:
    """Return the parameters that were passed to `update` of a transformation.

    Raises:
      ValueError: if they are None.
    """
    if params is None:
        raise value_error("update needs the parameters.", fix="call update(grads, state, params).")
    return params
