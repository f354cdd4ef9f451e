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

FEW, MANY = 10, 400
"""The number of cases of a rule in the default tier, and in the slow one."""
LOOPS = {"scan", "while", "cond", "custom_linear_solve"}
UNTESTED = set(
    """acos acosh add_any all_gather_invariant all_gather_reduced all_to_all argmax argmin
    asin asinh atan atanh axis_index bessel_i0e bessel_i1e bitcast_convert_type
    broadcast_in_dim ceil checkpoint cholesky closed_call clz complex concatenate
    conj conv_general_dilated cos cosh cumlogsumexp cummax cummin cumprod
    cumsum debug_callback debug_print device_put digamma dot_general dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper
    dynamic_slice dynamic_update_slice eig eigh eq_to erf erf_inv erfc
    exp2 expand_dims expm1 fft gather geqp3 geqrf hessenberg
    householder_product igamma igamma_grad_a igammac imag iota layout_constraint le_to
    lgamma log1p log2 logistic lt_to lu lu_pivots_to_permutation name
    not one_minus_square optimization_barrier ormqr pad pbroadcast pgather pjit
    platform_index polygamma polynomial population_count ppermute psum2 psum_invariant psum_scatter
    pvary qr ragged_all_to_all random_bits random_clone random_fold_in random_seed random_split
    random_unwrap random_wrap real reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_scatter reduce_sum reduce_window_max reduce_window_min reduce_window_sum reduce_xor regularized_incomplete_beta reshape
    reshard rev round scatter scatter-add scatter_max scatter_min scatter_mul
    scatter_sub schur select_and_gather_add sharding_constraint shift_left shift_right_arithmetic shift_right_logical sinh
    slice sort split squeeze stack svd symmetric_product tan
    tile top_k transpose triangular_solve tridiagonal tridiagonal_solve unreduced_psum unstack
    unvmap_all unvmap_any zeta""".split()  # noqa: SIM905
)
"""Rules without a property test, to be emptied."""
UNSOUND: set[str] = {
    "add",
    "sub",
    "mul",
    "and",
    "or",
    "neg",
    "integer_pow",
    "convert_element_type",
    "reduce_precision",
}
"""Rules that are known to answer wrongly, to be emptied."""


def run(name, cases):
    draws, known = CASES[name], 0
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        case = draws[seed % len(draws)](rng)
        relations = check_rule(case, rng)
        known += any(not isinstance(relation, Unrelated) for relation in relations)
    return known


@pytest.mark.parametrize("name", tiered(sorted(set(CASES) - UNSOUND), lambda name: True))
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
        assert name in primitives_of(draw(np.random.default_rng(0)))
