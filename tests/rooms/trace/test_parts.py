"""Our reading of a trace does not depend on where its variables lie in memory: programs of two
processes are the same.
"""

import jax
import jax.numpy as jnp

from shardopt.trace._parts import inputs_of


def test_inputs_come_in_the_order_of_the_equation():
    joined = jax.make_jaxpr(lambda *xs: jnp.concatenate([*xs, xs[0]]))(*[jnp.zeros(2)] * 20)
    eqn = joined.eqns[-1]
    assert list(inputs_of(eqn)) == joined.jaxpr.invars
