"""Sums over servers, for optimizers with a global norm: a program is split into the phases before
and after the sums.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from shardopt.core._errors import format_error
from shardopt.core._types import PyTree
from shardopt.trace._jaxprs import SUMS, axes_of, nested_equations
from shardopt.trace._parts import part_of, slice_of, trace_of

CALLER = "parameter_server"
AXIS = "servers"
"""The axis name by which an optimizer sums over servers: `so.transforms.clip_by_global_norm(1.0,
"servers", split=True)`.
"""

SumsFn = Callable[..., list[jax.Array]]
FinishFn = Callable[..., PyTree]


def split_at_sums(run: Callable[..., PyTree], servers: int) -> tuple[SumsFn, FinishFn]:
    """Return two functions, the phases of `run` before and after its sums over the axis "servers".

    `sums(*args)` returns the terms that one server adds to the sums. `finish(server_sums, *args)`
    returns `run(*args)`, given the terms of all servers. It adds them in the order of the servers:
    the same bits, wherever the servers are.

    Raises:
      ValueError: from both functions, if a sum needs another sum, is in a branch or a loop, or
        `run` uses the axis for anything else.
    """

    def sums(*args: Any) -> list[jax.Array]:
        closed, leaves, _ = _trace(run, servers, args)
        return _phases(closed)[0](*leaves)

    def finish(server_sums: Sequence[Sequence[jax.Array]], *args: Any) -> PyTree:
        closed, leaves, treedef = _trace(run, servers, args)
        totals = [functools.reduce(operator.add, terms) for terms in zip(*server_sums, strict=True)]
        return treedef.unflatten(_phases(closed)[1](*leaves, *totals))

    return sums, finish


def _trace(
    run: Callable[..., PyTree], servers: int, args: tuple[Any, ...]
) -> tuple[ClosedJaxpr, list[Any], Any]:
    leaves, treedef = jax.tree.flatten(args)
    out_trees: list[PyTree] = []

    def run_flat(*leaves: Any) -> list[Any]:
        out_leaves, out_tree = jax.tree.flatten(run(*treedef.unflatten(leaves)))
        out_trees.append(out_tree)
        return out_leaves

    return jax.make_jaxpr(run_flat, axis_env=[(AXIS, servers)])(*leaves), leaves, out_trees[0]


def _phases(closed: ClosedJaxpr) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
    """Return `terms(*leaves)`, which a program adds to its sums, and `results(*leaves, *totals)` of
    the program.
    """
    trace = trace_of(closed)
    eqns, leaves = trace.jaxpr.eqns, trace.jaxpr.invars
    sums = [
        i for i, eqn in enumerate(eqns) if eqn.primitive.name in SUMS and axes_of(eqn) == {AXIS}
    ]
    terms = [term for i in sums for term in eqns[i].invars]
    totals = [total for i in sums for total in eqns[i].outvars]
    before, _ = slice_of(trace, terms, stop=set())
    after, _ = slice_of(trace, trace.jaxpr.outvars, stop=set(totals))
    if before.intersection(sums):
        _refuse("one sum over the servers needs another one first.")
    if any(AXIS in axes_of(inner) for i in before | after for inner in nested_equations(eqns[i])):
        _refuse("it uses the axis 'servers' otherwise than for a sum, or in a branch or a loop.")
    results = part_of(trace, after, [*leaves, *totals], trace.jaxpr.outvars)
    return part_of(trace, before, leaves, terms), results


def _refuse(reason: str) -> None:
    fix = (
        'use one so.transforms.clip_by_global_norm(max_norm, "servers", split=True), not inside of'
        " another rule."
    )
    raise ValueError(
        format_error(CALLER, f"the optimizer cannot run on several servers: {reason}", fix=fix)
    )
