"""An optax transformation: the call of its update, the check of its state, and the functions inside of it."""

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import jax
import optax

from shardopt.core._errors import format_error
from shardopt.core._types import PyTree, abstract, leaves_with_paths


class ExtraArgs(NamedTuple):
    """Values that an update may use in addition to gradients, state and parameters.

    Attributes:
      value: the loss.
      grad: the gradients.
      value_fn: the loss of this batch at other parameters, for line searches and sophia.
      grad_fn: the gradient of that loss, for sam.
    """

    value: jax.Array | jax.ShapeDtypeStruct
    grad: PyTree
    value_fn: Callable[[PyTree], jax.Array]
    grad_fn: Callable[..., PyTree]


def call_update(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, extra_args: ExtraArgs
) -> tuple[PyTree, PyTree]:
    """Return `tx.update(grads, opt_state, params)`, called with the extra arguments that it takes."""
    keywords = {"value": extra_args.value, "grad": extra_args.grad, "value_fn": extra_args.value_fn}
    # Line searches refuse arguments that they do not know.
    optional_functions = (("obj_fn", extra_args.value_fn), ("grad_fn", extra_args.grad_fn))
    keywords |= {name: f for name, f in optional_functions if has_argument(tx, name)}
    return tx.update(grads, opt_state, params, **_accepted_keywords(tx.update, keywords))


def _accepted_keywords(update: Callable[..., tuple[PyTree, PyTree]], keywords: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return the keywords that an optax update accepts: all, some or none."""
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}


def functions_within(tx: Any) -> list[FunctionType]:
    """Return the functions of a transformation, and all functions that they close over, at any depth."""
    functions: list[FunctionType] = []
    todo, seen = [tx], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            functions.append(value)
            todo += closed_over(value)
        elif isinstance(value, tuple | list | dict):
            todo += value.values() if isinstance(value, dict) else value
    return functions


def closed_over(f: FunctionType) -> list[Any]:
    """Return the values that a function closes over."""
    return [cell.cell_contents for cell in f.__closure__ or () if cell != CellType()]


def has_argument(tx: Any, name: str) -> bool:
    """Return whether a function of a transformation has an argument of this name."""
    return any(name in _arguments(f) for f in functions_within(tx))


def _arguments(f: Callable[..., Any]) -> tuple[str, ...]:
    code = f.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def check_same_form(caller: str, before: PyTree, after: PyTree) -> None:
    """Refuse, by a ValueError, an optimizer that changes the structure, shapes or dtypes of its state."""
    fix = "let init make each leaf with the shape and dtype that update returns, or cast to it in update."
    if jax.tree.structure(before) != jax.tree.structure(after):
        problem = "update of the optimizer returned a state of another structure than it was given."
        raise ValueError(format_error(caller, problem, fix="let init make what update returns."))
    describe = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}"  # noqa: E731
    leaves = zip(leaves_with_paths(abstract(before)), jax.tree.leaves(abstract(after)), strict=True)
    changed = [
        f"{path or 'the state'}: {describe(a)}, then {describe(b)}"
        for (path, a), b in leaves
        if describe(a) != describe(b)
    ]
    if changed:
        problem = "update of the optimizer changed its state's form, which must be the same at every step."
        raise ValueError(format_error(caller, problem, changed, fix))
