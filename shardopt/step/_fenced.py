"""Programs with the same bits wherever they run: XLA fuses nothing outside of them with their numbers,
and finds equal operations merged.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._slots import OptimizerUpdate
from shardopt.config._transformation import ExtraArgs
from shardopt.core import Arrays, PyTree, is_key, with_leaves
from shardopt.trace._jaxprs import jaxpr_params, nested_equations, shape_of
from shardopt.trace._parts import inlined, part_of, slice_of, trace_of
from shardopt.trace._primitives import ELEMENTWISE

_MOVES = frozenset(["broadcast_in_dim", "cond", "jit", "reshape", "squeeze", "transpose"])
"""Primitives that compute no number."""


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
        values = dict(zip(inputs, jax.tree.leaves(arguments), strict=True))
        # Before each turn `values` has the arguments and all combined values so far. Each of these
        # is computed once, on whole arrays, and the elementwise rest below reads it as a constant.
        for eqn in filter(_combines, trace.jaxpr.eqns):
            equations, sources = slice_of(trace, eqn.outvars, stop={*values})
            if sources:
                combine = part_of(trace, equations, sources, eqn.outvars)
                numbers = fenced_on_each(config, combine, [values[var] for var in sources])
                values |= dict(zip(eqn.outvars, numbers, strict=True))
        by_element, read = slice_of(trace, results, stop={*values})
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
    # True of every number; NaN makes the last part true.
    always = (number < 0) | (number >= 0) | (number != number)
    program, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    run = jaxpr_as_fun(_merged(program))

    def never(*leaves):
        return [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]

    return with_leaves(shapes, jax.lax.cond(always, run, never, *leaves))


def fenced_on_each(config: StrategyConfig, f: Callable[..., PyTree], arrays: Arrays) -> PyTree:
    """Return `f(*arrays)` as a program of its own, which each device runs on whole arrays.

    Operands and results are whole, so that the partitioner divides no sum and no product.
    """
    replicated = shardings(config.mesh, PartitionSpec())
    arrays = jax.lax.with_sharding_constraint(arrays, replicated)
    return jax.lax.with_sharding_constraint(fenced(f, *arrays), replicated)


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
