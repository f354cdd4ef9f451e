"""What `leaves_used` says that results follow from, against plain jax; and functions of two relations."""

import pytest
from support import dependence, lattice

pytestmark = pytest.mark.fast


def test_a_result_follows_from_the_arguments_that_change_it_or_that_it_has_a_gradient_of():
    assert not list(dependence.problems(dependence.answers()))


def test_the_first_use_of_an_argument_is_the_first_operation_that_computes_with_it():
    said = dependence.answers()
    assert dependence.first_uses(said, "a call") == [{1: "mul"}, {2: "mul"}]
    assert dependence.first_uses(said, "an argument") == [{2: None}, {0: None}]
    assert dependence.first_uses(said, "a checkpoint") == [{0: "sin", 2: "mul"}]


@pytest.mark.parametrize("function", lattice.CHECKS)
def test_values_of_a_relation_have_the_relation_that_is_said_to_follow(function):
    assert not lattice.problems(function)
