"""An update whose state is in host memory: blocks are copied to the device one at a time, and back."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._offload import HOST, to_device
from shardopt.config._slots import OptimizerUpdate
from shardopt.config._transformation import ExtraArgs
from shardopt.core import Arrays, PyTree, abstract, with_leaves
from shardopt.matrices._blockwise import block_dim, is_blockwise, match_variables
from shardopt.matrices._owned_tasks import WHOLE
from shardopt.matrices._owned_update import evaluate, retrace
from shardopt.partition import Owners
from shardopt.trace._jaxprs import shape_of
from shardopt.trace._matrix_work import is_opaque
from shardopt.trace._parts import Atom, Trace, abstract_value, part_of, slice_of, variables_of


class Stream(NamedTuple):
    """An update, split into the equations of each block and all other equations.

    Attributes:
      full_trace: the trace of the update.
      block_trace: the trace of the update of a model of one block.
      matches: variable of `full_trace` -> variable of `block_trace`.
      equations: the equations of a block.
      block_inputs: the variables that a block reads and that count blocks: gradients, state and
        parameters.
      shared_inputs: the variables that all blocks read.
      updates: the indices of the results that are updates of blocks.
      state: the indices of the leaves of the state that are streamed.
      blocks: the number of blocks.
    """

    full_trace: Trace
    block_trace: Trace
    matches: dict[jex.Var, jex.Var]
    equations: set[int]
    block_inputs: list[jex.Var]
    shared_inputs: list[jex.Var]
    updates: list[int]
    state: list[int]
    blocks: int


@dataclasses.dataclass(frozen=True)
class StreamedUpdate:
    """An update of a state in host memory; see `OptimizerUpdate`. Streamed blocks of the new state stay
    there.

    If the optimizer does the same to every block and never mixes blocks, a loop copies the state of
    one block to the device, updates it and copies it back. Computations over all blocks (a norm of
    all gradients) run before the loop. All of the state is copied at once if the optimizer mixes
    blocks (a norm of each stacked leaf) or evaluates the loss, or if blocks are sharded.

    Attributes:
      update: the update of a state that is on the device.
    """

    update: OptimizerUpdate

    def describe(self, config: StrategyConfig, layout: Layout) -> Owners | None:
        """Return the report of the update of a state on the device."""
        return self.update.describe(config, layout)

    def __call__(
        self,
        config: StrategyConfig,
        layout: Layout,
        grads: PyTree,
        opt_state: PyTree,
        params: PyTree,
        extra_args: ExtraArgs,
    ) -> tuple[PyTree, PyTree]:
        """Return the updates and the new optimizer state."""
        specs, _ = layout.reduce.split(layout.specs.opt_state)
        stream = plan_stream(config, layout, abstract(extra_args.value))
        if stream is None:
            on_device = shardings(config.mesh, specs)
            opt_state = to_device(config.update.offload, opt_state, on_device)
            return self.update(config, layout, grads, opt_state, params, extra_args)
        return _streamed(config, stream, specs, (grads, opt_state, params), extra_args)


def _streamed(
    config: StrategyConfig,
    stream: Stream,
    specs: PyTree,
    args: tuple[PyTree, PyTree, PyTree],
    extra_args: ExtraArgs,
) -> tuple[PyTree, PyTree]:
    """Return the updates and the new optimizer state, computed block by block."""
    # host     m0  m1  m2 ... m_L      the state, stacked by blocks
    #           |   ^
    #           v   |                  one block at a time
    # device   update of a block       and all values that every block reads: count, norm, rate
    grads, opt_state, params = args
    leaves, treedef = jax.tree.flatten(opt_state)
    on_device = [NamedSharding(config.mesh, spec) for spec in jax.tree.leaves(specs)]
    host_state = [
        jax.device_put(leaves[i], on_device[i].with_memory_kind(HOST)) for i in stream.state
    ]
    # the loop alone reads the state that is streamed
    device_state = [
        None if i in stream.state else jax.device_put(x, on_device[i]) for i, x in enumerate(leaves)
    ]

    grad_leaves = jax.tree.leaves(grads)
    jaxpr = stream.full_trace.jaxpr
    inputs = [*grad_leaves, *device_state, *jax.tree.leaves(params), extra_args.value]
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*stream.full_trace.consts, *inputs], strict=True))
    loop_results = [*stream.updates, *(len(grad_leaves) + i for i in stream.state)]
    other_results = {i: x for i, x in enumerate(jaxpr.outvars) if i not in loop_results}
    # Before the loop: what mixes blocks (a global norm), and results without blocks (a count).
    evaluate(stream.full_trace, values, [*stream.shared_inputs, *other_results.values()])

    shardings_on_device = {jaxpr.invars[len(grad_leaves) + i]: on_device[i] for i in stream.state}
    starts = [_start_like(grad_leaves[i], abstract_value(jaxpr.outvars[i])) for i in stream.updates]
    loop_values = _loop(
        stream,
        values,
        shardings_on_device,
        starts,
        host_state,
        variables_of(jaxpr.outvars[i] for i in loop_results),
    )
    results = dict(zip(loop_results, loop_values, strict=True))
    for i, atom in other_results.items():
        results[i] = atom.val if isinstance(atom, jex.Literal) else values[atom]
    # as they stand in the jaxpr: the updates, then the new state
    ordered = [results[i] for i in range(len(results))]
    updates = ordered[: len(grad_leaves)]
    new_state = ordered[len(grad_leaves) :]
    return with_leaves(grads, updates), treedef.unflatten(new_state)


def plan_stream(
    config: StrategyConfig, layout: Layout, value: jax.ShapeDtypeStruct
) -> Stream | None:
    """Return how an update is streamed; None if it has to run on all blocks at once."""
    stacked = [plan for plan in layout.trained if plan.stacked]
    is_owned = config.layout.opt_state_layout == "matrices"
    if not stacked or is_owned or any(plan.pipelined for plan in stacked):
        return None
    # An equation that does the same to each block has a partner in the update of a model of one block.
    stacked_leaves = frozenset(i for i, plan in enumerate(layout.trained) if plan.stacked)
    full_trace, block_trace = (
        retrace(config, layout, value, cut) for cut in (WHOLE, stacked_leaves)
    )
    matches = match_variables(full_trace.jaxpr, block_trace.jaxpr)
    blocks = stacked[0].shape[0]
    # an opaque equation evaluates the loss, which reads all blocks
    if blocks == 1 or matches is None or any(map(is_opaque, full_trace.jaxpr.eqns)):
        return None
    return _BlockTraces(full_trace, block_trace, matches, blocks, len(layout.trained)).stream()


class _BlockTraces(NamedTuple):
    """The traces of the update of all blocks and of one block; see `Stream`.

    Attributes:
      full: the trace of the update.
      block: the trace of the update of a model of one block.
      matches: variable of `full` -> variable of `block`.
      blocks: the number of blocks.
      num_updates: the number of results that are updates; the others are the new state.
    """

    full: Trace
    block: Trace
    matches: dict[jex.Var, jex.Var]
    blocks: int
    num_updates: int

    def dim(self, atom: Atom) -> int | None:
        """Return the dim that counts blocks; None if there is none."""
        is_literal = isinstance(atom, jex.Literal)
        return None if is_literal else block_dim(atom, self.matches, self.blocks)

    def of_blocks(self, atoms: Sequence[Atom]) -> list[int]:
        """Return the indices of the values that count blocks."""
        return [i for i, atom in enumerate(atoms) if self.dim(atom) is not None]

    def is_stacked(self, variable: jex.Var) -> bool:
        """Return whether dim 0 counts blocks."""
        return self.dim(variable) == 0 and shape_of(self.matches[variable])[0] == 1

    def without_blocks(self) -> set[jex.Var]:
        """Return the inputs and the results of equations that do not count blocks."""
        results = [var for eqn in self.full.jaxpr.eqns for var in eqn.outvars]
        return {x for x in (*self.full.jaxpr.invars, *results) if self.dim(x) is None}

    def is_streamable(self, outputs: list[jex.Var], state: list[int]) -> bool:
        """Return whether some state counts blocks, before and after the update, along dim 0."""
        jaxpr = self.full.jaxpr
        old_state = self.of_blocks(jaxpr.invars[self.num_updates : len(jaxpr.outvars)])
        return bool(state) and state == old_state and all(map(self.is_stacked, outputs))

    def stream(self) -> Stream | None:
        """Return the stream; None if blocks cannot be updated one at a time."""
        count = self.num_updates
        invars = self.full.jaxpr.invars
        outvars = self.full.jaxpr.outvars
        updates = self.of_blocks(outvars[:count])
        state = self.of_blocks(outvars[count:])
        loop_indices = [*updates, *(count + i for i in state)]
        loop_outputs = variables_of(outvars[i] for i in loop_indices)
        if not self.is_streamable(loop_outputs, state):
            return None
        without_blocks = self.without_blocks()
        equations, inputs = slice_of(self.full, loop_outputs, stop={*invars, *without_blocks})
        shared_inputs = [var for var in inputs if var in without_blocks]
        other_results = [x for i, x in enumerate(outvars) if i not in loop_indices]
        _, read_before_loop = slice_of(
            self.full, [*shared_inputs, *other_results], stop=set(invars)
        )
        # A norm over the state itself would need all of it on the device before the loop begins.
        state_is_read = {invars[count + i] for i in state} & set(read_before_loop)
        if state_is_read or not self.is_blockwise(equations):
            return None
        return Stream(
            self.full,
            self.block,
            self.matches,
            equations,
            [var for var in inputs if var not in without_blocks],
            shared_inputs,
            updates,
            state,
            self.blocks,
        )

    def is_blockwise(self, equations: set[int]) -> bool:
        """Return whether equations do the same to every block."""
        full, block = (
            [trace.jaxpr.eqns[i] for i in sorted(equations)] for trace in (self.full, self.block)
        )
        return is_blockwise(full, block, self.matches, self.blocks)


def _loop(
    stream: Stream,
    values: dict[jex.Var, jax.Array],
    shardings_on_device: dict[jex.Var, NamedSharding],
    starts: Arrays,
    host_state: Arrays,
    outputs: Sequence[jex.Var],
) -> Arrays:
    """Return the updates, in the memory of `starts`, and the new state in host memory, after a loop
    over the blocks.
    """
    # The carry is the updates, then the streamed state.
    state_index = dict(
        zip(shardings_on_device, range(len(starts), len(starts) + len(host_state)), strict=True)
    )
    # The program of a model with one block. Its blocks are stacks [1, ...], as `take` cuts them.
    part = part_of(
        stream.block_trace,
        stream.equations,
        [stream.matches[var] for var in (*stream.block_inputs, *stream.shared_inputs)],
        [stream.matches[var] for var in outputs],
    )
    shared_values = [values[var] for var in stream.shared_inputs]

    def block(i: jax.Array, carried: Arrays) -> Arrays:
        def take(x):
            return jax.lax.dynamic_slice_in_dim(x, i, 1, 0)

        args = [
            (
                jax.device_put(take(carried[state_index[var]]), shardings_on_device[var])
                if var in state_index
                else take(values[var])
            )
            for var in stream.block_inputs
        ]
        new = part(*args, *shared_values)
        new_host_state = [
            jax.device_put(x, sharding.with_memory_kind(HOST))
            for x, sharding in zip(new[len(starts) :], shardings_on_device.values(), strict=True)
        ]

        def put(x, block_value):
            return jax.lax.dynamic_update_slice_in_dim(x, block_value, i, 0)

        return [
            put(x, block_value)
            for x, block_value in zip(carried, [*new[: len(starts)], *new_host_state], strict=True)
        ]

    return jax.lax.fori_loop(0, stream.blocks, block, [*starts, *host_state])


def _start_like(grad: jax.Array, update: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the gradient if an update has its shape and dtype, so that the update takes its
    memory; else zeros.
    """
    fits = (grad.shape, grad.dtype) == (update.shape, update.dtype)
    return grad if fits else jnp.zeros(update.shape, update.dtype)
