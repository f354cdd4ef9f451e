"""Lets the reference write `::: so.ddp`: says where the definition is, and gives the entry the name
that users type.

By its public path a function would be taken for the module of the same name that it lives in.
"""

import importlib
import inspect
import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each `::: so.name` by the path of its definition."""
    return re.sub(
        r"^::: ((?:so|shardopt)\.\S+)$",
        lambda match: _entry(match[1]),
        markdown,
        flags=re.MULTILINE,
    )


def _entry(name: str) -> str:
    # a type in a private module is only received: users read its attributes, and do not type its
    # name
    heading = name.rpartition(".")[2] if "._" in name else name
    return f"::: {definition(name)}\n    options:\n      heading: {heading}\n      toc_label: {name.rpartition('.')[2]}"


def definition(name: str) -> str:
    """Return the path of what `so.a.b` names: module and name of a function or class, else the path
    as it is.
    """
    room, _, last = name.replace("so.", "shardopt.", 1).rpartition(".")
    thing = getattr(_room(room), last)
    if hasattr(thing, "__qualname__"):
        return f"{thing.__module__}.{thing.__qualname__}"
    return f"{room}.{last}"


def _room(path: str) -> Any:
    room, *parts = path.split(".")
    thing = importlib.import_module(room)
    for part in parts:  # a room may have the name of a function
        found = getattr(thing, part, None)
        thing = (
            found
            if inspect.ismodule(found)
            else importlib.import_module(f"{thing.__name__}.{part}")
        )
    return thing
