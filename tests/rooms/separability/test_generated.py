"""No random program is accepted that plain jax finds to be no mean over rows.

Most programs that are means are accepted.

Plain jax judges every accepted program. It judges a sample of the others, because compiling both
sides of a program takes forty times as long as the proof. The share of accepted means is estimated
from this sample."""

from typing import NamedTuple

import pytest
from support.piecewise import compare, proved
from support.random_losses import random_loss
from support.tiers import tiered

QUICK = 200
MANY = 10_000
LEAST_SHARE = 0.5
"""The least share of separable programs that the proof accepts."""
ENOUGH = 500
"""Of fewer programs the sample of refused ones says little of the share."""


class Tally(NamedTuple):
    """What became of some programs.

    Attributes:
      programs: how many there were.
      accepted: how many of them the proof accepts.
      separable: how many of them are means over rows, as estimated from the sample of refused ones.
      unsound: the programs that are accepted, but are no means.
    """

    programs: int
    accepted: int
    separable: int
    unsound: list[str]


def tally(seeds: range, sample: int) -> Tally:
    """Judge programs; each `sample`-th program that the proof refuses is compared."""
    accepted = 0
    refused = 0
    refused_means = 0
    unsound = []
    for seed in seeds:
        program = random_loss(seed)
        arguments = program.loss_fn, program.params, program.batch, program.pieces
        if proved(*arguments):
            accepted += 1
            comparison = compare(*arguments)
            if comparison.differs:
                comparison = compare(*arguments, jit=False)
            if comparison.differs:
                unsound.append(f"{program}{comparison}")
        else:
            refused += 1
            if refused % sample == 0:
                refused_means += compare(*arguments).separable
    return Tally(len(seeds), accepted, accepted - len(unsound) + sample * refused_means, unsound)


def judge(seeds: range, sample: int, capsys: pytest.CaptureFixture) -> None:
    result = tally(seeds, sample)
    with capsys.disabled():
        share = (
            f"{result.accepted} of about {result.separable} separable programs are accepted, of"
            f" {result.programs}"
        )
        print(f"\nseeds {seeds.start} to {seeds.stop - 1}: {share}; {len(result.unsound)} unsound")
    assert not result.unsound, "\n".join(
        [f"{len(result.unsound)} accepted that are no means:", *result.unsound]
    )
    assert result.programs * 0.25 < result.accepted < result.programs * 0.75
    if result.programs >= ENOUGH:
        assert result.accepted >= LEAST_SHARE * result.separable


@pytest.mark.parametrize(
    ("start", "count"),
    tiered(
        [(10, 10), *((start, 50) for start in range(0, QUICK, 50))], lambda row: row == (10, 10)
    ),
)
def test_no_random_program_that_is_accepted_is_unsound(start, count, capsys):
    judge(range(start, start + count), 5, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(QUICK, QUICK + MANY, 500))
def test_none_of_ten_thousand_accepted_programs_is_unsound(start, capsys):
    judge(range(start, start + 500), 10, capsys)


@pytest.mark.fast
def test_a_seed_is_one_program():
    first = random_loss(7)
    duplicate = random_loss(7)
    assert str(first) == str(duplicate)
    assert len({random_loss(seed).source for seed in range(20)}) > 18
