"""Sums over servers, for optimizers with a global norm: a program is split into the phases before and after the sums."""

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

CALLER = "parameter_server"
AXIS = "servers"
"""The axis name by which an optimizer sums over servers: `so.transforms.clip_by_global_norm(1.0, "servers", split=True)`."""

SumsFn = Callable[..., list[jax.Array]]
FinishFn = Callable[..., PyTree]


def split_at_sums(run: Callable[..., PyTree], servers: int) -> tuple[SumsFn, FinishFn]:
    """Return two functions, the phases of `run` before and after its sums over the axis "servers".

    `sums(*args)` returns the terms that one server adds to the sums. `finish(server_sums, *args)` returns `run(*args)`,
    given the terms of all servers. It adds them in the order of the servers: the same bits, wherever the servers are.

    Raises:
      ValueError: from both functions, if a sum needs another sum, is in a branch or a loop, or `run` uses the axis for
        anything else.
    """

    def sums(*args: Any) -> list[jax.Array]:
        return _evaluate(*_trace(run, servers, args)[:2], None)[0]

    def finish(server_sums: Sequence[Sequence[jax.Array]], *args: Any) -> PyTree:
        closed, leaves, treedef = _trace(run, servers, args)
        totals = [functools.reduce(operator.add, terms) for terms in zip(*server_sums, strict=True)]
        return treedef.unflatten(_evaluate(closed, leaves, totals)[1])

    return sums, finish


def _trace(run: Callable[..., PyTree], servers: int, args: tuple[Any, ...]) -> tuple[ClosedJaxpr, list[Any], Any]:
    leaves, treedef = jax.tree.flatten(args)
    out_trees: list[PyTree] = []

    def run_flat(*leaves: Any) -> list[Any]:
        out_leaves, out_tree = jax.tree.flatten(run(*treedef.unflatten(leaves)))
        out_trees.append(out_tree)
        return out_leaves

    return jax.make_jaxpr(run_flat, axis_env=[(AXIS, servers)])(*leaves), leaves, out_trees[0]


def _evaluate(
    closed: ClosedJaxpr, leaves: Sequence[Any], totals: Sequence[jax.Array] | None
) -> tuple[list[Any], list[Any]]:
    """Evaluate a program; return the terms that it adds to its sums, and its results, if the `totals` are known."""
    jaxpr, remaining_totals = closed.jaxpr, iter(totals or ())
    values: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *leaves], strict=True))
    terms: list[Any] = []

    def evaluate_atom(x: Var | Literal) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for eqn in jaxpr.eqns:
        ready = all(isinstance(x, Literal) or x in values for x in eqn.invars)
        if eqn.primitive.name in PSUM and axes_of(eqn) == {AXIS}:
            if not ready:
                _refuse("one sum over the servers needs another one first.")
            terms += [evaluate_atom(x) for x in eqn.invars]
            if totals is not None:
                values.update(zip(eqn.outvars, [next(remaining_totals) for _ in eqn.outvars], strict=True))
        elif ready and not any(AXIS in axes_of(inner) for inner in within(eqn)):
            outputs = eqn.primitive.bind(*map(evaluate_atom, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
            values.update(zip(eqn.outvars, outputs, strict=True))
    if totals is not None and any(isinstance(x, Var) and x not in values for x in jaxpr.outvars):
        _refuse("it uses the axis 'servers' otherwise than for a sum, or in a branch or a loop.")
    return terms, [] if totals is None else [evaluate_atom(x) for x in jaxpr.outvars]


def _refuse(reason: str) -> None:
    fix = 'use one so.transforms.clip_by_global_norm(max_norm, "servers", split=True), not inside of another rule.'
    raise ValueError(format_error(CALLER, f"the optimizer cannot run on several servers: {reason}", fix=fix))
