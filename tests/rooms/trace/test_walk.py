"""The walk: values of operands reach the results of a trace through calls, branches and loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardopt.trace._jaxprs import cost_of
from shardopt.trace._parts import product_flops, reached_from
from shardopt.trace._walk import Walk, scan_parts, while_parts

pytestmark = pytest.mark.fast
VECTOR = jnp.ones(3)
NUMBER = jnp.ones(())
NOWHERE = frozenset()
DIFFERENT = frozenset(["different"])


def names_reaching(walk, eqns, operands):
    """Return for each result the arguments that it follows from."""
    if eqns[0].primitive.name == "scan":
        carry, stacked = walk.loop(
            [eqn.params["jaxpr"] for eqn in eqns], *scan_parts(eqns[0], operands)
        )
        return [*carry, *stacked]
    if eqns[0].primitive.name == "while":
        _, consts, carry = while_parts(eqns[0], operands)
        return walk.loop([eqn.params["body_jaxpr"] for eqn in eqns], consts, carry)[0]
    if eqns[0].primitive.name == "cond":
        return walk.branches(eqns, operands[1:])
    called = walk.call(eqns, operands)
    return [NOWHERE.union(*operands)] * len(eqns[0].outvars) if called is None else called


def of_values(values):
    return NOWHERE if all(np.array_equal(values[0], other) for other in values) else DIFFERENT


WALK = Walk(names_reaching, of_values, of_values, DIFFERENT, frozenset.union)


def follow(*traces):
    names = [frozenset([name]) for name in "abcd"[: len(traces[0].jaxpr.invars)]]
    return ["".join(sorted(names)) for names in WALK.follow(traces, names)]


def loop_of_while(a, b):
    return jax.lax.while_loop(
        lambda carry: carry[0].sum() < 9, lambda carry: (carry[1] + b, carry[0]), (a, a)
    )


CASES = {
    "call": (lambda a, b: jax.jit(lambda x, y: (y, x + 1))(a, b), ["b", "a"]),
    "custom rule": (lambda a, b: (jax.nn.relu(a), b), ["a", "b"]),
    "branches": (lambda a, b: jax.lax.cond(b.sum() > 0, lambda: a, lambda: a * b), ["ab"]),
    "scan": (lambda a, b: jax.lax.scan(lambda carry, x: (carry + x, x), b, a), ["ab", "a"]),
    "two turns": (
        lambda a, b, c: jax.lax.scan(lambda xs, _: ((*xs[1:], xs[2]), None), (a, b, c), length=3)[
            0
        ][0],
        ["abc"],
    ),
    "while": (loop_of_while, ["ab", "ab"]),
    "constant": (lambda a: (a * np.arange(3.0), jnp.ones(3)), ["a", ""]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_traces", [1, 2])
def test_values_reach_results(case, num_traces):
    f, expected = CASES[case]
    args = [VECTOR] * f.__code__.co_argcount
    traces = [jax.make_jaxpr(functools.partial(f))(*args) for _ in range(num_traces)]
    assert follow(*traces) == expected


def test_differences_of_traces_are_followed():
    def traced(f):
        return jax.make_jaxpr(f)(VECTOR, VECTOR)

    base_trace = traced(lambda a, b: (a + b, a * 2.0))
    assert (
        WALK.follow([base_trace, traced(lambda a, b: (a - b, a * 2.0))], [NOWHERE, NOWHERE])
        == [DIFFERENT] * 2
    )
    other_variable = traced(lambda a, b: (a + b, b * 2.0))
    other_number = traced(lambda a, b: (a + b, a * 3.0))
    for other in (other_variable, other_number):
        assert WALK.follow([base_trace, other], [NOWHERE, NOWHERE]) == [NOWHERE, DIFFERENT]


def test_loops_cost_each_turn_and_branches_the_most():
    def product(x):
        return x @ x

    def f(x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: product(x), x)
        return jax.lax.cond(x[0, 0] > 0, product, lambda x: jax.jit(product)(product(x)), x)

    def flops(eqn):
        return product_flops(eqn) if eqn.primitive.name == "dot_general" else None

    assert (
        sum(cost_of(eqn, flops) for eqn in jax.make_jaxpr(f)(jnp.ones((4, 4))).eqns)
        == (3 + 2) * 2 * 4**3
    )


def test_variables_are_reached_from_any_or_only_from_all_inputs():
    jaxpr = jax.make_jaxpr(lambda a, b: (a + 1.0, a * b))(NUMBER, NUMBER).jaxpr
    (plus, times), a = jaxpr.outvars, jaxpr.invars[0]
    assert reached_from(jaxpr, [a], every=True) == {a, plus}
    assert reached_from(jaxpr, [a], every=False) == {a, plus, times}
