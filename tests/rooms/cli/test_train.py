"""`shardopt train` from end to end: it trains, refuses to overwrite, resumes elsewhere, and stops
when told.
"""

import contextlib
import importlib.metadata
import io
import json
import re
import shutil
import signal

import jax
import optax
import pytest

from shardopt.checkpoint._run_folder import committed
from shardopt.cli import main
from shardopt.cli._options import DeviceOptions, TrainOptions
from shardopt.cli._strategy import make_strategy, mesh_of
from shardopt.config._config import DDP, ZERO_1, ZERO_2, ZERO_3
from shardopt.models import gpt
from shardopt.partition._rules import check_rules


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """Return the folder of a run of eight steps, and its output."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert (
            main([*tiny, "--run-dir", str(folder), "--steps", "8", "--checkpoint-every", "4"]) == 0
        )
    return folder, out.getvalue()


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it, to be resumed."""
    return shutil.copytree(finished[0], tmp_path / "run")


@pytest.fixture
def train(tiny, capsys):
    """Return a function that runs `shardopt train` here, on the eight devices of the tests."""

    def run(*words):
        code = main([*tiny, *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_shows_its_placement_learns_and_leaves_a_folder(finished):
    folder, out = finished
    for piece in (
        "devices    8 CPU devices, simulated on ",
        "mesh       data=4 x tensor=2",
        "fsdp: what each device holds",
        "float32[2, 32, 3, 4, 8]",
        "P(None, 'data', None, 'tensor', None)",
        "after 8 steps",
        "What it writes",
        f"in {folder}: checkpoints, metrics.jsonl, config.json",
    ):
        assert piece in out
    assert committed(folder / "checkpoints") == [4, 8]
    assert [line["step"] for line in logged(folder)] == [4, 8]
    assert logged(folder)[-1]["val_loss"] < logged(folder)[0]["val_loss"] < 5.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (),
            (
                "train: there is a run in '{folder}' already, saved at step 8.\n"
                "Fix: go on with --resume, choose another --run-dir, or delete '{folder}'."
            ),
        ),
        (
            ("--resume", "--dim", "48", "--heads", "2"),
            (
                "train: the run in '{folder}' trains another model.\n"
                "  --dim was 32, is now 48\n  --heads was 4, is now 2\n"
                "Fix: leave these out, or choose another --run-dir."
            ),
        ),
    ],
)
def test_a_run_is_neither_overwritten_nor_resumed_as_another_model(train, folder, words, message):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert train("--run-dir", folder, *words) == (
        2,
        "",
        f"error: {message.format(folder=folder)}\n",
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_run_is_resumed_with_other_devices_another_mesh_and_another_strategy(start, folder):
    words = "--resume --steps 12 --devices 4 --mesh data=2,context=2 --strategy zero1"
    process = start("--run-dir", folder, *words.split())
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert (
        f"Resuming from step 8 in {folder / 'checkpoints'}, the data from its saved state." in err
    )
    assert "devices    4 CPU devices, simulated on " in out
    assert "mesh       data=2 x context=2\n" in re.sub(" +\n", "\n", out)
    assert "The batches come in a new order" not in out
    assert [line["step"] for line in logged(folder)] == [4, 8, 10, 12]
    assert logged(folder)[-1]["val_loss"] < logged(folder)[1]["val_loss"]
    saved = json.loads((folder / "config.json").read_text())
    assert [saved["where"][name] for name in ("devices", "mesh", "strategy")] == [
        4,
        "data=2,context=2",
        "zero1",
    ]
    # one given, one kept
    assert (saved["training"]["steps"], saved["run"]["checkpoint_every"]) == (12, 4)


@pytest.mark.slow  # training/test_resume.py
def test_resuming_a_run_that_is_done_says_so_and_a_changed_order_too(train, folder):
    code, out, _ = train("--run-dir", folder, "--resume", "--batch-size", 16)
    assert code == 0
    assert "The batches come in a new order: --batch-size was 8, is now 16." in out
    assert "The run had reached step 8 already; --steps above that trains it further." in out


@pytest.mark.slow
def test_norms_of_layers_are_logged(train, folder):
    code, out, _ = train("--run-dir", folder, "--resume", "--steps", 10, "--norms-every", 1)
    assert code == 0
    assert f"in {folder}: checkpoints, metrics.jsonl, config.json" in out
    gradients = {
        line["step"]: line
        for line in logged(folder)
        if "gradient_norm/blocks/mlp/up/layer_1" in line
    }
    assert [*gradients] == [9, 10]
    norms = [norm for name, norm in gradients[10].items() if name.startswith("gradient_norm/")]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(
        logged(folder)[-1]["grad_norm"], rel=1e-4
    )


@pytest.mark.slow
def test_sigterm_saves_and_says_how_to_go_on(start, tmp_path):
    folder = tmp_path / "a run"
    process = start(
        "--run-dir", folder, "--steps", 100_000, "--evaluate-every", 100_000, "--strategy", "ddp"
    )
    assert next(line for line in process.stderr if line.startswith("step 10/100000"))  # it trains
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143
    is_off = "jax's compilation cache is off in this run" in err  # programs would be mixed up
    assert is_off == importlib.metadata.version("jaxlib").startswith("0.10.")
    assert is_off != bool(list((folder / "compiled").glob("*step*-cache")))
    (step,) = committed(folder / "checkpoints")
    assert out.endswith(
        f"Stopped at step {step} of 100000; everything is saved. Go on with\n"
        f"  shardopt train --resume --run-dir '{folder}'\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--resume",),
            (
                "train: there is no run in '{folder}' to go on with.\n"
                "Fix: leave out --resume to start one, or name its folder with --run-dir."
            ),
        ),
        (
            ("--mesh", "data=3"),
            (
                "train: --mesh data=3 needs 3 devices, but there are 8.\nFix: make one size -1,"
                " choose sizes whose product is 8, or use --devices 3."
            ),
        ),
        (
            ("--mesh", "data=4,tensor=4"),
            (
                "train: --mesh data=4,tensor=4 needs 16 devices, but there are 8.\nFix: make one"
                " size -1, choose sizes whose product is 8, or use --devices 16."
            ),
        ),
        (
            ("--heads", "3"),
            (
                "train: --dim 32 cannot be cut into --heads 3 of an even width.\n"
                "Fix: use --dim 30 or 36, or another number of --heads."
            ),
        ),
        (
            ("--strategy", "ddp", "--gather-dtype", "bfloat16"),
            (
                "train: 1 option for placements that gather weights; ddp does not.\n"
                "  --gather-dtype bfloat16\nFix: leave out what is listed, or choose --strategy"
                " fsdp, or hybrid with --placement fsdp."
            ),
        ),
        (
            ("--batch-size", "6"),
            (
                "train: --batch-size 6 is not divisible by 4 devices along data = 4.\n"
                "Fix: use --batch-size 4 or 8, or another --mesh or --micro-batches."
            ),
        ),
        (
            ("--micro-batches", "0"),
            "train: --micro-batches must be at least 1, got 0.",
        ),
        (
            ("--dim", "36"),
            (
                "train: --dim 36 cannot be cut into --heads 4 of an even width.\n"
                "Fix: use --dim 32 or 40, or another number of --heads."
            ),
        ),
        (
            ("--data", "/no/such/text"),
            (
                "train: there is no file or folder '/no/such/text'.\n"
                "Fix: check the path; without one, Python's own source is read."
            ),
        ),
    ],
)
def test_what_cannot_be_done_is_said_without_a_traceback_and_leaves_nothing(
    train, tmp_path, words, message
):
    folder = tmp_path / "run"
    code, _, err = train("--run-dir", folder, *words)
    assert (code, err) == (2, f"error: {message.format(folder=folder)}\n")
    assert not folder.exists()


def test_debug_shows_where_an_error_was_raised(train, tmp_path):
    with pytest.raises(ValueError, match="there is no axis 'dota'"):
        train("--run-dir", tmp_path, "--mesh", "dota=8", "--debug")


def test_a_damaged_config_is_named(train, tmp_path):
    (tmp_path / "config.json").write_text('{"model": ')
    code, _, err = train("--run-dir", tmp_path, "--resume")
    assert code == 2
    assert err.startswith(f"error: train: '{tmp_path}/config.json' is damaged: ")
    assert err.endswith("\nFix: bring it back, or start again in another --run-dir.\n")


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("ddp", DDP),
        ("zero1", ZERO_1),
        ("zero2", ZERO_2),
        ("fsdp", ZERO_3),
    ],
)
def test_every_strategy_is_the_one_asked_for(name, placement):
    device_options = DeviceOptions(
        strategy=name, micro_batches=2, gather_dtype="bfloat16" if name == "fsdp" else None
    )
    mesh = mesh_of("auto", jax.devices())
    opt = make_strategy(
        TrainOptions(where=device_options), optax.sgd(0.1), mesh, gpt.model(gpt.config())
    )
    assert opt.config.placement == placement
    assert opt.config.strategy == name.rstrip("123")
    assert (opt.config.loss.micro_batches, opt.config.wire.gather_dtype) == (
        2,
        device_options.gather_dtype,
    )
    assert opt.config.layout.rules == check_rules(gpt.rules)
