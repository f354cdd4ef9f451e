"""An update whose state waits in host memory: blocks come to the device one at a time, and go back."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.core.trace import Atom, Trace, part_of, shape_of, slice_of
from shardopt.core.types import PyTree, abstract
from shardopt.engine.blockwise import block_dim, is_blockwise, match_variables
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout, shardings
from shardopt.engine.matrix_tasks import is_opaque
from shardopt.engine.offload import HOST, to_device
from shardopt.engine.owned_update import evaluate, trace_again
from shardopt.engine.transformation import ExtraArgs


class Stream(NamedTuple):
    """An update cut into what is done to each block alike, and the rest.

    Attributes:
      whole: its trace.
      single: that of a model of one block.
      same: which variable of `whole` is which of `single`.
      equations: those of a block.
      reads: what a block reads that counts blocks: gradients, state and parameters.
      shared: what all blocks read.
      updates: which of the results are updates of blocks.
      state: which leaves of the state are streamed.
      blocks: how many there are.
    """

    whole: Trace
    single: Trace
    same: dict[jex.Var, jex.Var]
    equations: set[int]
    reads: list[jex.Var]
    shared: list[jex.Var]
    updates: list[int]
    state: list[int]
    blocks: int


def streamed_update(
    config: StrategyConfig,
    layout: Layout,
    args: tuple[PyTree, PyTree, PyTree],
    extra_args: ExtraArgs,
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
) -> tuple[PyTree, PyTree]:
    """Return `update(grads, opt_state, params)`, of a state in host memory, with streamed blocks of the new one there.

    A loop over blocks copies what the state has of one to the device, updates it and copies it back, if the optimizer does
    the same to each block and to each apart; what it does to all of them (a norm of all gradients) is done before. Where it
    mixes them (a norm of each stacked leaf), asks for the loss, or where blocks are sharded, all of the state is copied.
    """
    grads, opt_state, params = args
    specs = layout.specs.opt_state if layout.compression is None else layout.specs.opt_state.optimizer
    stream = plan_stream(config, layout, abstract(extra_args.value))
    if stream is None:
        return update(grads, to_device(config, opt_state, shardings(config.mesh, specs)), params)
    leaves, treedef = jax.tree.flatten(opt_state)
    where = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    on_device = [NamedSharding(config.mesh, spec) for spec in where]
    streamed = set(stream.state)
    kept = {i: jax.device_put(x, on_device[i].with_memory_kind(HOST)) for i, x in enumerate(leaves) if i in streamed}
    rest = [None if i in streamed else jax.device_put(x, on_device[i]) for i, x in enumerate(leaves)]

    given, jaxpr = jax.tree.leaves(grads), stream.whole.jaxpr
    inputs = [*given, *rest, *jax.tree.leaves(params), extra_args.value]
    values = dict(zip(jaxpr.constvars, stream.whole.consts, strict=True))
    values |= {var: x for var, x in zip(jaxpr.invars, inputs, strict=True) if x is not None}
    others = [i for i in range(len(jaxpr.outvars)) if i not in stream.updates and i - len(given) not in streamed]
    evaluate(stream.whole, values, [*stream.shared, *(jaxpr.outvars[i] for i in others)])

    outs = [*stream.updates, *(len(given) + i for i in stream.state)]
    homes = {jaxpr.invars[len(given) + i]: on_device[i] for i in stream.state}
    starts = [_like(given[i], shape_of(jaxpr.outvars[i])) for i in stream.updates]
    made = _loop(
        stream, values, homes, starts, [kept[i] for i in stream.state], _variables(jaxpr.outvars[i] for i in outs)
    )
    read = lambda atom: atom.val if isinstance(atom, jex.Literal) else values[atom]  # noqa: E731
    results = {i: read(jaxpr.outvars[i]) for i in others} | dict(zip(outs, made, strict=True))
    found = [results[i] for i in range(len(results))]
    return jax.tree.unflatten(jax.tree.structure(grads), found[: len(given)]), treedef.unflatten(found[len(given) :])


def plan_stream(config: StrategyConfig, layout: Layout, value: jax.ShapeDtypeStruct) -> Stream | None:
    """Return how an update is streamed; None if it has to be done at once."""
    stacked = [plan for plan in layout.trained if plan.stacked]
    if not stacked or config.opt_state_layout == "matrices" or any(plan.pipelined for plan in stacked):
        return None
    blocks = stacked[0].shape[0]
    whole, single = (trace_again(config, layout, value, single=one) for one in (False, True))
    same = match_variables(whole.jaxpr, single.jaxpr)
    if blocks == 1 or same is None or any(map(is_opaque, whole.jaxpr.eqns)):
        return None
    count = len(layout.trained)
    invars, outvars = whole.jaxpr.invars, whole.jaxpr.outvars
    states = range(len(outvars) - count)

    def counts(atom: Atom) -> int | None:
        return None if isinstance(atom, jex.Literal) else block_dim(atom, same, blocks)

    updates = [i for i in range(count) if counts(outvars[i]) is not None]
    state = [i for i in states if counts(outvars[count + i]) is not None]
    ends = _variables([*(outvars[i] for i in updates), *(outvars[count + i] for i in state)])
    alike = state == [i for i in states if counts(invars[count + i]) is not None]
    if not state or not alike or any(counts(one) != 0 or shape_of(same[one]).shape[0] != 1 for one in ends):
        return None
    made = {var for eqn in whole.jaxpr.eqns for var in eqn.outvars}
    everywhere = {var for var in (*invars, *made) if counts(var) is None}
    equations, read = slice_of(whole, ends, stop={*invars, *everywhere})
    chosen = sorted(equations)
    pairs = [whole.jaxpr.eqns[i] for i in chosen], [single.jaxpr.eqns[i] for i in chosen]
    reads = [var for var in read if var not in everywhere]
    shared = [var for var in read if var in everywhere]
    others = [outvars[i] for i in range(len(outvars)) if i not in updates and i - count not in state]
    _, before = slice_of(whole, [*shared, *others], stop=set(invars))
    if {invars[count + i] for i in state} & set(before) or not is_blockwise(*pairs, same, blocks):
        return None
    return Stream(whole, single, same, equations, reads, shared, updates, state, blocks)


def _loop(
    stream: Stream,
    values: dict[jex.Var, jax.Array],
    homes: dict[jex.Var, NamedSharding],
    starts: list[jax.Array],
    kept: list[jax.Array],
    ends: Sequence[jex.Var],
) -> list[jax.Array]:
    """Return the updates, in the place of `starts`, and the state that is kept, after a loop over the blocks."""
    state = dict(zip(homes, range(len(starts), len(starts) + len(kept)), strict=True))
    part = part_of(
        stream.single,
        stream.equations,
        [stream.same[var] for var in (*stream.reads, *stream.shared)],
        [stream.same[var] for var in ends],
    )
    shared = [values[var] for var in stream.shared]
    moving = [values[var] for var in stream.reads if var not in state]

    def block(i: jax.Array, carried: list[jax.Array]) -> list[jax.Array]:
        others = iter(moving)
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, 0)  # noqa: E731
        args = [
            jax.device_put(take(carried[state[var]]), homes[var]) if var in state else take(next(others))
            for var in stream.reads
        ]
        new = part(*args, *shared)
        back = [
            jax.device_put(x, home.with_memory_kind(HOST))
            for x, home in zip(new[len(starts) :], homes.values(), strict=True)
        ]
        put = lambda x, one: jax.lax.dynamic_update_slice_in_dim(x, one, i, 0)  # noqa: E731
        return [put(x, one) for x, one in zip(carried, [*new[: len(starts)], *back], strict=True)]

    return jax.lax.fori_loop(0, stream.blocks, block, [*starts, *kept])


def _variables(atoms: Iterable[Atom]) -> list[jex.Var]:
    """Return atoms that are all variables."""
    return [one for one in atoms if not isinstance(one, jex.Literal)]


def _like(grad: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the gradient, whose place an update of its shape and dtype takes; else zeros."""
    fits = (grad.shape, grad.dtype) == (wanted.shape, wanted.dtype)
    return grad if fits else jnp.zeros(wanted.shape, wanted.dtype)
