"""Programs with the same bits wherever they run: XLA fuses nothing outside of them with their numbers,
and finds equal operations merged. Each operation on shards has one right result, whatever their shape.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._slots import OptimizerUpdate
from shardopt.config._transformation import ExtraArgs
from shardopt.core import Arrays, PyTree, is_key, with_leaves
from shardopt.trace._jaxprs import jaxpr_params, nested_equations, shape_of
from shardopt.trace._parts import (
    abstract_value,
    inlined,
    jaxpr_of_part,
    part_of,
    slice_of,
    trace_of,
)
from shardopt.trace._primitives import ELEMENTWISE, IDENTITIES, words

_MOVES = words("broadcast_in_dim cond reshape squeeze transpose")
"""Primitives that compute no number."""

_PRODUCTS = words("div integer_pow mul rsqrt sqrt square")
"""Primitives that are products, or may be compiled to products."""

_EXACT = (
    _PRODUCTS
    | IDENTITIES
    | words(
        "abs add add_any and bitcast_convert_type ceil clamp clz convert_element_type eq eq_to floor ge gt"
        " is_finite le le_to lt lt_to max min ne neg nextafter not or population_count reduce_precision rem"
        " round select_n shift_left shift_right_arithmetic shift_right_logical sign sub xor"
    )
)
"""Primitives that have one right result for each element, alone or next to others.

Others, such as `exp`, are polynomials. Their last digit depends on how a loop is vectorised.
"""


@dataclasses.dataclass(frozen=True)
class FencedUpdate:
    """An update as two programs of their own, which fuse with no sum: it fills the slot `update`.

    The first computes the values that combine elements, such as norms, from whole arrays. The second
    computes each element by itself, with one right result, so devices may hold shards of it.
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
        elementwise = jaxpr_of_part(trace, by_element, read, results)
        # XLA cannot know that this is 0
        zero = jnp.where(_always(shards), 0, 1)

        def run_shards(*shards):
            return _with_rounded_products(elementwise, trace.consts, zero, *shards)

        return with_leaves(shapes, fenced(run_shards, *shards))

    def describe(self, config: StrategyConfig, layout: Layout) -> None:
        """Return None: nothing is divided between owners."""


def _combines(eqn: JaxprEqn) -> bool:
    """Return whether a result of an equation, or of one inside of it, depends on several elements of
    an operand, or on how the loop over elements is compiled.
    """
    return not all(map(_is_alike_in_all_shapes, nested_equations(eqn)))


def _is_alike_in_all_shapes(eqn: JaxprEqn) -> bool:
    """Return whether each element has the same bits in arrays of any shape."""
    name = eqn.primitive.name
    values = list(map(abstract_value, (*eqn.invars, *eqn.outvars)))
    if all(value.shape == () for value in values):
        return name in ELEMENTWISE | _MOVES
    # a complex product is a sum of products
    is_complex = any(jnp.issubdtype(value.dtype, jnp.complexfloating) for value in values)
    return name in _MOVES or (name in _EXACT and not is_complex)


def _with_rounded_products(
    jaxpr: Jaxpr, consts: Sequence[jax.Array], zero: jax.Array, *args: jax.Array
) -> Arrays:
    """Evaluate a jaxpr whose products are rounded before they are added.

    Else `a * b + c` becomes one instruction, rounded once, in loops of some shapes. An exclusive or
    with a zero that the compiler does not know changes no bit, and keeps the product apart.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        if eqn.primitive is jax.lax.div_p:
            # XLA turns quotients by one number into products, but not of a shard of one element. So
            # each element gets a divisor of its own.
            numerator, divisor = map(jnp.asarray, operands)
            operands = [numerator, jnp.where(_zeros(numerator, zero) == 0, divisor, 1)]
        if eqn.primitive is jax.lax.cond_p:
            branches = [
                functools.partial(_with_rounded_products, branch.jaxpr, branch.consts, zero)
                for branch in eqn.params["branches"]
            ]
            results = jax.lax.switch(operands[0], branches, *operands[1:])
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        if eqn.primitive.name in _PRODUCTS:
            results = [_kept_apart(x, zero) for x in results]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _kept_apart(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Return x, and hide from the compiler how it was computed."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.bitcast_convert_type(_bits(x) ^ _zeros(x, zero), x.dtype)


def _zeros(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Return integers that are 0, one for each element of x."""
    bits = _bits(x)
    return bits & zero.astype(bits.dtype)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def fenced(f: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Return `f(*args)` as a program of its own: XLA fuses nothing outside of it with its numbers.

    XLA:CPU drops an `optimization_barrier` before it fuses, and inlines a loop of one turn. It
    keeps a branch of a condition that it does not know.
    """
    leaves = jax.tree.leaves(args)
    program, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    run = jaxpr_as_fun(_merged(program))

    def never(*leaves):
        return [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]

    return with_leaves(shapes, jax.lax.cond(_always(leaves), run, never, *leaves))


def _always(leaves: Arrays) -> jax.Array:
    """Return True, which XLA cannot know."""
    numbers = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
    shortest = min((x for x in numbers if x.size), key=jnp.size)
    # XLA knows that an unsigned integer is not below 0
    number = jnp.real(shortest.reshape(-1)[0]).astype(jnp.float32)
    # NaN makes the last part true
    return (number < 0) | (number >= 0) | (number != number)


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

    for eqn in itertools.chain.from_iterable(map(_opened_quotient, program.jaxpr.eqns)):
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


def _opened_quotient(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Return an equation; instead of a quotient by a smaller array, the equations that compute it.

    Lowering broadcasts one number to the shape of the result. Here the broadcast is an equation, which
    can be merged. XLA turns some quotients by a number of each row or column into products with the
    inverse, and others on other meshes. Here all of them are such products.
    """
    if eqn.primitive is not jax.lax.div_p:
        return [eqn]
    shape = shape_of(eqn.outvars[0])
    divisor = eqn.invars[1]
    if shape_of(divisor) == shape or isinstance(divisor, Literal):
        return [eqn]
    has_inverses = shape_of(divisor) and jnp.issubdtype(abstract_value(divisor).dtype, jnp.inexact)

    def in_shape(y):
        return jax.lax.broadcast_in_dim(y, shape, range(y.ndim))

    def quotient(x, y):
        return x * in_shape(1 / y) if has_inverses else x / in_shape(y)

    program = jax.make_jaxpr(quotient)(*(atom.aval for atom in eqn.invars)).jaxpr
    names = dict(zip(program.invars, eqn.invars, strict=True))
    equations = [
        line.replace(invars=[x if isinstance(x, Literal) else names.get(x, x) for x in line.invars])
        for line in program.eqns
    ]
    return [*equations[:-1], equations[-1].replace(outvars=eqn.outvars)]
