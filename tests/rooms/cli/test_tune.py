"""`shardopt tune` from end to end: it trains on the tokens with a weight, resumes, writes what others
load, and refuses.
"""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import oracle

from shardopt.checkpoint._run_folder import committed
from shardopt.cli import main
from shardopt.models import from_pretrained


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama as a folder, with a file that is no weight."""
    config, shapes, _ = oracle.read_case("llama3")
    folder = oracle.write_folder(tmp_path_factory.mktemp("model") / "llama", config, shapes)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """200 questions between two marks; the answer is the first word of the question."""
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(200):
        question = draw.integers(2, 14, draw.integers(3, 6)).tolist()
        tokens = [0, *question, 1, question[0], 1]
        weights = [0] * (len(tokens) - 2) + [1, 1]
        lines.append(json.dumps({"tokens": tokens, "weights": weights}))
    path = tmp_path_factory.mktemp("data") / "tokens.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def tune(model, conversations, tmp_path, capsys):
    """Return a function that runs the command here, and returns its exit code and its output."""

    def run(*words, folder=model, data=conversations, run_dir=tmp_path / "run"):
        paths = ["--model", folder, "--data", data, "--run-dir", run_dir]
        sizes = [
            "--length",
            "32",
            "--batch-size",
            "8",
            "--learning-rate",
            "2e-2",
            "--checkpoint-every",
            "4",
            "--evaluate-every",
            "4",
        ]
        code = main(["tune", *map(str, paths), *sizes, *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


# test_train.py runs the same loop, models/test_open_weights_files.py writes such folders
@pytest.mark.slow
def test_a_run_learns_and_leaves_a_folder_that_from_pretrained_reads(tune, model, tmp_path):
    code, out, err = tune("--steps", 8, "--mesh", "data=8", "--no-recompute-blocks")
    assert code == 0, err
    for piece in (
        "model      llama, ",
        "190 conversations of ",
        "10 held out",
        "step       8 x 32 tokens",
        "nats a token after 8 steps",
        "loads the model.",
    ):
        assert piece in out
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [4, 8]
    assert lines[1]["val_loss"] < lines[0]["val_loss"]
    tuned = from_pretrained(tmp_path / "run" / "model")
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {name: x.dtype for name, x in after.items()} == {
        name: x.dtype for name, x in before.items()
    }
    assert all((after[name] != numbers).any() for name, numbers in before.items())
    assert tuned.config == from_pretrained(model).config
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()


@pytest.mark.slow
def test_norms_are_logged(tune, tmp_path):
    code, _, err = tune("--steps", 4, "--norms-every", 4, "--mesh", "data=8", "--lora-rank", 2)
    assert code == 0, err
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    names = {name for line in lines for name in line if name.startswith("gradient_norm/")}
    assert names
    assert all("/lora_" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--lora-rank 2 --base nf4 --lora-dropout 0.1"])
def test_a_run_that_is_resumed_on_another_mesh_ends_as_an_unbroken_one(options, tune, tmp_path):
    words = [*options.split(), "--steps", 8]
    for run_dir, mesh, resume in (
        ("unbroken", "data=4,tensor=2", ()),
        ("broken", "data=4,tensor=2", ()),
        ("broken", "data=8", ("--resume",)),
    ):
        if resume:
            shutil.rmtree(tmp_path / "broken" / "checkpoints" / "8")
        code, _, err = tune(*words, "--mesh", mesh, *resume, run_dir=tmp_path / run_dir)
        assert code == 0, err
    name = "adapters/adapter_model" if options else "model/model"
    unbroken, broken = (
        load_file(tmp_path / run_dir / f"{name}.safetensors") for run_dir in ("unbroken", "broken")
    )
    tolerance = 0.05 if options else 1e-4  # a mask of dropout for each device
    for tensor, numbers in unbroken.items():
        np.testing.assert_allclose(broken[tensor], numbers, rtol=0, atol=tolerance, err_msg=tensor)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_written_has_the_same_loss_in_transformers_and_in_peft(
    tune, model, conversations, tmp_path
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    for run_dir, options in (("full", ()), ("lora", ("--lora-rank", 4))):
        code, _, err = tune("--steps", 4, *options, run_dir=tmp_path / run_dir)
        assert code == 0, err
    full = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "full" / "model", dtype=torch.float32
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "lora" / "adapters")
    lines = conversations.read_text().splitlines()
    held_out = [json.loads(lines[i]) for i in np.random.default_rng(0).permutation(200)[:10]]
    for run_dir, reference_model in (("full", full), ("lora", adapted)):
        total = 0.0
        count = 0
        for document in held_out:
            tokens = torch.as_tensor([document["tokens"]])
            mask = torch.as_tensor(document["weights"])[1:]
            with torch.no_grad():
                logits = reference_model.eval()(input_ids=tokens[:, :-1]).logits[0]
            nats = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            total = total + float((nats * mask).sum())
            count = count + int(mask.sum())
        last = json.loads((tmp_path / run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["val_loss"] == pytest.approx(total / count, rel=1e-5), run_dir


@pytest.mark.slow
def test_every_strategy_tunes(tune, tmp_path):
    losses = []
    for i, words in enumerate(
        (
            "--strategy fsdp --mesh data=8",
            "--strategy ddp --mesh data=8",
            "--strategy zero2 --mesh data=4,tensor=2",
            "--strategy hybrid --mesh data=4,pipeline=2",
            "--strategy fsdp --mesh data=4,context=2",
        )
    ):
        code, _, err = tune(*words.split(), "--steps", 4, run_dir=tmp_path / str(i))
        assert code == 0, err
        (line,) = (tmp_path / str(i) / "metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(line)["val_loss"])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--length 0", "tune: --length must be at least 1, got 0."),
        ("--validation 1", "tune: --validation must be finite, above 0 and below 1; got 1.0."),
        (
            "--base nf4",
            (
                "tune: 1 option for adapters, and --lora-rank is not given.\n  --base nf4\nFix: leave"
                " out what is listed, or add --lora-rank 16."
            ),
        ),
        ("--epochs 0", "tune: --epochs must be finite, above 0; got 0.0."),
        (
            "--length 4",
            (
                "tune: 0 conversations of at most 4 tokens cannot be both trained on and held out;"
                " the longest has 9."
            ),
        ),
        (
            "--strategy ddp --gather-dtype bfloat16",
            "tune: 1 option for placements that gather weights; ddp does not.\n  --gather-dtype",
        ),
        (
            "--batch-size 6 --mesh data=8",
            "tune: --batch-size 6 is not divisible by 8 devices along data = 8.",
        ),
        (
            "--lora-rank 2 --lora-targets router",
            "tune: 1 problem with the targets.\n  target 'router' matches no parameter",
        ),
        (
            "--lora-rank 2 --lora-targets (",
            "tune: --lora-targets has no regular expression: missing )",
        ),
        ("--lora-rank 2 --lora-alpha -1", "tune: --lora-alpha must be finite, above 0; got -1.0."),
        (
            "--lora-rank 2 --lora-dropout 2",
            "tune: --lora-dropout must be finite, at least 0 and below 1; got 2.0.",
        ),
        (
            "--lora-rank 2 --lora-targets embedding",
            "tune: peft has no form for 1 weight.\n  model.embed_tokens.weight: is not",
        ),
        ("--resume", "tune: there is no run in '{run}' to go on with."),
    ],
)
def test_what_cannot_work_is_refused_before_anything_compiles(words, message, tune, tmp_path):
    run_dir = tmp_path / "run"
    code, _, err = tune(*words.replace("{run}", str(run_dir)).split())
    assert code == 2
    assert message.replace("{run}", str(run_dir)) in err
    assert "matrices=" not in err  # an argument of Python
    assert "model=" not in err
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.fast
def test_paths_are_needed_and_another_run_is_not_continued(tune, tmp_path, capsys):
    assert main(["tune", "--run-dir", str(tmp_path)]) == 2
    assert (
        "tune: --model and --data must be given.\nFix: shardopt tune --model FOLDER"
        in capsys.readouterr().err
    )
    assert (
        main(
            [
                "tune",
                "--model",
                str(tmp_path / "none"),
                "--data",
                "x.jsonl",
                "--run-dir",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert f"tune: --model {tmp_path}/none is no folder." in capsys.readouterr().err
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"training": {"steps": 3}}))
    code, _, err = tune("--resume")
    assert code == 2
    assert f"tune: the run in '{run_dir}' is one of another command." in err
    (run_dir / "config.json").write_text(
        json.dumps({"training": {"epochs": 3.0}, "model": {"lora_rank": 4}})
    )
    code, _, err = tune("--resume", "--lora-rank", 8)
    assert code == 2
    assert re.search(
        r"trains another model\.\n  --model was None, is now .*\n  --lora-rank was 4, is now 8", err
    )


@pytest.mark.slow
def test_adapters_do_not_go_on_with_another_base(tune, model, tmp_path):
    words = ("--lora-rank", 2, "--steps", 4)
    code, _, err = tune(*words)
    assert code == 0, err
    assert committed(tmp_path / "run" / "checkpoints") == [4]
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    from safetensors.numpy import save_file

    save_file(jax.tree.map(lambda x: x * 1.5, tensors), other / "model.safetensors")
    shutil.move(model, tmp_path / "away")
    shutil.move(other, model)
    try:
        code, _, err = tune("--lora-rank", 2, "--steps", 8, "--resume")
    finally:
        shutil.move(model, other)
        shutil.move(tmp_path / "away", model)
    assert code == 2
    assert re.search(
        r"was trained on another base: its hash is [0-9a-f]{32}, and that of params is"
        r" [0-9a-f]{32}\.",
        err,
    )
