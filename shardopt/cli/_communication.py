"""Communication of `shardopt train`: local updates and reducers from the options."""

import functools
import inspect
from collections.abc import Callable

import jax.numpy as jnp

import shardopt as so
from shardopt.cli._optimizer import check_keywords, read_call
from shardopt.cli._options import CommunicationOptions
from shardopt.core._errors import plural, value_error


def size(count: int) -> str:
    """Return a number of bytes with three digits: 950 bytes, 12.3 kB, 9.87 MB.

    Example:
      >>> size(950), size(12_340), size(9_870_000)
      ('950 bytes', '12.3 kB', '9.87 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"


_REDUCERS: dict[str, Callable[..., so.reducers.Reducer]] = {
    "bf16": functools.partial(so.reducers.exact, jnp.bfloat16),
    "int8": so.reducers.int8,
    "sign": so.reducers.sign,
    "top_k": so.reducers.top_k,
    "power_sgd": so.reducers.power_sgd,
}


def make_reducer(communication: CommunicationOptions) -> so.reducers.Reducer | None:
    """Return the reducer that the options name, or None.

    It has error feedback, unless it is bf16, which only rounds.
    """
    text = communication.reducer
    if text is None:
        return None
    name, arguments = read_call("--reducer", text, example="top_k(density=0.05)")
    if name not in _REDUCERS:
        problem = f"there is no reducer {name!r}."
        *names, last = _REDUCERS
        raise value_error(problem, fix=f"choose {', '.join(names)} or {last}.")
    keywords = list(inspect.signature(_REDUCERS[name]).parameters)
    if name == "bf16":
        keywords = []
    check_keywords(f"--reducer {name}", arguments, keywords)
    reducer = _REDUCERS[name](**arguments)
    return reducer if name == "bf16" else so.reducers.error_feedback(reducer)


def combined(
    communication: CommunicationOptions, strategy: so.ShardedOptimizer
) -> so.ShardedOptimizer:
    """Return the strategy, as replicas of DiLoCo if the options have steps between
    synchronizations.
    """
    sync_every = communication.sync_every
    if sync_every is None:
        return strategy
    return so.diloco(strategy, sync_every=sync_every, reducer=make_reducer(communication))


def describe(communication: CommunicationOptions) -> list[tuple[str, str]]:
    """Return (label, line) pairs that describe local updates and reducers."""
    lines = []
    if communication.sync_every is not None:
        interval = plural(communication.sync_every, "step")
        lines.append(("replicas", f"synchronized every {interval}, by nesterov"))
    reducer = make_reducer(communication)
    if reducer is not None:
        reduced = "gradients" if communication.sync_every is None else "outer gradients"
        lines.append(("sent", f"{reduced} by {reducer.name}"))
    return lines
