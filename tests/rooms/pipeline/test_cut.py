"""How blocks are cut into virtual stages: the busiest has least to do, and every block lies where
it runs.
"""

import itertools

import numpy as np
import pytest
from support.pipelines import SCHEDULES

import shardopt as so
from shardopt.partition._counts import is_even
from shardopt.pipeline._cut import cut_blocks, first_blocks, stage_rows

pytestmark = pytest.mark.fast


def busiest(counts, embedding, head):
    load = np.asarray(counts, float)
    load[0] += embedding
    load[-1] += head
    return load.max()


@pytest.mark.parametrize(("blocks", "parts"), [(1, 1), (7, 2), (5, 3), (8, 4), (3, 4)])
@pytest.mark.parametrize(("embedding", "head"), [(0.0, 0.0), (0.5, 2.4), (3.0, 0.2), (9.0, 9.0)])
def test_no_cut_has_a_less_busy_part(blocks, parts, embedding, head):
    counts = so.schedules.balance(blocks, parts, embedding=embedding, head=head)
    every = (c for c in itertools.product(range(blocks + 1), repeat=parts) if sum(c) == blocks)
    assert sum(counts) == blocks
    assert busiest(counts, embedding, head) == min(busiest(c, embedding, head) for c in every)


def test_parts_are_equal_where_they_can_be():
    assert so.schedules.balance(12, 4) == (3, 3, 3, 3)
    assert is_even(cut_blocks(so.schedules.interleaved(2, 4), 8, None))
    assert cut_blocks(so.schedules.zero_bubble_v(2, 3), 7, None) == (1, 2, 2, 2)


@pytest.mark.parametrize("counts", [(2, 0, 3, 1), (1, 1, 1, 4), (2, 2, 2, 2)])
@pytest.mark.parametrize("name", ["interleaved", "zero_bubble_v"])
def test_every_block_lies_where_it_runs(name, counts):
    schedule = SCHEDULES[name](2, 4)
    rows, places = stage_rows(schedule, counts)
    k = max(counts)
    firsts = first_blocks(counts)
    flat = np.asarray(rows).reshape(-1)
    assert flat[places].tolist() == list(range(sum(counts)))
    for v, (stage, chunk) in enumerate(
        zip(schedule.ticks.stage_of, schedule.ticks.chunk_of, strict=True)
    ):
        mine = rows[stage][chunk * k : chunk * k + counts[v]]
        assert mine == list(range(firsts[v], firsts[v] + counts[v]))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 2), {}, ValueError, "balance: sizes must be at least 1, got num_blocks=0."),
        ((4, 2.0), {}, TypeError, "balance: sizes must be integers, got num_parts=2.0 (float)."),
        ((4, 2), {"head": -1.0}, ValueError, "balance: head must be finite, at least 0; got -1.0."),
    ],
)
def test_bad_input_is_refused(arguments, options, error, message):
    with pytest.raises(error) as caught:
        so.schedules.balance(*arguments, **options)
    assert str(caught.value) == message
