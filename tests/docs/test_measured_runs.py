"""`benchmarks/measured_runs.py` without a compiler: the halves, and the weak points of a run."""

import json
from collections import Counter

import pytest
from support.paths import ROOT
from support.scripts import imported

from shardopt.planning._search import MEASURED, known_error

with imported("step_times") as step_times:
    MEMORY_SHARES = step_times._vector_work.MEMORY_SHARES
    ERROR_BARS = step_times._vector_work.ERROR_BARS

pytestmark = pytest.mark.fast


@pytest.fixture
def script():
    with imported("measured_runs") as module:
        yield module


def test_the_stored_halves_are_those_of_the_seed(script):
    stored = json.loads(script.RESULTS.read_text())["results"]
    rows = stored["runs"]
    runs = [{"id": int(key), "chip": row["chip"], "complete": True} for key, row in rows.items()]
    halves = {str(key): half for key, half in script.halves(runs, stored["seed"]).items()}
    assert halves == {key: row["half"] for key, row in rows.items()}
    other = script.halves(runs, stored["seed"] + 1)
    assert {str(key): half for key, half in other.items()} != halves


def test_each_generation_has_both_halves(script):
    runs = [{"id": number, "chip": "v6e", "complete": number != 3} for number in range(8)]
    halves = script.halves([*runs, {"id": 9, "chip": "H100", "complete": True}])
    assert sorted(halves) == [0, 1, 2, 4, 5, 6, 7]
    assert sorted(halves.values()) == ["fit"] * 3 + ["test"] * 4


def test_a_run_says_what_is_weak_about_its_seconds(script):
    run = {"step_seconds": {"kind": "stated"}, "conflicts": []}
    assert script.mark(run) == ""
    assert script.mark(run | {"step_seconds": {"kind": "derived"}}) == "derived"
    disputed = {"step_seconds": {"kind": "derived upper bound"}, "conflicts": ["two lines differ"]}
    assert script.mark(disputed) == "derived upper bound, disputed"


def row(half, measured, estimated, chip="v6e", **fields):
    """A run whose estimate is `estimated` at a share of 0.5, and shorter at larger ones."""
    seconds = {str(share): estimated * 0.5 / share for share in SHARES}
    fixed = {"name": "a run", "chips": 8, "slices": 1, "mark": ""}
    return (
        fixed
        | fields
        | {
            "chip": chip,
            "half": half,
            "measured_seconds": measured,
            "estimated_seconds": seconds,
        }
    )


SHARES = [round(0.3 + 0.1 * step, 1) for step in range(8)]


def test_the_share_is_fitted_on_one_half_alone(script):
    assert script.SHARES == SHARES
    rows = {
        "1": row("fit", 1.0, 1.0),
        "2": row("fit", 1.0, 1.0),
        "3": row("fit", 1.0, 9.0),  # a median does not follow one run
        "4": row("test", 1.0, 2.0),
        "5": {"chip": "v5p", "half": "fit"},
        "6": row("test", 1.0, 1.0, chip="v5e"),
    }
    assert script.fitted_shares(rows) == {"v6e": 0.5}
    assert script.relative_error(rows["4"], 0.5) == pytest.approx(1.0)


def test_the_table_lists_every_run(script):
    rows = {
        "1": row("fit", 1.0, 1.1, compiled={"by": "MaxText's own words", "refused_flags": ["--a"]}),
        "2": row("test", 1.0, 1.4, chip="v5p", compiled={"by": "MaxText's own words"}),
        "3": row("test", 2.5, 1.0, mark="derived", compiled={"error": "Error:\ntoo large"}),
        "4": row("test", 2.5, 1.0),
    }
    del rows["3"]["estimated_seconds"], rows["4"]["estimated_seconds"]
    results = {"shares": {"v6e": 0.5}, "factors": {"v6e": 1.4}, "runs": rows}
    lines = script.table(results).splitlines()[2:]
    assert lines == [
        "| 1 | a run | 8 x 1 | fit | 1 |  | 0.5 | 1.1 | +10.0% | +10.0% | MaxText's own words, without 1 flags |",
        "| 2 | a run | 8 x 1 | test | 1 |  | 0.7 (assumed) | 1 | +0.0% | +0.0% | MaxText's own words |",
        "| 3 | a run | 8 x 1 | test | 2.5 | derived |  |  |  |  | failed: too large |",
        "| 4 | a run | 8 x 1 | test | 2.5 |  |  |  |  |  | not compiled |",
    ]


def test_errors_are_those_of_each_half(script):
    rows = {
        "1": row("test", 1.0, 1.1),
        "2": row("test", 1.0, 0.8),
        "3": row("test", 1.0, 1.05, chip="v5p"),
        "4": row("fit", 1.0, 1.02),
        "5": {"chip": "v6e", "half": "test"},  # not compiled
    }
    errors = script.errors(rows, lambda row: script.relative_error(row, 0.5))
    assert errors == {
        "v6e test": {"runs": 2, "median": pytest.approx(0.15), "worst": pytest.approx(-0.2)},
        "v5p test": {"runs": 1, "median": pytest.approx(0.05), "worst": pytest.approx(0.05)},
        "all test": {"runs": 3, "median": pytest.approx(0.1), "worst": pytest.approx(-0.2)},
        "v6e fit": {"runs": 1, "median": pytest.approx(0.02), "worst": pytest.approx(0.02)},
        "all fit": {"runs": 1, "median": pytest.approx(0.02), "worst": pytest.approx(0.02)},
    }
    results = {
        "shares": {"v6e": 0.5},
        "errors": errors,
        "factors": {"v6e": 1.6},
        "factor_errors": {},
    }
    lines = script.errors_table(results).splitlines()
    assert lines[4] == "| v6e | 0.5 | 1 | 2.0% | +2.0% | 2 | 15.0% | -20.0% | 1.6 |  |  |  |  |"


def test_the_factor_is_fitted_on_one_half_alone(script):
    rows = {
        "1": row("fit", 2.0, 1.0),  # at a share of 0.7 it is 1 x 0.5 / 0.7
        "2": row("fit", 1.8, 1.0),
        "3": row("test", 9.0, 1.0),
        "4": row("test", 9.0, 1.0, chip="v5p"),
    }
    assert script.fitted_factors(rows) == {"v6e": 2.66}
    assert script.relative_error(rows["1"], 0.7, 2.8) == pytest.approx(0.0)


def test_the_page_has_the_tables_of_the_results(script):
    results = json.loads(script.RESULTS.read_text())["results"]
    page = (ROOT / "docs" / "notes" / "measured_runs.md").read_text()
    assert script.table(results) in page
    assert script.errors_table(results) in page
    assert script.plan_table(results["planned"]) in page


def test_shares_and_error_bars_are_those_of_the_results(script):
    results = json.loads(script.RESULTS.read_text())["results"]
    fitted = {chip: share for chip, share in MEMORY_SHARES.items() if chip != "v4"}
    assert fitted == results["shares"]
    assert {chip: list(bar) for chip, bar in ERROR_BARS.items()} == results["error_bars"]


def test_an_error_bar_is_of_all_runs_whose_program_was_measured(script):
    other = {"other_program": "it moves whole stacks from the host and back"}
    rows = {
        "1": row("test", 1.0, 1.25),
        "2": row("fit", 1.0, 0.5),
        "3": row("test", 1.0, 9.0, compiled=other),
        "4": {"chip": "v6e", "half": "test"},  # not compiled
    }
    assert script.error_bars(rows, {"v6e": 0.5}) == {"v6e": [2, 0.8, 2.0]}
    assert script.errors(rows, lambda row: script.relative_error(row, 0.5))["all test"]["runs"] == 1
    rows["2"]["compiled"] = other
    assert script.fitted_shares(rows) == {}


def test_a_program_that_moves_whole_stacks_is_told(script):
    stacks = "  %c = (bf16[4,8]{1,0}, bf16[4,8]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%a)"
    piece = "  %s = ((bf16[4,8]{1,0:S(5)}, s32[]), bf16[1,8]{1,0}, u32[]) async-start(%a, %i)"
    assert script.moves_stacks(stacks)
    assert not script.moves_stacks(f"{piece}\n{stacks.replace('S(5)', 'S(1)')}")


def test_plans_state_the_stored_ratios(script):
    planned = json.loads(script.RESULTS.read_text())["results"]["planned"]
    for chip, (runs, *stated) in MEASURED.items():
        ratios = list(planned[chip].values())
        assert runs == len(ratios)
        assert stated == [round(ratio, 2) for ratio in script.spread(ratios)]
    assert "0.78 to 1.97" in known_error("v4")  # of all chips
    assert min(least for _, least, _, _ in MEASURED.values()) == 0.78
    assert max(most for _, _, _, most in MEASURED.values()) == 1.97


def test_seconds_of_a_plan_are_those_of_the_layout_of_the_run(script):
    run = {
        "model": "tiny",
        "chip": "v6e",
        "chips": 8,
        "slices": 1,
        "seq_len": 512,
        "global_batch": 16,
        "quantisation": "none",
        "mesh": {"axes": {"ici_fsdp_parallelism": "-1 (default)"}},
        "remat": {"policy": "full"},
        "tuning_params": {},
        "shape": {
            "layers": 2,
            "emb_dim": 512,
            "heads": 4,
            "kv_heads": 4,
            "head_dim": 128,
            "ffn_dim": 1024,
            "vocab": 1024,
        },
    }
    seconds = script.planned_seconds(run)
    assert seconds is not None
    keeps = script.planned_seconds(run | {"remat": {"policy": "minimal"}})
    assert keeps < seconds  # nothing is recomputed
    halved = script.planned_seconds(
        run | {"mesh": {"axes": {"ici_tensor_parallelism": 2}}, "tuning_params": {}}
    )
    assert halved != seconds
    assert script.planned_seconds(run | {"quantisation": "int8 (AQT)"}) is None
    assert script.planned_seconds(run | {"shape": run["shape"] | {"experts": 8}}) is None


def test_chosen_runs_are_two_of_each_half_of_each_generation(script):
    rows = json.loads(script.RESULTS.read_text())["results"]["runs"]
    chosen = [rows[str(key)] for key in script.CHOSEN]
    halves = Counter((row["chip"], row["half"]) for row in chosen)
    assert halves == {(chip, half): 2 for chip in script.GENERATIONS for half in script.HALVES}


def test_words_for_maxtext_are_those_of_the_run(script):
    run = {
        "model": "llama3.1-8b",
        "chip": "v5p",
        "chips": 128,
        "slices": 2,
        "per_device_batch": 3,
        "seq_len": 8192,
        "tuning_params": {"remat_policy": "custom", "dataset_path": "x", "profiler": "xplane"},
    }
    assert script.words_of(run) == [
        "model_name=llama3.1-8b",
        "per_device_batch_size=3",
        "max_target_length=8192",
        "remat_policy=custom",
        "compile_topology=v5p-128",
        "compile_topology_num_slices=2",
    ]


def test_a_model_of_defaults_has_words_for_its_sizes(script):
    shape = dict.fromkeys(
        ("layers", "emb_dim", "heads", "kv_heads", "head_dim", "ffn_dim", "vocab"), 8
    )
    run = {
        "model": "maxtext-default-16b",
        "shape": shape,
        "chip": "v5e",
        "chips": 256,
        "slices": "1 (also 2)",
        "per_device_batch": 2,
        "seq_len": 2048,
        "attention": "ambiguous (see conflicts)",
        "mesh": {"axes": {"ici_fsdp_parallelism": "-1 (default)", "ici_tensor_parallelism": 4}},
        "remat": {"policy": "minimal"},
        "tuning_params": {"per_device_batch_size": 3},  # its recipe
    }
    assert script.words_of(run) == [
        "per_device_batch_size=2",
        "max_target_length=2048",
        "decoder_block=default",
        "base_num_decoder_layers=8",
        "base_emb_dim=8",
        "base_num_query_heads=8",
        "base_num_kv_heads=8",
        "head_dim=8",
        "base_mlp_dim=8",
        "vocab_size=8",
        "mlp_activations=['relu']",
        "logits_via_embedding=True",
        "remat_policy=minimal",
        "attention=dot_product",
        "ici_fsdp_parallelism=-1",
        "ici_tensor_parallelism=4",
        "compile_topology=v5e-256",
        "compile_topology_num_slices=1",
    ]


def test_elements_of_tuples_become_instructions(script):
    dumped = """%body (a: (s32[], (f32[8], f32[4]))) -> f32[4] {
  %a = (s32[]{:T(128)}, (f32[8]{0:T(128)}, /*index=1*/f32[4]{0:T(128)S(1)})) parameter(0)
  %b = f32[4]{0:T(128)S(1)} negate(%a#1#1)
  ROOT %c = f32[4]{0:T(128)S(1)} add(%b, %a#1#1)
}
"""
    lines = script.with_elements(dumped).splitlines()
    assert lines[2:] == [
        "  %a.element.1 = (f32[8]{0:T(128)}, f32[4]{0:T(128)S(1)}) get-tuple-element(%a), index=1",
        "  %a.element.1.element.1 = f32[4]{0:T(128)S(1)} get-tuple-element(%a.element.1), index=1",
        "  %b = f32[4]{0:T(128)S(1)} negate(%a.element.1.element.1)",
        "  ROOT %c = f32[4]{0:T(128)S(1)} add(%b, %a.element.1.element.1)",
        "}",
    ]
