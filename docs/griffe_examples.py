"""Lets the reference show `Example:` as code and `References:` as text: griffe knows `Examples:`, and no references."""

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Rewrites the headings of docstrings before griffe reads them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            head, found, references = text.partition("\nReferences:\n")
            if found:
                lines = re.sub(r"^  ", "", references, flags=re.MULTILINE)
                text = f"{head}\n**References**: {lines}"
            obj.docstring.value = text
