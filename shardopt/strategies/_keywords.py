"""Options as keywords of a strategy: its signature, its docstring, and the refusal of unknown
keywords.
"""

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, cast, get_args, get_type_hints

from shardopt.config._options import ARGUMENTS, OPTIONS, records
from shardopt.core import calling, format_error, quoted
from shardopt.core._tracebacks import api_boundary

Strategy = TypeVar("Strategy", bound=Callable[..., Any])

_WIDTH = 112


def with_options(strategy: Strategy) -> Strategy:
    """Return a strategy that takes each option of its `**options: Unpack[Group]` as a keyword of
    its own.

    Its signature has every option with type and default. The `Args:` of its docstring have every
    argument: the meaning comes from the docstring itself, or from the records in
    `shardopt.config._options`. Inside of the strategy, `options` has all options of the group, with
    defaults.

    Example:
      >>> from typing import Unpack
      >>> from shardopt.config._options import MicroBatchOptions
      >>> @with_options
      ... def strategy(mesh, **options: Unpack[MicroBatchOptions]):
      ...     return options
      >>> strategy("mesh"), str(inspect.signature(strategy))
      ({'micro_batches': 1}, '(mesh, *, micro_batches: int = 1)')
      >>> strategy("mesh", micro_batch=2)
      Traceback (most recent call last):
      ...
      TypeError: strategy: unexpected keyword argument 'micro_batch'.
      Fix: write micro_batches.
    """
    name = strategy.__name__
    *named, variable = inspect.signature(strategy).parameters.values()
    # `Unpack[Group]` -> Group, the TypedDict whose records describe the options.
    (group,) = get_args(get_type_hints(strategy)[variable.name])
    types = get_type_hints(group)
    options = records(group)
    keywords = [
        inspect.Parameter(
            option, inspect.Parameter.KEYWORD_ONLY, default=record.default, annotation=types[option]
        )
        for option, record in options.items()
    ]
    signature = inspect.signature(strategy).replace(parameters=[*named, *keywords])
    defaults = {option: record.default for option, record in options.items()}

    @api_boundary
    @functools.wraps(strategy)
    def with_defaults(*args: Any, **arguments: Any) -> Any:
        unknown = [argument for argument in arguments if argument not in signature.parameters]
        if unknown:
            raise TypeError(_unknown_keywords(name, unknown, list(signature.parameters)))
        with calling(name):
            return strategy(*args, **(defaults | arguments))

    # So `help`, editors and the reference show each option, although the code takes `**options`.
    cast(Any, with_defaults).__signature__ = signature
    with_defaults.__doc__ = _docstring(strategy.__doc__ or "", list(signature.parameters))
    return cast(Strategy, with_defaults)


def _unknown_keywords(strategy: str, unknown: list[str], names: list[str]) -> str:
    close = {
        name: match for name in unknown for match in difflib.get_close_matches(name, names, n=1)
    }
    problem = f"unexpected keyword argument {quoted(unknown)}."
    fix = f"write {', '.join(close.values())}." if close else f"use some of {', '.join(names)}."
    return format_error(strategy, problem, fix=fix)


def _docstring(text: str, names: list[str]) -> str:
    """Return a docstring whose `Args:` describe all names, in this order."""
    before, heading, after = inspect.cleandoc(text).partition("Args:\n")
    section, after = after.split("\n\n", 1) if heading else ("", "")
    if not heading:
        before, heading, after = before.partition("Returns:\n")
        after = heading + after
    entries = _entries(section)
    shared = ARGUMENTS | {name: option.meaning for name, option in OPTIONS.items()}
    entries |= {
        name: _entry(name, shared[name]) for name in names if name not in entries and name in shared
    }
    lines = [entries[name] for name in names if name in entries]
    return "\n".join([f"{before}Args:", *lines, "", after])


def _entries(section: str) -> dict[str, str]:
    """Return name -> lines of each entry in the text of an `Args:` section."""
    entries: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if not line.startswith("    "):
            name = line.partition(":")[0].strip()
            entries[name] = line
        else:
            entries[name] += f"\n{line}"
    return entries


def _entry(name: str, meaning: str) -> str:
    return textwrap.fill(
        f"{name}: {meaning}",
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
