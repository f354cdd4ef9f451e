"""Each primitive of the list of elementwise primitives exists in this jax. Its result for some
elements does not depend on the other elements.
"""

import gc
import itertools

import jax
import jax.extend.core.primitives as jax_primitives
import jax.numpy as jnp
import numpy as np

from shardopt.separability import _elementwise as elementwise
from shardopt.trace._primitives import ARITHMETIC, DECOMPOSITIONS, ELEMENTWISE, SPECIAL

lax = jax.lax
LATER = {"log2", "one_minus_square", "polynomial"}
"""Of jax 0.12."""
BY_NAME = {
    getattr(jax_primitives, name).name: getattr(jax_primitives, name)
    for name in dir(jax_primitives)
    if name.endswith("_p")
}
CALLS = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
    "regularized_incomplete_beta": lax.betainc,
    "clamp": lambda x, y: lax.clamp(0.3 * y, x, 0.9 * y),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "convert_element_type": lambda x: lax.convert_element_type(8 * x, jnp.int32),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 3),
    "polynomial": lambda x, y: lax.polynomial(x, [y, 2 * y, y]),
    "select_n": lambda x, y: lax.select_n(x > 0.5, x, y),
    "copy": jnp.copy,
    "name": lambda x: jax.ad_checkpoint.checkpoint_name(x, "x"),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(
        x, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
}
FLOATS = np.array([0.2, 0.5, 0.5, 0.8, 1.0, 2.0, 2.6, -0.35, np.inf], np.float32)
KINDS = [
    FLOATS,
    np.array([1, 5, 9, 200, 3000, 70000, 2, 2, 0], np.int32),
    np.array([1, 5j, 1 + 2j, 3, 4j, -1, -2j, 0, 1j], np.complex64),
]
SOME = np.array([5, 2, 7, 5, 5, 0, 1, 1, 8])
"""Where the elements of a part come from; some do not."""


def call_of(name):
    return CALLS.get(name) or getattr(lax, name, None) or BY_NAME[name].bind


def operands_of(name):
    """Return operands for which the call traces to the primitive."""
    for kind, count in itertools.product(KINDS, (1, 2, 3)):
        operands = [np.roll(kind, i) for i in range(count)]
        try:
            jaxpr = jax.make_jaxpr(call_of(name))(*operands)
        except (TypeError, ValueError, AssertionError):
            continue
        if name in {eqn.primitive.name for eqn in jaxpr.eqns}:
            return operands
    raise AssertionError(name)


def test_all_are_primitives_of_this_jax():
    names = {
        primitive.name
        for primitive in gc.get_objects()
        if isinstance(primitive, jax.extend.core.Primitive)
    }
    assert not (ELEMENTWISE | DECOMPOSITIONS) - names - LATER


def test_a_part_is_made_as_the_whole_is():
    names = sorted(ELEMENTWISE.intersection(BY_NAME))
    operands_by_name = {name: operands_of(name) for name in names}
    run = jax.jit(
        lambda operands_by_name: {
            name: call_of(name)(*operands) for name, operands in operands_by_name.items()
        }
    )
    whole_results = run(operands_by_name)
    part = run({name: [x[SOME] for x in operands] for name, operands in operands_by_name.items()})
    for name in names:
        assert whole_results[name].shape == FLOATS.shape, name
        np.testing.assert_allclose(part[name], whole_results[name][SOME], rtol=1e-5, err_msg=name)
    moves = {name: [x[::-1] for x in operands] for name, operands in operands_by_name.items()}
    blind = [
        name
        for name, moved in run(moves).items()
        if np.array_equal(moved, whole_results[name], equal_nan=True)
    ]
    assert not blind  # to where an element is


def test_every_list_is_of_these():
    assert not ARITHMETIC & SPECIAL
    assert elementwise.LINEAR | elementwise.ADDITIVE <= ELEMENTWISE
