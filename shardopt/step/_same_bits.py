"""A step with the same bits on every mesh: rows run in tiles, and sums have one order.

Rows of the global batch are cut into tiles of `tile_rows`. The program of a tile is the same on
every mesh. Gradients of tiles are added in a binary tree, which depends on the number of tiles
alone: each device adds the tiles that it holds, then shards are exchanged, and the devices' sums are
added in the upper part of the tree.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from shardopt.config._axes import AxisTable
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._slots import OptimizerUpdate, StepInputs, StepSlots
from shardopt.config._transformation import ExtraArgs
from shardopt.core import (
    PyTree,
    Weighted,
    calling,
    is_key,
    value_error,
    wide_zeros,
    widened,
    with_leaves,
)
from shardopt.core._loss_parts import LossParts
from shardopt.losses._batch_dims import num_rows
from shardopt.losses._loss import loss_of_rows, step_key
from shardopt.losses._metrics import combined, factor, objective
from shardopt.losses._per_row import row_numbers
from shardopt.losses._sums import cut, scale, sum_parts
from shardopt.reducers._axis import all_gather_packed, all_to_all_packed
from shardopt.reducers._mean import in_buckets
from shardopt.step._gradients import ExactSum, MicroBatches, PerDeviceView
from shardopt.trace._jaxprs import jaxpr_params, nested_equations, shape_of
from shardopt.trace._parts import inlined, part_of, slice_of, trace_of
from shardopt.trace._primitives import ELEMENTWISE

_MOVES = frozenset(["broadcast_in_dim", "cond", "jit", "reshape", "squeeze", "transpose"])
"""Primitives that compute no number."""


def same_bits(config: StrategyConfig, slots: StepSlots) -> StepSlots:
    """Return the slots of a strategy with those filled that decide the order of sums.

    Raises:
      ValueError: if the bits would depend on the mesh.
    """
    _check(config)
    return slots._replace(
        differentiate={"per_device": PerDeviceView(Tiles(), sum_tiles)},
        reduce=lambda config, trained: TreeSum(),
        update=FencedUpdate(slots.update),
    )


def _check(config: StrategyConfig) -> None:
    """Refuse a strategy whose bits would depend on the mesh."""
    sizes = config.mesh_shape
    cutting = [
        axis for axis in ("tensor", "pipeline", "context", "expert") if sizes.get(axis, 1) > 1
    ]
    shares = config.axes.num_all_row_shares
    refused = {
        f"mesh axis {', '.join(map(repr, cutting))} cuts sums inside of a tile": bool(cutting),
        f"{shares} devices hold rows, and a tree of two branches needs 1, 2, 4, 8, ...": bool(
            shares & (shares - 1)
        ),
        "a pipeline has another order of sums": config.schedule is not None,
        "the partitioner orders the sums of view='global'": config.loss.view == "global",
        "replicas that train apart have another sum on each mesh": config.per_replica,
        "a cross-check adds the bits of each device's own gradient": config.sums,
        "gradients of sharded parameters are summed as they are gathered": config.placement.params,
    }
    problems = [problem for problem, holds in refused.items() if holds]
    if problems:
        fix = "use ddp or zero on a mesh with the axes data and replica; or leave tile_rows out."
        with calling(config.strategy):
            raise value_error(
                "exact(tile_rows=...) cannot give the same bits on every mesh.", problems, fix
            )


class Tiles(MicroBatches):
    """The `DeviceLoss` of a device that differentiates one tile after another."""

    def gradients(
        self, config: StrategyConfig, layout: Layout, inputs: StepInputs
    ) -> tuple[list[jax.Array], LossParts]:
        """Return the sums of gradients over the tiles of this device, and loss parts [tiles, ...]."""
        return _Tiles(config, layout, inputs).gradients()

    def losses(self, config: StrategyConfig, layout: Layout, inputs: StepInputs) -> LossParts:
        """Return the loss parts of the tiles of this device, [tiles, ...]."""
        return _not_differentiated(_Tiles(config, layout, inputs).losses)(inputs.params)


@dataclasses.dataclass(frozen=True, eq=False)
class _Tiles:
    """The tiles of one device in one step."""

    config: StrategyConfig
    layout: Layout
    inputs: StepInputs

    def gradients(self) -> tuple[list[jax.Array], LossParts]:
        # combinators and cross-checks change the config of a strategy that was checked
        _check(self.config)
        params = self.inputs.params
        trained = self.layout.trained_leaves(params)
        weights = None
        if isinstance(jax.eval_shape(self.losses, params).loss.weight, tuple):
            weights = sum_tiles(self.losses(params), self.config.axes).loss.weight

        def loss_of(trained, tile, key):
            merged = self.layout.merge(params, trained)
            parts = loss_of_rows(self.config, self.layout, merged, tile, key)
            # Not divided by the number of devices: small gradients would be rounded.
            return objective(parts.loss, 1, weights), parts

        def run(index):
            grads, parts = self.run(jax.grad(loss_of, has_aux=True), trained, index)
            return [widened(grad) for grad in grads], parts

        return _sum_tree(run, wide_zeros(trained), self.count, 0)

    def losses(self, params: list[jax.Array]) -> LossParts:
        tree = self.layout.treedef.unflatten(params)

        def loss_of(tree, tile, key):
            return loss_of_rows(self.config, self.layout, tree, tile, key)

        return jax.lax.map(
            functools.partial(self.run, loss_of, tree), jnp.arange(self.count, dtype=jnp.int32)
        )

    @property
    def rows(self) -> int:
        assert self.config.loss.tile_rows is not None
        return self.config.loss.tile_rows

    @property
    def count(self) -> int:
        return num_rows(self.config, self.inputs.batch) // self.rows

    def run(self, f: Callable[..., Any], params: PyTree, index: jax.Array) -> PyTree:
        """Return `f(params, tile, key)` of a tile of this device, as a program of its own."""
        config = self.config
        inputs = self.inputs
        leaves, assemble = cut(config, inputs.batch, self.count)
        tile = assemble([jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in leaves])
        number = jax.lax.axis_index(config.axes.rows) * self.count + index

        def numbers():
            return row_numbers(0, number, 1, self.rows)

        key = step_key(config, inputs.step, inputs.rng, number, 0, row_numbers=numbers)
        return fenced(f, params, tile, key)


def _not_differentiated(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the function, for optimizers that only evaluate the loss of a batch."""
    f = jax.custom_jvp(f)

    @f.defjvp
    def refuse(primals, tangents):
        problem = "the optimizer differentiates the loss itself, which does not add up in one tree."
        raise value_error(problem, fix="use another optimizer, or leave tile_rows out.")

    return f


def _sum_tree(
    run: Callable[[jax.Array], tuple[PyTree, PyTree]], zeros: PyTree, count: int, first: Any
) -> tuple[PyTree, PyTree]:
    """Return the sum of the first results of `run(first)`, ..., `run(first + count - 1)` in a
    binary tree, and the other results stacked [count, ...].

    An odd number of tiles at the bottom of the tree is added one after another.
    """
    if count == 1:
        total, parts = run(first)
        return total, jax.tree.map(lambda x: x[None], parts)
    branches = 2 if count % 2 == 0 else count
    size = count // branches

    def add(total, branch):
        part, parts = _sum_tree(run, zeros, size, first + branch * size)
        # not 0 + part, which changes -0
        return jax.tree.map(lambda x, y: jnp.where(branch == 0, y, x + y), total, part), parts

    total, parts = jax.lax.scan(add, zeros, jnp.arange(branches, dtype=jnp.int32))
    return total, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), parts)


def _sum_pairs(rows: jax.Array) -> jax.Array:
    """Return the sum of rows in a binary tree; further rows of 0 would not change it."""
    while rows.shape[0] > 1:
        if rows.shape[0] % 2:
            rows = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def sum_tiles(parts: LossParts, axes: AxisTable) -> LossParts:
    """Add parts [tiles of this device, ...] up over all tiles, which every device gathers."""

    def add(metric: Any) -> Any:
        # -0 + 0 is 0, so -0 would show how many zeros were added
        return combined(
            metric,
            lambda x: _sum_pairs(jnp.where(x == 0, jnp.zeros_like(x), x))[None],
            _as_is,
            _as_is,
        )

    def sum_all(parts):
        metrics = {name: add(metric) for name, metric in parts.metrics.items()}
        parts = LossParts(add(parts.loss), metrics, parts.updates)
        return sum_parts(parts, axes._replace(summed=()))

    return fenced(
        sum_all, jax.tree.map(lambda x: jax.lax.all_gather(x, axes.rows, tiled=True), parts)
    )


def _as_is(x: jax.Array) -> jax.Array:
    return x


class TreeSum(ExactSum):
    """The `Reduce` that adds the sums of devices in the upper part of the tree.

    An all-to-all and an all-gather send as many bytes as an all-reduce.
    """

    def grad_specs(self, config: StrategyConfig, layout: Layout) -> list[PartitionSpec]:
        """Return that each device has whole gradients, whose norm has one order."""
        return [plan.data_spec(sharded=False) for plan in layout.trained]

    def __call__(
        self,
        config: StrategyConfig,
        layout: Layout,
        grads: list[jax.Array],
        loss: Weighted,
        state: PyTree,
        stored_order: Callable[[list[jax.Array]], list[jax.Array]],
    ) -> tuple[list[jax.Array], PyTree]:
        """Return the gradients of the union batch; there is no state."""
        axes = config.axes.rows
        devices = config.axes.num_row_shares

        def sum_flat(flat, _):
            shards = jnp.pad(flat, (0, -flat.size % devices)).reshape(devices, -1)
            (received,) = all_to_all_packed([shards], axes)
            (sums,) = all_gather_packed([_sum_pairs(received)[None]], axes)
            return sums.reshape(-1)[: flat.size], flat

        sums, _ = in_buckets(grads, [grad.dtype for grad in grads], sum_flat)
        remaining_factor = factor(loss, 1)
        return [
            scale(grad, remaining_factor).astype(plan.dtype)
            for grad, plan in zip(sums, layout.trained, strict=True)
        ], state


@dataclasses.dataclass(frozen=True)
class FencedUpdate:
    """An update as two programs of their own, which fuse with no sum: it fills the slot `update`.

    The first computes the values that combine elements, such as norms, from whole arrays. The second
    computes each element by itself, so devices may hold shards of it.
    """

    update: OptimizerUpdate

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

        def run(grads, opt_state, params):
            return self.update(config, layout, grads, opt_state, params, extra_args)

        arguments = grads, opt_state, params
        program, shapes = jax.make_jaxpr(run, return_shape=True)(*arguments)
        trace = trace_of(_merged(program))
        inputs = trace.jaxpr.invars
        results = trace.jaxpr.outvars
        mixed = {var for eqn in trace.jaxpr.eqns if _combines(eqn) for var in eqn.outvars}
        by_element, read = slice_of(trace, results, stop={*inputs, *mixed})
        norms = [var for var in read if var in mixed]
        of_norms, sources = slice_of(trace, norms, stop=set(inputs))
        values = dict(zip(inputs, jax.tree.leaves(arguments), strict=True))
        whole_arrays = [values[var] for var in sources]
        if config.placement.opt_state:
            if not set(sources) <= set(inputs[: len(layout.trained)]):
                problem = "the update combines elements of optimizer state or parameters."
                with calling(config.strategy):
                    raise value_error(problem, fix="use ddp, or leave tile_rows out.")
            replicated = shardings(config.mesh, PartitionSpec())
            whole_arrays = [jax.lax.with_sharding_constraint(x, replicated) for x in whole_arrays]
        if norms:
            numbers = fenced(part_of(trace, of_norms, sources, norms), *whole_arrays)
            values |= dict(zip(norms, numbers, strict=True))
        shards = [values[var] for var in read]
        return with_leaves(shapes, fenced(part_of(trace, by_element, read, results), *shards))

    def describe(self, config: StrategyConfig, layout: Layout) -> None:
        """Return None: nothing is divided between owners."""


def _combines(eqn: JaxprEqn) -> bool:
    """Return whether a result of an equation depends on several elements of an operand."""
    return not {inner.primitive.name for inner in nested_equations(eqn)} <= ELEMENTWISE | _MOVES


def fenced(f: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Return `f(*args)` as a program of its own: XLA fuses nothing outside of it with its numbers.

    XLA:CPU drops an `optimization_barrier` before it fuses, and inlines a loop of one turn. It
    keeps a branch of a condition that it does not know.
    """
    leaves = jax.tree.leaves(args)
    numbers = [x for x in leaves if not is_key(x) and x.size]
    number = jnp.real(min(numbers, key=jnp.size).reshape(-1)[0])
    always = (number < 0) | (number >= 0) | (number != number)
    program, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    run = jaxpr_as_fun(_merged(program))

    def never(*leaves):
        return [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]

    return with_leaves(shapes, jax.lax.cond(always, run, never, *leaves))


def _merged(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program with inner functions inlined, and equal operations merged.

    XLA merges them before it simplifies on several devices, and later on one device. It turns
    quotients by the same number into products if they are merged by then.
    """
    program = jax.make_jaxpr(lambda *args: inlined(program.jaxpr, program.consts, args))(
        *program.in_avals
    )
    first_names = {}
    first_results = {}
    equations = []

    def name(atom):
        return atom if isinstance(atom, Literal) else first_names.get(atom, atom)

    for eqn in itertools.chain.from_iterable(map(_with_broadcast, program.jaxpr.eqns)):
        params = jax.tree.map(lambda x: _merged(x) if isinstance(x, ClosedJaxpr) else x, eqn.params)
        operands = [name(atom) for atom in eqn.invars]
        eqn = eqn.replace(invars=operands, params=params)
        texts = [str((x.aval, x.val)) if isinstance(x, Literal) else x for x in operands]
        key = eqn.primitive, str(params), *texts
        if eqn.effects or jaxpr_params(eqn) or key not in first_results:
            first_results[key] = eqn.outvars
            equations.append(eqn)
        else:
            first_names |= dict(zip(eqn.outvars, first_results[key], strict=True))
    results = [name(atom) for atom in program.jaxpr.outvars]
    return ClosedJaxpr(program.jaxpr.replace(eqns=equations, outvars=results), program.consts)


def _with_broadcast(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Return an equation; of a quotient by a scalar, the broadcast that lowering adds, and it."""
    if eqn.primitive is not jax.lax.div_p:
        return [eqn]
    numerator, divisor = eqn.invars
    shape = shape_of(eqn.outvars[0])
    if not shape or shape_of(divisor) or isinstance(divisor, Literal):
        return [eqn]
    (broadcast,) = jax.make_jaxpr(lambda x: jax.lax.broadcast(x, shape))(divisor.aval).jaxpr.eqns
    broadcast = broadcast.replace(invars=[divisor])
    return [broadcast, eqn.replace(invars=[numerator, *broadcast.outvars])]
