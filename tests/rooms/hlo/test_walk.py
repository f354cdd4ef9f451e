"""Trip counts: written down, followed, or honestly unknown."""

import pytest

from shardopt.hlo._hlo_text import parse
from shardopt.hlo._walk import collectives_of, trip_count

pytestmark = pytest.mark.fast

LOOP = """HloModule m

%step (param_0: s32[], param_1: s32[]) -> s32[] {{
  %param_0 = s32[] parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %sum = s32[] add(%param_1, %param_0)
}}

%test (param_0: s32[], param_1: s32[]) -> pred[] {{
  %param_0 = s32[] parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %less = pred[] compare(%param_0, %param_1), direction={direction}
}}

%body (state: (f32[4], s32[])) -> (f32[4], s32[]) {{
  %state = (f32[4]{{0}}, s32[]) parameter(0)
  %value = f32[4]{{0}} get-tuple-element(%state), index=0
  %counter = s32[] get-tuple-element(%state), index=1
  %copied = s32[] copy(%counter)
  %one = s32[]{{:T(128)}} constant({step})
  %next = {next}
  ROOT %out = (f32[4]{{0}}, s32[]) tuple(%value, %next)
}}

%condition (state: (f32[4], s32[])) -> pred[] {{
  %state = (f32[4]{{0}}, s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=1
  %limit = s32[] constant({limit})
  ROOT %go = {go}
}}

ENTRY %main (p: f32[4]) -> (f32[4], s32[]) {{
  %p = f32[4]{{0}} parameter(0)
  %zero = s32[] constant({start})
  %from = s32[] copy(%zero)
  %initial = (f32[4]{{0}}, s32[]) tuple(%p, %from)
  ROOT %loop = (f32[4]{{0}}, s32[]) while(%initial), condition=%condition, body=%body{known}
}}
"""
PLAIN = {
    "start": "0",
    "step": "1",
    "limit": "7",
    "direction": "LT",
    "known": "",
    "next": "s32[] add(%copied, %one)",
    "go": "pred[] compare(%counter, %limit), direction=LT",
}


def count(**changes):
    module = parse(LOOP.format(**{**PLAIN, **changes}))
    return trip_count(module, "main", module.computations["main"][-1])


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({}, 7),
        ({"start": "1"}, 6),
        ({"step": "2"}, 4),
        ({"limit": "0"}, 0),
        ({"go": "pred[] compare(%counter, %limit), direction=LE"}, 8),
        ({"go": "pred[] compare(%limit, %counter), direction=GT"}, 7),
        (
            {
                "start": "9",
                "step": "-1",
                "limit": "2",
                "go": "pred[] compare(%counter, %limit), direction=GT",
            },
            7,
        ),
        (
            {
                "start": "9",
                "step": "-1",
                "limit": "2",
                "go": "pred[] compare(%counter, %limit), direction=GE",
            },
            8,
        ),
        ({"next": "s32[] fusion(%copied, %one), kind=kLoop, calls=%step"}, 7),
        ({"go": "pred[] fusion(%counter, %limit), kind=kLoop, calls=%test"}, 7),
        ({"next": "s32[] call(%copied, %one), to_apply=%step"}, 7),
        # what XLA wrote down is believed
        ({"known": ', backend_config={"known_trip_count":{"n":"12"}}'}, 12),
        ({"known": ', backend_config="{\\"known_trip_count\\":{\\"n\\":\\"12\\"}}"'}, 12),
    ],
)
def test_conditions_give_trip_counts(changes, trips):
    assert count(**changes) == trips


@pytest.mark.parametrize(
    "changes",
    [
        {"next": "s32[] multiply(%copied, %one)"},
        {"next": "s32[] add(%copied, %copied)"},
        {"go": "pred[] compare(%counter, %counter), direction=LT"},
        {"go": "pred[] compare(%counter, %limit), direction=NE"},
        {"step": "0"},
        {"step": "-1"},  # away from the limit
        {"start": "[]"},
    ],
)
def test_what_cannot_be_followed_is_unknown(changes):
    assert count(**changes) is None


CARRIED = """HloModule m

%body (state: (s32[], s32[])) -> (s32[], s32[]) {{
  %state = (s32[], s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  %end = s32[] get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%counter, %one)
  ROOT %out = (s32[], s32[]) tuple(%next, {end})
}}

%condition (state: (s32[], s32[])) -> pred[] {{
  %state = (s32[], s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  %end = s32[] get-tuple-element(%state), index=1
  ROOT %go = pred[] compare(%counter, %end), direction={direction}
}}

%end_of (x: s32[]) -> s32[] {{
  %x = s32[] parameter(0)
  %most = s32[] constant({most})
  %one = s32[] constant(1)
  %min = s32[] {function}(%x, %most)
  ROOT %add = s32[] add(%min, %one)
}}

ENTRY %main (p: s32[]) -> (s32[], s32[]) {{
  %p = s32[] parameter(0)
  %zero = s32[] constant(0)
  %bound = s32[] fusion(%p), kind=kLoop, calls=%end_of
  %initial = (s32[], s32[]) tuple({start}, %bound)
  ROOT %loop = (s32[], s32[]) while(%initial), condition=%condition, body=%body
}}
"""
AT_MOST_ONCE = {
    "end": "%end",
    "direction": "LT",
    "most": "0",
    "function": "minimum",
    "start": "%zero",
}


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({}, 1),
        ({"most": "1"}, None),  # once or twice
        ({"direction": "LE"}, None),
        ({"direction": "GT"}, None),
        ({"function": "maximum"}, None),
        ({"end": "%next"}, None),  # the end moves
        ({"start": "%bound"}, None),
        ({"start": "%p"}, None),
    ],
)
def test_a_loop_that_turns_once_at_the_most_turns_once(changes, trips):
    module = parse(CARRIED.format(**AT_MOST_ONCE | changes))
    assert trip_count(module, "main", module.computations["main"][-1]) == trips


def test_a_start_that_is_an_input_is_unknown():
    module = parse(
        LOOP.format(**PLAIN).replace("%from = s32[] copy(%zero)", "%from = s32[] parameter(1)")
    )
    assert trip_count(module, "main", module.computations["main"][-1]) is None


@pytest.mark.parametrize("start", ["call-start", "custom-call-start"])
def test_what_runs_on_the_sparse_core_is_asynchronous(start):
    text = f"""HloModule m, num_partitions=4

%on_core (p: f32[8]) -> f32[32] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %gathered = f32[32]{{0}} all-gather(%p), channel_id=1, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
}}, execution_thread="sparsecore"

ENTRY %main (p: f32[8]) -> f32[32] {{
  %p = f32[8]{{0}} parameter(0)
  %start = ((f32[8]{{0}}), f32[32]{{0}}, u32[]) {start}(%p), async_execution_thread="sparsecore", called_computations={{%on_core}}
  ROOT %done = f32[32]{{0}} call-done(%start)
}}
"""
    (collective,) = collectives_of(parse(text))
    assert (collective.kind, collective.asynchronous) == ("all-gather", True)
