"""`benchmarks/beside_maxtext.py` without a compiler: rows, comparisons, the table and the picture."""

import json

import pytest
from support.paths import ROOT
from support.scripts import imported

pytestmark = pytest.mark.fast


@pytest.fixture
def script():
    with imported("beside_maxtext") as module:
        yield module


def program(seconds, gigabytes):
    memory = {"arguments": 1e9, "outputs": 2e9, "temporary": (gigabytes - 1) * 1e9, "aliased": 2e9}
    return {
        "seconds": seconds,
        "compute": 0.9 * seconds,
        "exposed": 0.1 * seconds,
        "memory": memory,
    }


def test_rows_have_names_of_their_own(script):
    rows = (*script.TABLE, *script.MORE)
    assert len({row.name for row in rows}) == len(rows)
    assert script.TABLE[-1].name == "llama3-8b v5p:4x4x4 4096 x 1 tensor=4"
    assert script.TABLE[-1].chips == 64


def test_both_choose_from_one_list(script):
    ours, maxtext_choices = (
        script.choices(contender, script.TABLE[0]) for contender in script.CONTENDERS
    )
    assert ours.items() <= maxtext_choices.items()
    assert set(maxtext_choices) == set(script.Choice._fields) - {"collective_matmul"}
    # each begins with its own default, and tries the other's
    tensor = script.Row("v5p:4x4x4", 4096, 1, tensor=4)
    assert [
        script.choices(contender, tensor)["collective_matmul"] for contender in script.CONTENDERS
    ] == [
        (True,),
        (False,),
    ]
    tried = []
    script.search("shardopt", tensor, lambda choice: tried.append(choice) or {})
    assert {choice.collective_matmul for choice in tried[:-1]} == {False}
    assert tried[-1].collective_matmul
    assert script.choices("maxtext", script.Row("v6e:8x8", 2048, 1))["vmem"] == (48, 120)


def test_both_begin_with_the_memory_that_compiler_options_allow(script):
    for topology, mebibytes in (("v5p:4x4x4", 48), ("v5e:16x16", 48), ("v6e:8x8", 96)):
        for contender in script.CONTENDERS:
            tried = []
            script.search(
                contender,
                script.Row(topology, 2048, 1),
                lambda choice, tried=tried: tried.append(choice) or {},
            )
            assert tried[0] == script.Choice(fused=contender == "shardopt", vmem=mebibytes)
            assert str(tried[0]).endswith(f", {mebibytes} MiB")


def test_the_search_takes_the_fastest_value_of_each_field(script):
    tried = []

    def run(choice):
        tried.append(choice)
        if choice.vmem == 60:
            return {"error": "does not fit"}
        return {"seconds": 9 - choice.fused - 2 * (choice.block == 1024) + (choice.remat != "full")}

    script.search("maxtext", script.TABLE[0], run)
    best = script.Choice(fused=True, block=1024)
    assert tried == [
        script.Choice(),
        script.Choice(fused=True),
        best,
        *[best._replace(remat=remat) for remat in ("attention", "projections", "products")],
        best._replace(tiles=4),
        best._replace(vmem=60),
    ]
    assert script.Choice.of("attention,4,1024,True,48,True") == best._replace(
        remat="attention", tiles=4
    )
    assert (
        script.Choice.of("full,1,1024,True,48,False").xla_options[script.COLLECTIVE_MATMUL]
        == 1_000_000
    )


def test_the_claim_is_one_over_the_other(script):
    ours = program(0.9, 6) | {
        "commit": "abc1234",
        "scheduled": 1.2,
        "choice": script.Choice(fused=True)._asdict(),
    }
    programs = {
        "shardopt": ours,
        "maxtext": program(1.0, 5) | {"scheduled": 1.5, "choice": script.Choice()._asdict()},
        "tried": {"shardopt": {"a": 1, "b": 2}, "maxtext": {"a": 1}},
    }
    claim = {"ratio": 0.9, "memory_ratio": 6 / 5, "scheduled_ratio": 0.8}
    assert script.compared(programs) == pytest.approx(claim)
    assert script.compared({"shardopt": program(1, 1), "maxtext": {"error": "does not fit"}}) == {}
    line = script.table({"a": programs | claim}).splitlines()[-1]
    cells = (
        "900 (90), 1200, 6.0 |  | fused products, 48 MiB; best of 2 | 1000 (100), 1500, 5.0 |"
        "  | defaults, 48 MiB; best of 1"
    )
    assert line == f"| a | {cells} | 1.200 | 0.0.52 | abc1234 |"


def test_mfu_is_counted_with_causal_and_with_full_attention(script):
    (row,) = (row for row in script.TABLE if row.name == "llama3-8b v5p:4x4x4 4096 x 1")
    causal, full = script.model_flops(row)
    weights = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14_336) + 4096 * 128_256
    scores = 12 * 32 * 32 * 128 * 4096**2
    assert (causal, full) == (
        6 * weights * 4096 + scores / 2,
        6 * weights * 4096 + scores,
    )
    # the compiled program has these products
    results = json.loads(script.RESULTS.read_text())["results"]
    assert results[row.name]["shardopt"]["flops"] == pytest.approx(6 * weights * 4096, rel=1e-3)
    assert script.mfu(row.name, causal / 459e12) == f"100.0%, {full / causal:.1%}"
    assert script.mfu("no row", 1.0) == ""
    assert {row.model for row in (*script.TABLE, *script.MORE)} == set(script.SIZES)


def test_the_picture_is_drawn_from_what_is_there(script, tmp_path):
    programs = {"shardopt": program(0.9, 6), "maxtext": program(1.0, 5)}
    script.draw(
        {"a row": programs | script.compared(programs), "not yet": {}}, tmp_path / "picture.png"
    )
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_program_says_which_commit_compiled_it(script):
    assert script.commit().removesuffix(", changed").isalnum()


def test_the_page_has_the_table_of_the_compiled_programs(script):
    """The table of docs/notes/maxtext.md shows the numbers of the JSON."""
    results = json.loads(script.RESULTS.read_text())["results"]
    text = (ROOT / "docs" / "notes" / "maxtext.md").read_text()
    for line in script.table(results).splitlines():
        assert line in text


def test_a_row_is_compared_anew_or_labelled_old(script):
    results = json.loads(script.RESULTS.read_text())["results"]
    new = [
        name
        for name, row in results.items()
        if all("choice" in row[contender] for contender in script.CONTENDERS)
    ]
    assert "llama3-8b v5p:4x4x4 4096 x 1" in new
    for name, row in results.items():
        for contender in script.CONTENDERS:
            words = " ".join(row[contender].get("words", []))
            assert ("llama3.1" in words) == (name not in new and contender == "maxtext"), name
        assert ("scheduled" in row["maxtext"]) == (name in new), name
