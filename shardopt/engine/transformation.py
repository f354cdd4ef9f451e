"""What an optax transformation is made of, read off its closures: optax itself does not say."""

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any


def functions_within(tx: Any) -> list[FunctionType]:
    """Return the functions of a transformation, and those that they close over, however deep."""
    found: list[FunctionType] = []
    todo, seen = [tx], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            found.append(one)
            todo += closed_over(one)
        elif isinstance(one, tuple | list | dict):
            todo += one.values() if isinstance(one, dict) else one
    return found


def closed_over(f: FunctionType) -> list[Any]:
    """Return the values that a function closes over."""
    return [cell.cell_contents for cell in f.__closure__ or () if cell != CellType()]


def asks_for(tx: Any, name: str) -> bool:
    """Return whether some function of a transformation has an argument of this name."""
    return any(name in _arguments(f) for f in functions_within(tx))


def _arguments(f: Callable[..., Any]) -> tuple[str, ...]:
    code = f.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
