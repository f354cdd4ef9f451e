"""Write the signatures of the stable names, as they are now, into stable_names.txt next to this
file.

Usage: python .ci/stable_names.py [--check]

The file has the signatures of the last release. `--check` writes nothing. It prints the names that
differ, and the exit code is 1 if the part "Unreleased" of CHANGELOG.md does not name each of them.
To make a name stable, add it to the file as a line, then run this script.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import shardopt as so

FILE = Path(__file__).with_name("stable_names.txt")
CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def names_of(text: str) -> list[str]:
    """Return the names at the beginning of lines, without the members of classes."""
    names = re.findall(r"^so\.([\w.]+)", text, re.MULTILINE)
    return sorted({name for name in names if name.rpartition(".")[0] not in names})


def signatures(names: list[str]) -> dict[str, str]:
    """Return name -> how it is called, for each name and for the public members of each class."""
    return {name: call for listed in names for name, call in _lines(listed)}


def changed(text: str) -> list[str]:
    """Return the names whose signature is not the one in the text of the file, sorted."""
    written = dict(re.findall(r"^(so\.[\w.]+)(.*)$", text, re.MULTILINE))
    written = {name.removeprefix("so."): call for name, call in written.items()}
    current = signatures(names_of(text))
    return sorted(
        name for name in written.keys() | current.keys() if written.get(name) != current.get(name)
    )


def unreleased(changelog: str) -> str:
    """Return the part of a changelog that describes the next release."""
    return re.split(
        r"^## ", changelog.partition("## Unreleased\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]


def untold(text: str, changelog: str) -> list[str]:
    """Return the changed names that the part "Unreleased" of the changelog does not mention."""
    told = set(re.findall(r"`so\.([\w.]+)", unreleased(changelog)))
    return [name for name in changed(text) if not {name, name.rpartition(".")[0]} & told]


def _lines(name: str) -> Iterator[tuple[str, str]]:
    value: Any = so
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        return
    if not inspect.isclass(value):
        yield name, _call(value)
    elif issubclass(value, BaseException):
        yield name, f": {', '.join(base.__name__ for base in value.__bases__)}"
    else:
        yield name, _call(value)
        yield from ((f"{name}.{member}", call) for member, call in _members(value))


def _members(owner: type) -> Iterator[tuple[str, str]]:
    """Yield the public methods and properties of a class, and its fields that are called."""
    fields = getattr(owner, "_fields", ())
    for field in fields:
        protocol = get_type_hints(owner).get(field)
        if getattr(protocol, "_is_protocol", False) and callable(protocol):
            yield field, _call(protocol.__call__, bound=True)
    for member, value in sorted(vars(owner).items()):
        if (
            member.startswith("_")
            or member in fields
            or getattr(value, "__annotations__", {}).get("return") is NoReturn
        ):
            continue
        if isinstance(value, property):
            yield member, ""
        elif callable(value) or isinstance(value, classmethod | staticmethod):
            yield member, _call(getattr(owner, member), bound=inspect.isfunction(value))


def _call(function: Any, *, bound: bool = False) -> str:
    """Return the parameters of a function as they are written in a call, with defaults and without
    types.
    """
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    plain = [
        parameter.replace(
            annotation=inspect.Parameter.empty, default=_Default.of(parameter.default)
        )
        for parameter in parameters
    ]
    return str(inspect.Signature(plain))


class _Default(str):
    """A default value, whose repr is the same in every process."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Any:
        if value is inspect.Parameter.empty:
            return value
        if value is None or isinstance(value, bool | int | float | str | tuple):
            return cls(repr(value))
        return cls(getattr(value, "__name__", "..."))

    def __repr__(self) -> str:
        return str(self)


def main(arguments: list[str]) -> int:
    """Write the file, or check it, and return the exit code."""
    text = FILE.read_text()
    if arguments == ["--check"]:
        names = untold(text, CHANGELOG.read_text())
        print(f"changed since the last release: {', '.join(changed(text)) or 'none'}")
        print(f"not in CHANGELOG.md: {', '.join(names) or 'none'}")
        return int(bool(names))
    FILE.write_text(
        "".join(f"so.{name}{call}\n" for name, call in signatures(names_of(text)).items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
