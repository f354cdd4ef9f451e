"""`shardopt merge`, `export` and `generate` as processes of their own, and what they refuse."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import oracle

import shardopt as so
from shardopt.adapters import lora
from shardopt.cli import main
from shardopt.cli._export import _optimizer
from shardopt.cli._options import ModelOptions, TrainOptions, TuneOptions
from shardopt.cli._run_folder import read_run, write_options
from shardopt.cli._sample import continue_tokens
from shardopt.cli._train import decoder_config
from shardopt.models import from_pretrained, gpt, sample

MODEL = ModelOptions(dim=16, layers=1, heads=2, length=12)


@pytest.fixture
def finish(shardopt):
    """Return a function that runs the command in a process, and returns what it prints."""

    def run(*words):
        out, err = shardopt(*words).communicate(timeout=900)
        assert not err.startswith("error"), err
        return out.strip()

    return run


def write_run(folder):
    """Write a run of `train` that was saved at step 3; return its parameters."""
    defaults = TrainOptions()
    run_options = dataclasses.replace(defaults.run, run_dir=folder)
    options = dataclasses.replace(defaults, model=MODEL, run=run_options)
    config = decoder_config(MODEL)
    opt = so.fsdp(_optimizer(options), so.make_mesh(), gpt.model(config))
    state = opt.init(gpt.init(config, jax.random.key(0)))
    so.save(folder / "checkpoints", state._replace(step=jnp.int32(3)))
    write_options(options, text_bytes=1000)
    return state.params


@pytest.mark.fast
@pytest.mark.parametrize("options_type", [TrainOptions, TuneOptions])
def test_the_options_of_a_run_of_each_command_are_read(options_type, tmp_path):
    options = options_type()
    options = dataclasses.replace(options, run=dataclasses.replace(options.run, run_dir=tmp_path))
    write_options(options, text_bytes=1000)
    assert read_run(tmp_path) == (options, 1000)


@pytest.mark.slow
def test_a_run_and_its_export_generate_what_its_parameters_sample(finish, tmp_path):
    params = jax.device_get(write_run(tmp_path / "run"))
    finish("export", tmp_path / "run", tmp_path / "out", "--step", 3)
    assert from_pretrained(tmp_path / "out").config.vocab_size == 256
    prompt = np.array([97, 98, 99], np.int32)
    expected = sample(
        params,
        decoder_config(MODEL),
        prompt[None],
        jax.random.key(0),
        num_tokens=5,
        temperature=0.0,
    )
    greedy = ["97,98,99", "--ids", "--num-tokens", 5, "--temperature", 0]
    for folder in ("run", "out"):
        line = finish("generate", tmp_path / folder, *greedy)
        assert line == ",".join(map(str, np.asarray(expected)[0].tolist())), folder
    assert finish("generate", tmp_path / "run", "abc", "--num-tokens", 40).startswith("abc")


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float", "nf4"])
def test_merged_weights_are_those_that_the_adapters_compute(base, finish, tmp_path):
    config, shapes, _ = oracle.read_case("llama3")
    folder = oracle.write_folder(tmp_path / "llama", config, shapes)
    model = from_pretrained(folder)
    adapters = lora(
        model.model,
        rank=2,
        alpha=6,
        targets=["attention/(q|v)$", "mlp/down$"],
        base=base,
        matrices=model.matrices,
        rules=model.rules,
    )
    params = adapters.init(model.load_params(progress=False), jax.random.key(0))
    draw = np.random.default_rng(0)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype)
            if "lora_b" in jax.tree_util.keystr(path)
            else leaf
        ),
        params,
    )
    adapters.save(tmp_path / "adapters", params, model=model)
    model.save(tmp_path / "expected", jax.jit(adapters.merge)(params), progress=False)
    line = finish("merge", tmp_path / "adapters", tmp_path / "merged", "--base", base)
    assert line == f"{tmp_path}/merged has the weights of {folder} with adapters on 6 weights."
    merged, expected, before = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "merged", tmp_path / "expected", folder)
    )
    for name, numbers in expected.items():
        np.testing.assert_allclose(merged[name], numbers, rtol=1e-5, atol=1e-6, err_msg=name)
    assert any((merged[name] != numbers).any() for name, numbers in before.items())


@pytest.mark.slow
def test_a_folder_with_a_tokenizer_continues_text(finish, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    config, shapes, _ = oracle.read_case("llama3")
    folder = oracle.write_folder(tmp_path / "llama", config, shapes)
    words = {f"word{i}": i for i in range(config["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    line = finish("generate", folder, "word5 word2", "--num-tokens", 4)
    assert line.startswith("word5 word2 word")
    assert len(line.split()) == 6


@pytest.mark.fast
def test_a_long_continuation_goes_on_from_the_last_half_that_the_model_has_seen(monkeypatch):
    windows = []

    def count_up(params, config, prompt, rng, *, num_tokens, temperature, top_k):
        windows.append((prompt[0].tolist(), num_tokens))
        return np.concatenate([prompt[0], prompt[0, -1] + 1 + np.arange(num_tokens)])[None]

    monkeypatch.setattr("shardopt.cli._sample.sample", count_up)
    for prompt_length in (1, 4, 20):
        windows.clear()
        prompt = np.arange(prompt_length)
        tokens = continue_tokens(
            {}, None, prompt, num_tokens=9, length=8, temperature=1.0, top_k=None, seed=0
        )
        assert tokens.tolist() == list(range(prompt_length + 9))
        assert all(len(window) + count <= 8 for window, count in windows)
        assert all(len(window) >= min(prompt_length, 4) for window, _ in windows)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "export {tmp} out",
            "export: there is no run in '{tmp}'.\nFix: name the --run-dir of a run",
        ),
        ("export {tmp} out --step 0", "export: --step must be at least 1, got 0."),
        ("generate {tmp} hello", "generate: {tmp} has no config.json."),
        (
            "generate {tmp} hello --num-tokens 0",
            "generate: --num-tokens must be at least 1, got 0.",
        ),
        ("generate {tmp} hello --top-k -1", "generate: --top-k must be at least 1, got -1."),
        ("generate {tmp} hello --temperature -1", "generate: --temperature must be finite, at"),
        (
            "generate {tmp}/llama hello",
            "generate: the folder has no tokenizer.json, so that a text",
        ),
        ("generate {tmp}/llama 1,x --ids", "generate: the prompt 1,x cannot be read.\nFix: write"),
        (
            "generate {tmp}/llama 999 --ids",
            "generate: ids of the batch are not those of the model.",
        ),
        ("merge {tmp} out", "merge: {tmp} has no adapter_config.json, so it holds no adapters"),
        (
            "merge {tmp}/damaged out",
            "merge: {tmp}/damaged/adapter_config.json is damaged: Expecting",
        ),
        ("merge {tmp}/rank out", "merge: {tmp}/rank/adapter_config.json has no lora_alpha.\nFix:"),
        (
            "merge {tmp}/nameless out",
            "adapter_config.json of {tmp}/nameless does not name their model.\nFix: name the folder",
        ),
        (
            "generate {tmp}/llama/copy hello",
            "generate: {tmp}/llama/copy/tokenizer.json is damaged: EOF",
        ),
        ("merge {tmp}/pruned out", "merge: 1 weight with adapters are not in {tmp}/llama."),
    ],
)
def test_what_cannot_be_read_is_refused(words, message, tmp_path, capsys):
    if "llama" in words or "pruned" in words:
        config, shapes, _ = oracle.read_case("llama3")
        folder = oracle.write_folder(tmp_path / "llama", config, shapes)
    damaged = {
        "damaged": "{",
        "rank": '{"r": 2}',
        "nameless": '{"r": 2, "lora_alpha": 2, "base_model_name_or_path": null}',
    }
    for name, text in damaged.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(text)
    if "copy" in words:
        shutil.copytree(folder, folder / "copy")
        (folder / "copy" / "tokenizer.json").write_text("{")
    if "pruned" in words:
        from safetensors.numpy import save_file

        (tmp_path / "pruned").mkdir()
        settings = {"r": 2, "lora_alpha": 2, "base_model_name_or_path": str(folder)}
        (tmp_path / "pruned" / "adapter_config.json").write_text(json.dumps(settings))
        tensor = {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": np.zeros((2, 2))}
        save_file(tensor, tmp_path / "pruned" / "adapter_model.safetensors")
    assert main(words.format(tmp=tmp_path).split()) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "suggestions"),
    [
        ("train --stpes 3", {"--stpes": "--steps"}),
        ("train --seq-len 3 --n-layer=2", {"--seq-len": "--length", "--n-layer=2": "--layers"}),
        ("train --max-grad-norm 1", {"--max-grad-norm": "--clip"}),
        ("train --gradient-accumulation-steps 4", {"--gradient-accumulation": "--micro-batches"}),
        ("tune --num-train-epochs 3", {"--num-train-epochs": "--epochs"}),
        ("tune --lora-r 3", {"--lora-r": "--lora-rank"}),
        ("generate a b --max-new-tokens 3", {"--max-new-tokens": "--num-tokens"}),
        ("plan --num-gpus 3", {"--num-gpus": "--chips"}),
        ("launch --nproc 3 -- train", {"--nproc": "--processes"}),
    ],
)
def test_an_unknown_option_suggests_those_of_the_same_meaning_or_spelling(
    words, suggestions, capsys
):
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {words.split()[0]}: ")
    assert err.rstrip().endswith("--help-all lists the options.")
    for word, suggestion in suggestions.items():
        (line,) = [line for line in err.splitlines() if line.startswith(f"  {word}")]
        assert f"did you mean {suggestion}" in line


@pytest.mark.fast
def test_a_word_that_is_like_no_option_is_listed(capsys):
    assert main(["train", "--xyzzy", "3", "more"]) == 2
    assert capsys.readouterr().err == (
        "error: train: 1 word cannot be read.\n  --xyzzy\nFix: --help-all lists the options.\n"
    )
    assert main(["train", "more"]) == 2
    assert "train: 1 word cannot be read.\n  more" in capsys.readouterr().err
