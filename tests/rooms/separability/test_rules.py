"""Each rule of the proof, tested alone: the concrete results of its primitive are what it answers.

`support/relation_meaning.py` says what a relation means, `support/rule_cases/` draws the cases.
"""

import numpy as np
import pytest
from support.relation_meaning import check_rule, primitives_of
from support.rule_cases import CASES
from support.tiers import tiered

from shardopt.separability._relations import Unrelated
from shardopt.separability._table import TABLE
from shardopt.separability._walk import CALLS, CUSTOM
from shardopt.trace._jaxprs import COLLECTIVES

FEW, MANY, MOST = 10, 400, 60
"""The number of cases of a rule in the default tier, and in the slow one. So many cases are tried
until the rule knows the result of one.
"""
LOOPS = {"scan", "while", "cond", "custom_linear_solve"}
UNTESTED = set(
    """acos acosh add_any all_gather_invariant all_gather_reduced all_to_all asin asinh atan
    atanh axis_index bessel_i0e bessel_i1e bitcast_convert_type ceil checkpoint closed_call clz
    complex conj cos cosh debug_callback debug_print device_put digamma
    dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper eq_to erf erf_inv erfc
    exp2 expand_dims expm1 igamma igamma_grad_a igammac imag iota layout_constraint le_to
    lgamma log1p log2 logistic lt_to name not one_minus_square optimization_barrier pbroadcast
    pgather pjit platform_index polygamma polynomial population_count ppermute psum2
    psum_invariant psum_scatter pvary ragged_all_to_all random_bits random_clone random_fold_in
    random_seed random_split random_unwrap random_wrap real reduce_scatter
    regularized_incomplete_beta reshard round sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sinh tan unreduced_psum unvmap_all unvmap_any
    zeta""".split()  # noqa: SIM905
)
"""Rules without a property test, to be emptied."""
ALIKE = set(
    """argmin cbrt copy cummin cumprod eig eigh ge gt le lu lu_pivots_to_permutation qr reduce_and
    reduce_min reduce_window_min svd""".split()  # noqa: SIM905
)
"""Primitives with the rule of another one, which are slow tests."""
UNSOUND: set[str] = set()
"""Rules that are known to answer wrongly, to be emptied."""


def run(name, cases):
    draws, known = CASES[name], 0
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
    assert rules - set(CASES) == UNTESTED


@pytest.mark.fast
@pytest.mark.parametrize("name", CASES)
def test_the_cases_of_a_rule_bind_its_primitive(name):
    for draw in CASES[name]:
        assert any(name in primitives_of(draw(np.random.default_rng(seed))) for seed in range(5))
