"""Sums over servers, for optimizers with a global norm: a program in two phases, before and after it is known."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var

from shardopt.core.errors import format_error
from shardopt.core.jaxprs import within
from shardopt.core.types import PyTree
from shardopt.transforms.primitives import PSUM, axes_of

WHO = "parameter_server"
AXIS = "servers"
"""What an optimizer calls the servers: `so.transforms.clip_by_global_norm(1.0, "servers", split=True)`."""

SumsFn = Callable[..., list[jax.Array]]
RestFn = Callable[..., PyTree]


def two_phases(run: Callable[..., PyTree], servers: int) -> tuple[SumsFn, RestFn]:
    """Cut a function at its sums over the axis "servers".

    `sums(*args)` returns what one server adds to each of them; `rest(sums_of, *args)` is `run(*args)` given these of all
    servers, in order, which it adds up in this order: the same bits, wherever the servers are.

    Raises:
      ValueError: from both, if a sum needs another one, stands in a branch or a loop, or the axis is used otherwise.
    """

    def sums(*args: Any) -> list[jax.Array]:
        return _walk(*_trace(run, servers, args)[:2], None)[0]

    def rest(sums_of: Sequence[Sequence[jax.Array]], *args: Any) -> PyTree:
        closed, leaves, treedef = _trace(run, servers, args)
        totals = [functools.reduce(operator.add, one) for one in zip(*sums_of, strict=True)]
        return treedef.unflatten(_walk(closed, leaves, totals)[1])

    return sums, rest


def _trace(run: Callable[..., PyTree], servers: int, args: tuple[Any, ...]) -> tuple[ClosedJaxpr, list[Any], Any]:
    leaves, treedef = jax.tree.flatten(args)
    shapes: list[PyTree] = []

    def flat(*leaves: Any) -> list[Any]:
        found, out_tree = jax.tree.flatten(run(*treedef.unflatten(leaves)))
        shapes.append(out_tree)
        return found

    return jax.make_jaxpr(flat, axis_env=[(AXIS, servers)])(*leaves), leaves, shapes[0]


def _walk(
    closed: ClosedJaxpr, leaves: Sequence[Any], totals: Sequence[jax.Array] | None
) -> tuple[list[Any], list[Any]]:
    """Evaluate a program; return what it adds to its sums, and its results where their `totals` are known."""
    jaxpr, left = closed.jaxpr, iter(totals or ())
    known: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *leaves], strict=True))
    added: list[Any] = []

    def value(x: Var | Literal) -> Any:
        return x.val if isinstance(x, Literal) else known[x]

    for eqn in jaxpr.eqns:
        ready = all(isinstance(x, Literal) or x in known for x in eqn.invars)
        if eqn.primitive.name in PSUM and axes_of(eqn) == {AXIS}:
            if not ready:
                _refuse("one sum over the servers needs another one first.")
            added += [value(x) for x in eqn.invars]
            if totals is not None:
                known.update(zip(eqn.outvars, [next(left) for _ in eqn.outvars], strict=True))
        elif ready and not any(AXIS in axes_of(inner) for inner in within(eqn)):
            found = eqn.primitive.bind(*map(value, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
            found = found if eqn.primitive.multiple_results else [found]
            known.update(zip(eqn.outvars, found, strict=True))
    if totals is not None and any(isinstance(x, Var) and x not in known for x in jaxpr.outvars):
        _refuse("it uses the axis 'servers' otherwise than for a sum, or in a branch or a loop.")
    return added, [] if totals is None else [value(x) for x in jaxpr.outvars]


def _refuse(why: str) -> None:
    fix = 'use one so.transforms.clip_by_global_norm(max_norm, "servers", split=True), not inside of another rule.'
    raise ValueError(format_error(WHO, f"the optimizer cannot run on several servers: {why}", fix=fix))
