"""No random program is accepted that plain jax finds to be no mean over rows; and most of those that are means are accepted."""

from typing import NamedTuple

import pytest
from support.piecewise import compare, proved
from support.random_losses import random_loss

CHUNK, QUICK, MANY = 60, 240, 10_000
LEAST_SHARE = 0.5
"""The least share of separable programs that the proof accepts."""


class Tally(NamedTuple):
    """What became of some programs."""

    separable: int
    accepted: int
    unsound: list[str]


def tally(seeds: range) -> Tally:
    separable, accepted, unsound = 0, 0, []
    for seed in seeds:
        program = random_loss(seed)
        given = program.loss_fn, program.params, program.batch, program.pieces
        is_accepted, comparison = proved(*given), compare(*given)
        separable += comparison.separable
        accepted += comparison.separable and is_accepted
        if is_accepted and not comparison.separable and not comparison.undecided:
            unsound.append(f"{program}{comparison}")
    return Tally(separable, accepted, unsound)


def judge(seeds: range, capsys: pytest.CaptureFixture) -> None:
    result = tally(seeds)
    with capsys.disabled():
        share = f"{result.accepted} of {result.separable} separable programs are accepted, of {len(seeds)} in all"
        print(f"\nseeds {seeds.start} to {seeds.stop - 1}: {share}; {len(result.unsound)} unsound")
    assert not result.unsound, "\n".join([f"{len(result.unsound)} accepted that are no means:", *result.unsound])
    assert len(seeds) * 0.35 < result.separable < len(seeds) * 0.85
    assert result.accepted >= LEAST_SHARE * result.separable


@pytest.mark.parametrize("start", range(0, QUICK, CHUNK))
def test_programs(start, capsys):
    judge(range(start, start + CHUNK), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(QUICK, QUICK + MANY, 500))
def test_ten_thousand_programs(start, capsys):
    judge(range(start, start + 500), capsys)


@pytest.mark.fast
def test_a_seed_is_one_program():
    first, again = random_loss(7), random_loss(7)
    assert str(first) == str(again)
    assert len({random_loss(seed).source for seed in range(20)}) > 18
