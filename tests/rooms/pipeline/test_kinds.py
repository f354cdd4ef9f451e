"""The record of a schedule's kind says what its table shows."""

import inspect
from typing import get_args

import numpy as np
import pytest

from shardopt.cli._options import ScheduleName
from shardopt.pipeline import Schedule, schedules
from shardopt.pipeline._kinds import KINDS

pytestmark = pytest.mark.fast

MAKERS = {"Schedule", "balance", "from_order", "from_ticks", "send_ahead"}


def schedule_of(name: str) -> Schedule:
    return getattr(schedules, name)(4, 8)


def test_every_schedule_has_a_kind():
    assert set(KINDS) == set(schedules.__all__) - MAKERS
    assert set(get_args(ScheduleName)) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_the_kind_of_the_table(name):
    kind = KINDS[name]
    schedule = schedule_of(name)
    assert schedule.num_chunks == kind.chunks
    assert (
        "num_chunks" in inspect.signature(getattr(schedules, name)).parameters
    ) == kind.takes_chunks
    stage_of = list(schedule.ticks.stage_of)
    assert (kind.chunks == 2 and stage_of == stage_of[::-1]) == kind.on_a_v


@pytest.mark.parametrize("name", KINDS)
def test_stages_in_lockstep_run_one_kind_of_pass_in_a_tick(name):
    """If both kinds run in a tick, every stage that is not idle runs both: no stage waits for
    another kind of work.
    """
    table = schedule_of(name).table()
    forward, backward = (table[f"{kind}_micro_batch"] >= 0 for kind in ("forward", "backward"))
    half_busy = np.any(forward & ~backward, axis=1) & np.any(backward & ~forward, axis=1)
    assert KINDS[name].in_lockstep == (not half_busy.any())
