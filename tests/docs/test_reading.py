"""How the code reads stays within the limits of CONTRIBUTING.md, which `.ci/run` checks."""

import pytest
from support.scripts import imported

with imported("reading", ".ci") as reading, imported("limits", ".ci") as ci_limits:
    pass

PLAIN = '''
def double(number):
    """Return twice the number."""
    return 2 * number
'''
HARD = '''
def double(found, rest):
    """Return what is told."""
    if (one := found) is not None:
        return one
    one, two = rest, found
    print(one)
    return two
'''


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    trees = {}
    for name, source in {"plain": PLAIN, "hard": HARD}.items():
        trees[name] = tmp_path_factory.mktemp(name)
        (trees[name] / "code.py").write_text(source)
    counted = {name: reading.counts(str(tree)) for name, tree in trees.items()}
    return {
        name: {row.partition(": ")[2]: number for row, number in counts.items()}
        for name, counts in counted.items()
    }


def test_code_that_is_hard_to_read_counts_more_and_plain_code_nothing(numbers):
    assert set(numbers["plain"].values()) == {0}
    assert numbers["hard"]["vague names in 1,000 lines"] == 500  # found, rest, and twice one
    assert numbers["hard"]["odd sentences in 100"] == 100
    assert numbers["hard"]["golf in 1,000 lines"] == 250  # the walrus and the pair


def test_each_number_of_each_tree_has_a_limit_and_one_above_it_is_named(numbers):
    limits = ci_limits.limits_of("How it reads")
    rows = [f"`{tree}`: {name}" for tree in reading.TREES for name in numbers["plain"]]
    assert list(limits) == rows
    assert ci_limits.above_limit(limits, limits) == []
    assert ci_limits.above_limit(limits | {rows[0]: limits[rows[0]] + 0.1}, limits) == [rows[0]]
    assert ci_limits.above_limit({"new": 0.0}, limits) == ["new"]
