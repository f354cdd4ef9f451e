"""`shardopt train --model moe`: experts on their devices, balanced, resumed on another mesh.

Options that gpt does not have.
"""

import json

import jax
import pytest

from shardopt.cli import main
from shardopt.cli._models import model_of
from shardopt.cli._options import ModelOptions
from shardopt.models import gpt


@pytest.mark.slow
def test_a_run_shards_experts_and_goes_on_with_others(tiny, tmp_path, capsys):
    words = [*tiny, "--run-dir", str(tmp_path / "run"), "--checkpoint-every", "2"]
    assert (
        main(
            [
                *words,
                "--model",
                "moe",
                "--experts",
                "4",
                "--steps",
                "2",
                "--mesh",
                "data=2,expert=4",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    for piece in (
        "2 of 4 experts",
        "mesh       data=2 x expert=4",
        "blocks/experts/up",
        "router_load",
    ):
        assert piece in out
    assert main([*words, "--steps", "3", "--mesh", "data=4,expert=2", "--resume"]) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3
    assert 1 <= last["load_imbalance"] <= 4


def test_tokens_go_through_as_many_hidden_units_as_in_a_gpt():
    shape = {"dim": 64, "layers": 2}
    moe, plain = (
        model_of(ModelOptions(model="moe", experts=8, top_k=2, **shape)),
        model_of(ModelOptions(**shape)),
    )

    def count(model):
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))

    assert count(moe) > 2 * count(plain)
    up = jax.eval_shape(moe.init, jax.random.key(0))["blocks"]["experts"]["up"]
    assert up.shape == (2, 8, 64, gpt.GPTConfig(dim=64).hidden // 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--experts", "4", "--balance", "none"],
            (
                "error: train: 2 options for --model moe; gpt was asked for.\n  --experts 4\n "
                " --balance none\nFix: leave out what is listed, or choose --model moe."
            ),
        ),
        (
            ["--model", "moe", "--precision", "fp8"],
            (
                "error: train: 1 option for --model gpt; moe was asked for.\n"
                "  --precision fp8\nFix: leave out what is listed, or choose --model gpt."
            ),
        ),
        (["--model", "moe", "--top-k", "0"], "error: train: --top-k must be at least 1, got 0."),
        (
            ["--model", "moe", "--top-k", "9"],
            "error: MoEConfig: 1 size cannot be used.\n  top_k=9 is above num_experts=8",
        ),
    ],
    ids=lambda value: value[-2] if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together_are_refused(words, message, tiny, capsys, tmp_path):
    assert main([*tiny, *words, "--run-dir", str(tmp_path / "run")]) != 0
    assert message in capsys.readouterr().err
