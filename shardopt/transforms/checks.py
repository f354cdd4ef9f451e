"""What every transformation here asks of its arguments."""

from typing import Any

import optax

from shardopt.core.errors import format_error


def check_inner(who: str, inner: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation that takes extra arguments.

    Raises:
      TypeError: if `inner` has no callable `init` and `update`.
    """
    if isinstance(inner, type) or not all(callable(getattr(inner, name, None)) for name in ("init", "update")):
        fix = "pass a transformation such as optax.adamw(1e-3), called, not the function itself."
        shown = getattr(inner, "__name__", type(inner).__name__)
        raise TypeError(format_error(who, f"inner must be an optax.GradientTransformation, got {shown}.", fix=fix))
    return optax.with_extra_args_support(inner)


def check_params(who: str, params: Any) -> Any:
    """Return the parameters, refusing an update without any.

    Raises:
      ValueError: if there are none.
    """
    if params is None:
        fix = "call update(grads, state, params)."
        raise ValueError(format_error(who, "update needs the parameters.", fix=fix))
    return params
