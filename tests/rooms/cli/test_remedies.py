"""Errors of functions of Python give remedies in the words of the command line."""

import ast
import re

import pytest
from support.paths import ROOT

from shardopt.cli import main
from shardopt.cli._remedies import REMEDIES, error_of_command

TINY = "--dim 32 --layers 2 --length 16 --batch-size 8 --run-dir {folder}/run"
MESSAGES = {
    f"train {TINY} --mesh tensor=8": [
        "train: 2 parameter leaves cannot be split over mesh axis 'tensor' (size 8).",
        "Fix: choose tensor=1, 2 or 4 in --mesh.",
    ],
    f"train {TINY} --mesh expert=2,data=4": [
        "train: mesh axis",
        "Fix: leave expert out of --mesh.",
    ],
    f"train {TINY} --strategy hybrid --mesh data=2,pipeline=4 --layers 8 --schedule interleaved"
    " --micro-batches 2": ["train: with 2 chunks", "use 4 micro-batches, or another --schedule."],
    f"train {TINY} --checkpoint-every 0": ["train: --checkpoint-every must be at least 1, got 0."],
    f"train {TINY} --evaluate-every 0": ["train: --evaluate-every must be at least 1, got 0."],
    f"train {TINY} --norms-every 0": ["train: --norms-every must be at least 1, got 0."],
    f"train {TINY} --memory-every 7": ["train: --memory-every needs", "leave --memory-every out."],
    f"train {TINY} --data {{file}}": ["Fix: give more --data, or a smaller --length."],
    "train --run-dir {file} --length 16": ["train: ", "Fix: choose a --run-dir that you may write"],
    "train --data {folder}/none": ["train: there is no file or folder '{folder}/none'."],
    "plan --model gpt": ["plan: unknown model 'gpt'.", "llama3-405b, mixtral-8x7b, deepseek-v3."],
    "plan --hardware x": ["plan: unknown hardware 'x'.", "v6e, tpu7x."],
    "plan --chips 0": ["plan: --chips must be at least 1, got 0."],
    "plan --slices 3": ["plan: 64 chips cannot", "Fix: choose --chips divisible by 3."],
    "audit {file}": [
        "audit: this is not",
        "Fix: give a file that holds one, as compiled.as_text()",
    ],
    "audit {folder}/none": [
        "audit: {folder}/none: No such file or directory.\nFix: check the path"
    ],
    "generate {folder} hi": [
        "generate: {folder} has no config.json.",
        "Fix: download the model, and name its folder, with config.json and safetensors.",
    ],
    "merge {folder} {folder}/out": [
        "merge: {folder} has no adapter_config.json",
        "Fix: give the folder of adapters that tune --lora-rank or peft wrote.",
    ],
    "export {run} {folder}/out": ["export: there is no run", "Fix: name the --run-dir of a run"],
    "launch --processes 4 train --steps 3": ["launch: ", "Fix: say the command after --: shardopt"],
    "launch -- nosuchprogram": ["launch: 'nosuchprogram' is no command", "Fix: check its name"],
    "launch -- train --foo": ["error: train: 1 word cannot be read.\n  --foo"],
}
"""The words of a command -> parts of its error."""


@pytest.mark.parametrize("words", MESSAGES, ids=lambda words: words.replace(TINY, "")[:60])
def test_an_error_begins_with_its_command_and_its_remedy_names_options(
    words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # the README's command leaves a run in the folder where it began
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "short.txt").write_text("short")
    names = {"folder": tmp_path, "file": tmp_path / "short.txt", "run": tmp_path / "run"}
    assert main(words.format(**names).split()) == 2
    message = capsys.readouterr().err
    for part in MESSAGES[words]:
        assert part.format(**names) in message


def test_an_error_of_an_optax_chain_names_options():
    problem = "Checkpoints: step 3 in run does not fit opt: 0 leaves missing."
    fix = "Fix: build opt with the optax chain that the checkpoint was saved with; or so."
    assert error_of_command(ValueError(f"{problem}\n{fix}"), "train") == (
        "train: step 3 in run does not fit the options: 0 leaves missing.\n"
        "Fix: leave out --optimizer and --clip, or start another run."
    )


def test_each_remedy_stands_for_words_of_the_library():
    texts = set()
    for file in (ROOT / "shardopt").rglob("*.py"):
        if file.parent.name != "cli":
            texts |= {text_of(node) for node in ast.walk(ast.parse(file.read_text()))}
    library = "\n".join(texts)
    # these two have a name in the middle: the test above and test_tune.py raise them
    composed = ["targets has", "does not fit opt:"]
    assert [words for words in REMEDIES if not re.search(words, library)] == composed


def text_of(node):
    """Return the text of a string, with {} for the values of an f-string; "" for other nodes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""
