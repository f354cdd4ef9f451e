"""Lets the reference show `Example:` as code, `References:` as text, and the options of strategies as keywords.

griffe knows `Examples:`, and no references. It reads the source, and a strategy there has `**options`.
"""

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import griffe

from shardopt.config import _options as options


class Sections(griffe.Extension):
    """Rewrites the headings of docstrings before griffe reads them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object, and the parameters of a strategy."""
        if isinstance(obj, griffe.Function) and any(
            str(used.value) == "with_options" for used in obj.decorators
        ):
            _read_strategy(obj)
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            head, found, references = text.partition("\nReferences:\n")
            if found:
                lines = re.sub(r"^  ", "", references, flags=re.MULTILINE)
                text = f"{head}\n**References**: {lines}"
            obj.docstring.value = text


def _read_strategy(obj: griffe.Function) -> None:
    """Put the keywords and the docstring of the imported function in place of the source, which has `**options`."""
    strategy = getattr(importlib.import_module(obj.module.path), obj.name)
    types = _types_of_options()
    named = [parameter for parameter in obj.parameters if parameter.name != "options"]
    names = {parameter.name for parameter in named}
    keywords = [
        griffe.Parameter(
            name,
            kind=griffe.ParameterKind.keyword_only,
            annotation=types[name],
            default=repr(default).replace("'", '"'),
        )
        for name, default in (
            (name, option.default)
            for name, option in inspect.signature(strategy).parameters.items()
        )
        if name not in names
    ]
    obj.parameters = griffe.Parameters(*named, *keywords)
    obj.docstring.value = inspect.getdoc(strategy)


@functools.cache
def _types_of_options() -> dict[str, griffe.Expr]:
    """Return name of an option -> the type that its `Annotated` has in the source."""
    path = Path(options.__file__)
    module = griffe.visit(options.__name__, filepath=path, code=path.read_text())
    groups = [group for name, group in module.classes.items() if name.endswith("Options")]
    fields = [field for group in groups for field in group.attributes.values()]
    return {field.name: field.annotation.slice.elements[0] for field in fields}
