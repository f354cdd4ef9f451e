"""What an optax transformation is made of, read off its closures: optax itself does not say."""

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import jax
import optax

from shardopt.core.types import PyTree


class Asked(NamedTuple):
    """What an update may ask for beside gradients, state and parameters.

    Attributes:
      value: the loss.
      grad: the gradients.
      value_fn: the loss of this batch at other parameters, as line searches and sophia ask for it.
      grad_fn: its gradient, as sam asks for it.
    """

    value: jax.Array | jax.ShapeDtypeStruct
    grad: PyTree
    value_fn: Callable[[PyTree], jax.Array]
    grad_fn: Callable[..., PyTree]


def update_of(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, asked: Asked
) -> tuple[PyTree, PyTree]:
    """Return `tx.update(grads, opt_state, params)`, which gets those extra arguments that it takes."""
    extra = {"value": asked.value, "grad": asked.grad, "value_fn": asked.value_fn}
    # Line searches refuse arguments that they do not know.
    named = (("obj_fn", asked.value_fn), ("grad_fn", asked.grad_fn))
    extra |= {name: f for name, f in named if asks_for(tx, name)}
    return tx.update(grads, opt_state, params, **_taken(tx.update, extra))


def _taken(update: Callable[..., tuple[PyTree, PyTree]], extra: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return those extra arguments that an optax update takes: all, some or none."""
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return extra
    return {name: value for name, value in extra.items() if name in parameters}


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
