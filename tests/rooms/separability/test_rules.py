"""Each rule of the proof is tested alone: the concrete results of its primitive have the relations
that it answers.

`support/relation_meaning.py` gives relations their meaning, `support/rule_cases/` draws the cases.
"""

import numpy as np
import pytest
from support.relation_meaning import check_rule, primitives_of
from support.rule_cases import CASES
from support.rule_cases.elementwise import UNARY
from support.tiers import tiered

from shardopt.separability._loops import CALLS
from shardopt.separability._relations import Unrelated
from shardopt.separability._table import TABLE
from shardopt.separability._walk import CUSTOM
from shardopt.trace._primitives import defined_primitives

FEW = 10
MANY = 400
MOST = 60
"""The number of cases of a rule in the default tier, and in the slow one. So many cases are tried
until the rule knows the result of one.
"""
LOOPS = {"scan", "while", "cond", "custom_linear_solve"}
COLLECTIVES = {"psum", "pmax", "pmin", "all_gather", "ppermute"}
"""The collectives that the proof follows."""
ALIKE = (
    set(
        """argmin cbrt copy cummin cumprod eig eigh ge gt le lu lu_pivots_to_permutation qr reduce_and
    reduce_min reduce_window_min svd complex conj debug_print eq_to imag layout_constraint le_to lt_to real
    reshard""".split()  # noqa: SIM905
    )
    | set(UNARY[1:])
)
"""Primitives with the rule of another one, which are slow tests."""
UNSOUND: set[str] = set()
"""Rules that are known to answer wrongly, to be emptied."""


def run(name, cases):
    draws = CASES[name]
    known = 0
    for seed in range(max(cases, MOST)):
        if seed >= cases and known:
            break
        rng = np.random.default_rng(seed)
        case = draws[seed % len(draws)](rng)
        relations = check_rule(case, rng)
        known += any(not isinstance(relation, Unrelated) for relation in relations)
    return known


@pytest.mark.parametrize(
    "name", tiered(sorted(set(CASES) - UNSOUND), lambda name: name not in ALIKE)
)
def test_results_are_in_the_meaning_of_what_a_rule_answers(name):
    assert run(name, FEW) > 0  # or the test shows nothing


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_results_are_in_the_meaning_of_what_a_rule_answers_in_many_cases(name):
    run(name, MANY)


@pytest.mark.fast
def test_each_rule_has_a_property_test():
    rules = {*TABLE, *CALLS, *CUSTOM, *COLLECTIVES, *LOOPS}
    of_this_release = {primitive.name for primitive in defined_primitives()}
    assert (rules & of_this_release) <= set(CASES)


@pytest.mark.fast
@pytest.mark.parametrize("name", CASES)
def test_the_cases_of_a_rule_bind_its_primitive(name):
    for draw in CASES[name]:
        assert any(name in primitives_of(draw(np.random.default_rng(seed))) for seed in range(5))
