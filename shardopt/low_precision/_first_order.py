"""Products in 8 bits have gradients, and these have none: to differentiate them again is refused."""

import functools
from collections.abc import Callable
from typing import Any, Never, TypeVar

import jax

from shardopt.core._errors import format_error
from shardopt.mesh import is_analysed

Results = TypeVar("Results")


def first_order(function: Callable[..., Results], num_static: int = 1) -> Callable[..., Results]:
    """Return a forward or backward function of a `custom_vjp` that cannot be differentiated.

    jax does it for a gradient of a gradient. It would differentiate roundings and scales, and
    return wrong numbers or zeros.

    Args:
      function: a function whose last arguments are pytrees of arrays.
      num_static: how many arguments come before them.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Results:
        if not is_analysed():
            # nothing reads the result, so that it changes no program
            _not_differentiated(*args[num_static:])
        return function(*args)

    return run


@jax.custom_jvp
def _not_differentiated(*arrays: Any) -> Any:
    return arrays


@_not_differentiated.defjvp
def _refuse(primals: Any, tangents: Any) -> Never:
    problem = "the gradient of a product in 8 bits was differentiated, and it has no gradient."
    fix = "use precision=None where a loss or a block takes a gradient itself."
    raise TypeError(format_error("quantized_einsum", problem, fix=fix))
