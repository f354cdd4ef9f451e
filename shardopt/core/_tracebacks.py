"""Short tracebacks: the user's frames without shardopt's, as jax leaves out its own.

jax has no public way to hide further files. Its private list of hidden files also decides which
line of the source a compiled operation names, and `so.hlo.audit` reports these lines. So shardopt
filters tracebacks itself.
"""

import functools
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = f"{Path(__file__).parents[1]}/"
_REFUSALS = (TypeError, ValueError, FloatingPointError, OSError)
"""Errors whose message says everything. Of another error that shardopt raises itself the line is
shown.
"""


def api_boundary(function: Function) -> Function:
    """Leave shardopt's frames out of the traceback of every error that passes through a public
    function.

    `jax_traceback_filtering` "off" (`JAX_TRACEBACK_FILTERING=off`) shows all frames.
    """

    @functools.wraps(function)
    def with_short_traceback(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            jax_options: Any = jax.config  # type checkers do not know its attributes
            if jax_options.jax_traceback_filtering != "off":
                shorten(error)
            raise  # adds no frame of this file

    return cast(Function, with_short_traceback)


def shorten(error: BaseException) -> None:
    """Remove shardopt's frames from the traceback of an error and of the errors that it came from."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        chain.with_traceback(_without_our_frames(chain))
        chain = chain.__cause__ or chain.__context__


def _without_our_frames(error: BaseException) -> types.TracebackType | None:
    shown = None
    for position, (frame, line) in enumerate(reversed([*traceback.walk_tb(error.__traceback__)])):
        is_ours = frame.f_code.co_filename.startswith(_PACKAGE)
        if not is_ours or (position == 0 and not isinstance(error, _REFUSALS)):
            shown = types.TracebackType(shown, frame, frame.f_lasti, line)
    return shown
