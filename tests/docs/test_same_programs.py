"""The comparison of compiled programs: equal records pass, and every sort of difference is found
and told.
"""

import json
import sys

import pytest
from support.scripts import imported

SUM = {
    "kind": "all-reduce",
    "axes": ["replica", "data"],
    "bytes": 64,
    "calls": 1,
    "in_loop": False,
    "in_branch": False,
    "count": 2,
}
PERMUTE = {
    "kind": "collective-permute",
    "axes": None,
    "bytes": 8,
    "calls": 5,
    "in_loop": True,
    "in_branch": True,
}
PROGRAM = {
    "argument_bytes": 100,
    "output_bytes": 90,
    "alias_bytes": 80,
    "temp_bytes": 70,
    "flops": 1e3,
    "collectives": [SUM, PERMUTE | {"count": 1}],
}
RECORD = {
    "versions": {"jax": "1", "jaxlib": "1", "optax": "1", "python": "3"},
    "results": {"programs": {"ddp: step": PROGRAM, "fsdp: step": PROGRAM}},
}


@pytest.fixture
def script():
    with imported("same_programs") as module:
        yield module


def again(record):
    """Return the record as it would be read from its file."""
    return json.loads(json.dumps(record))


def changed(edit):
    """Return the record with one program changed."""
    record = again(RECORD)
    edit(record["results"]["programs"])
    return record


def test_equal_records_are_the_same(script, capsys):
    assert script.compare(RECORD, again(RECORD)) == 0
    assert capsys.readouterr().out == "2 programs, all the same\n"


def test_the_order_of_collectives_does_not_count(script):
    assert (
        script.compare(
            RECORD,
            changed(
                lambda programs_by_name: programs_by_name["ddp: step"]["collectives"].reverse()
            ),
        )
        == 0
    )


@pytest.mark.parametrize(
    "field", ["argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "flops"]
)
def test_another_number_is_a_difference(script, capsys, field):
    assert (
        script.compare(
            RECORD,
            changed(lambda programs_by_name: programs_by_name["ddp: step"].update({field: 1})),
        )
        == 1
    )
    output = capsys.readouterr().out
    assert output == f"ddp: step\n    {field}  {PROGRAM[field]} -> 1\n\n1 of 2 programs differ\n"


@pytest.mark.parametrize(
    "other",
    [{key: value} for key, value in PERMUTE.items() if key != "calls"]
    + [{"bytes": 65}, {"count": 3}],
    ids=str,
)
def test_another_collective_is_a_difference(script, other):
    after = changed(
        lambda programs_by_name: programs_by_name["ddp: step"]["collectives"][0].update(other)
    )
    assert {name for name, *_ in script.differences(*programs(RECORD, after))} == {"ddp: step"}


def test_a_collective_that_is_gone_and_one_in_its_place_are_told(script, capsys):
    def edit(programs_by_name):
        programs_by_name["fsdp: step"]["collectives"][1] = PERMUTE | {"calls": 6, "count": 1}

    assert script.compare(RECORD, changed(edit)) == 1
    assert capsys.readouterr().out.splitlines()[:3] == [
        "fsdp: step",
        "    collective-permute over mixed of 8 bytes, 5 calls in loops, in a branch  1 -> -",
        "    collective-permute over mixed of 8 bytes, 6 calls in loops, in a branch  - -> 1",
    ]


@pytest.mark.parametrize("swap", [False, True])
def test_a_program_that_only_one_record_has_is_a_difference(script, swap):
    pair = [RECORD, changed(lambda programs_by_name: programs_by_name.pop("ddp: step"))]
    expected = [("ddp: step", "the program", "there", None)]
    if swap:
        pair = pair[::-1]
        expected = [("ddp: step", "the program", None, "there")]
    assert script.differences(*programs(*pair)) == expected
    assert script.compare(*pair) == 1
    assert script.compare(*pair, only="fsdp") == 0


def test_records_of_other_versions_are_not_compared(script):
    other = RECORD | {"versions": RECORD["versions"] | {"jaxlib": "2"}}
    with pytest.raises(SystemExit, match="jaxlib 1 and of jaxlib 2"):
        script.compare(RECORD, other)
    assert script.compare(RECORD, RECORD | {"versions": RECORD["versions"] | {"python": "4"}}) == 0


def test_nothing_is_not_the_same(script):
    with pytest.raises(SystemExit, match="no programs"):
        script.compare(RECORD, RECORD, only="no such program")


def test_two_files_are_compared(script, tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("before.json", "after.json")]
    for path, record in zip(
        paths,
        (RECORD, changed(lambda programs_by_name: programs_by_name["ddp: step"].update(flops=1))),
        strict=True,
    ):
        path.write_text(json.dumps(record))
    for other, code in ((paths[0], 0), (paths[1], 1)):
        monkeypatch.setattr(
            sys, "argv", ["same_programs.py", "--compare", str(paths[0]), str(other)]
        )
        assert script.main() == code


def test_every_row_has_a_name_of_its_own(script):
    rows = list(script.all_rows())
    assert len({row.name for row in rows}) == len(rows) > 90


@pytest.mark.slow  # a script that is run by hand
def test_a_compiled_program_tells_what_it_sends_and_holds(script):
    row = next(
        row for row in script.all_rows() if row.name == "diloco of ddp, replica=2 data=4, blocks"
    )
    programs_by_name = dict(script.programs_of(row))
    assert set(programs_by_name) == {f"{row.name}: step {step}" for step in (0, 1)}
    over = [
        {tuple(collective["axes"]) for collective in program["collectives"]}
        for program in programs_by_name.values()
    ]
    assert ("replica",) not in over[0]
    assert ("replica",) in over[1]
    for program in programs_by_name.values():
        assert min(value for name, value in program.items() if name != "collectives") > 0
        assert program["output_bytes"] >= program["alias_bytes"]


def programs(*records):
    return [record["results"]["programs"] for record in records]
