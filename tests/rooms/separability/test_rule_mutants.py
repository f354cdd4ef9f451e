"""Mutants of rules die by cases of these rules, so what `benchmarks/rule_mutants.py` counts is real."""

import itertools

import pytest
from support.rule_mutants import FILES, Bench, mutants, row_mutants


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("select_n", "_elementwise: never `operands[0].ratio != 1`"),
        ("cond", "cond: a mark lost in `as_drawn`"),
        ("jit", "_row_maximum: without `isinstance(operand, Same | Split)`"),
        ("sub", "row: WRAPPING -sub"),
    ],
)
def test_a_mutant_of_a_rule_dies_by_cases_of_the_rule(rule, change):
    rows = [mutant for mutant, _, _ in row_mutants()]
    (mutant,) = [x for x in itertools.chain(rows, *map(mutants, FILES)) if change in x.name]
    assert Bench([rule]).fate(mutant) in ("unsound", "error")
