"""Updates of shards have the bits of an update of whole arrays, in the code that users have."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from support.flags import OPTIMISED

from shardopt.step import _fenced as fenced

DRAW = np.random.default_rng(0)
GRAD, MOMENT = (DRAW.normal(size=1024).astype(np.float32) for _ in range(2))
# XLA:CPU of jax 0.12 adds products with one rounding in (1024,), and with two in some of the others
SHAPES = [(4, 8), (4, 7), (4, 5), (3,), (4, 8, 1, 4, 8), (1,), (1, 1)]


def moments_of(shapes, update):
    """Return the flat results of an update of leaves of these shapes."""

    def leaves_of(x):
        return [x[: math.prod(shape)].reshape(shape) for shape in shapes]

    def update_leaves(grad, moment, norm):
        def update_all(config, layout, grads, state, params, extra_args):
            return [update(*leaves, norm) for leaves in zip(grads, state, strict=True)], params

        config = None  # norms and other combined values alone ask for it
        opt_state = leaves_of(moment)
        fenced_update = fenced.FencedUpdate(update_all)
        return fenced_update(config, None, leaves_of(grad), opt_state, norm, None)[0]

    updates = jax.jit(update_leaves, compiler_options=OPTIMISED)(GRAD, MOMENT, np.float32(3))
    return [np.asarray(x).reshape(-1) for x in updates]


def decayed(grad, moment, norm):
    return 0.1 * grad + 0.9 * moment


def squared(grad, moment, norm):
    return 0.9 * moment + grad**2


def normalised(grad, moment, norm):
    """XLA turns quotients by one number into products, but not of arrays of one element."""
    return moment / norm + grad / norm


@pytest.mark.parametrize("update", [decayed, squared, normalised])
def test_shards_of_any_shape_have_the_bits_of_the_whole_array(update):
    expected = moments_of([(1024,)], update)[0]
    for shape, shard in zip(SHAPES, moments_of(SHAPES, update), strict=True):
        assert shard.tobytes() == expected[: shard.size].tobytes(), shape


def test_products_in_branches_are_rounded():
    jaxpr = jax.make_jaxpr(lambda skip, *xs: jax.lax.cond(skip, lambda g, m, _: m, decayed, *xs))(
        False, GRAD, MOMENT, 0.0
    )

    def run(skip, zero, *xs):
        return fenced._with_rounded_products(jaxpr.jaxpr, jaxpr.consts, zero, skip, *xs)

    text = str(jax.make_jaxpr(run)(False, np.int32(0), GRAD, MOMENT, 0.0))
    assert text.count("xor") == 2
    expected = np.float32(0.1) * GRAD + np.float32(0.9) * MOMENT
    (decayed_moment,) = jax.jit(run, compiler_options=OPTIMISED)(
        False, np.int32(0), GRAD, MOMENT, 0.0
    )
    assert np.asarray(decayed_moment).tobytes() == expected.tobytes()


CASES = {
    "product": (lambda x: x * 2, False),
    "square root": (jnp.sqrt, False),
    "polynomial": (jnp.exp, True),
    "sum": (jnp.sum, True),
    "complex product": (lambda x: (x + 1j) * 2j, True),
    "schedule": (lambda x: jnp.cos(x[0, 0]) * x, False),
    "polynomial in a branch": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.tanh, jnp.abs, x), True),
    "product in a branch": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.square, jnp.abs, x), False),
}
MOVES = {"slice", "squeeze", "dynamic_slice", "gather"}


@pytest.mark.fast
@pytest.mark.parametrize("case", CASES)
def test_values_whose_bits_depend_on_the_shape_are_computed_from_whole_arrays(case):
    function, combines = CASES[case]
    equations = jax.make_jaxpr(lambda x: function(x))(GRAD.reshape(32, 32)).jaxpr.eqns
    equations = [eqn for eqn in equations if eqn.primitive.name not in MOVES]
    assert any(map(fenced._combines, equations)) == combines


def test_a_primitive_that_is_not_known_is_computed_from_whole_arrays():
    primitive = Primitive("of_a_user")
    primitive.def_abstract_eval(lambda x: x)
    (eqn,) = jax.make_jaxpr(primitive.bind)(GRAD).jaxpr.eqns
    assert fenced._combines(eqn)
