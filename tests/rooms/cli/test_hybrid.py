"""`shardopt train --strategy hybrid`: a pipeline from one command, refusals, and runs that change
strategy.
"""

import contextlib
import dataclasses
import io
import json
import re
import shutil
from typing import get_args

import jax
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.cli import main
from shardopt.cli._conditions import saved_defaults
from shardopt.cli._options import (
    DeviceOptions,
    ModelOptions,
    PipelineOptions,
    ScheduleName,
    TrainingOptions,
    TrainOptions,
)
from shardopt.cli._strategy import check_options, fitted, make_strategy, mesh_of
from shardopt.config._config import PLACEMENTS
from shardopt.models import gpt
from shardopt.partition._rules import check_rules

HYBRID = DeviceOptions(strategy="hybrid")


def run(*words):
    """Run the command here, and return its output."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([str(word) for word in words]) == 0, err.getvalue()
    return re.sub(" +\n", "\n", out.getvalue())


def last(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """Return the folder of an interleaved run of four steps, and its output. The run chooses its
    own layers and micro-batches.
    """
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = (
        "--steps 4 --strategy hybrid --mesh data=2,tensor=2,pipeline=2 --schedule interleaved"
        " --placement zero2"
    )
    layers = tiny.index("--layers")
    command = [*tiny[:layers], *tiny[layers + 2 :], "--run-dir", folder, *words.split()]
    with pytest.MonkeyPatch.context() as patch:
        # test_train.py has shown it
        patch.setattr("shardopt.cli._train.continue_tokens", lambda _, config, prompt, **__: prompt)
        return folder, run(*command)


@pytest.mark.slow  # test_train.py runs the command; schedules and placements are checked below
def test_a_hybrid_run_says_what_its_schedule_costs_and_draws_it(finished):
    folder, out = finished
    for piece in (
        "million parameters: 4 blocks of width 32",
        "step       8 x 16 bytes in 4 micro-batches\n",
        "mesh       data=2 x pipeline=2 x tensor=2\n",
        "schedule   interleaved: 2 stages, 4 micro-batches, 2 chunks, 11.1% bubble\n",
        "hybrid with --placement zero2: what each device holds",
        "\nblocks/mlp/up ",
        "after 4 steps",
        f"in {folder}: checkpoints, metrics.jsonl, config.json\n",
    ):
        assert piece in out
    assert 4.5 < last(folder)["val_loss"] < 5.6
    saved = json.loads((folder / "config.json").read_text())
    assert saved["model"]["layers"] == 4
    pipeline = {"placement": "zero2", "schedule": "interleaved", "remat": False}
    assert saved["pipeline"] == pipeline


@pytest.mark.slow
def test_a_hybrid_run_goes_on_as_fsdp_and_then_by_another_schedule(finished, tmp_path, monkeypatch):
    """Its last steps equal the steps of fsdp from the same checkpoint."""
    # the run above has shown it
    monkeypatch.setattr(
        "shardopt.cli._train.continue_tokens", lambda _, config, prompt, **__: prompt
    )
    folder = shutil.copytree(finished[0], tmp_path / "run")
    resume = ["train", "--resume", "--run-dir", folder, "--steps", 12, "--checkpoint-every", 4]
    out = run(*resume, "--strategy", "fsdp", "--mesh", "data=4,tensor=2")
    assert "fsdp: what each device holds" in out
    assert "schedule" not in out
    control = last(folder)
    shutil.rmtree(folder / "checkpoints" / "12")  # the other run takes these steps again, from 8

    words = (
        "--strategy hybrid --mesh pipeline=2,data=-1 --schedule zero_bubble_lockstep --placement"
        " zero1"
    )
    out = run(*resume, *words.split(), "--micro-batches", 2)
    assert "schedule   zero_bubble_lockstep: 2 stages, 2 micro-batches, 1 chunk, " in out
    assert "hybrid with --placement zero1" in out
    assert "The batches come in a new order" not in out
    lines = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines == [4, 8, 10, 12]
    assert control["step"] == last(folder)["step"] == 12
    for metric in ("loss", "grad_norm", "val_loss"):
        np.testing.assert_allclose(last(folder)[metric], control[metric], rtol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--schedule gpipe --placement ddp --remat",
            (
                "train: 3 options for --strategy hybrid; fsdp was asked for.\n"
                "  --placement ddp\n  --schedule gpipe\n  --remat\n"
                "Fix: leave out what is listed, or choose --strategy hybrid."
            ),
        ),
        (
            "--mesh data=4,pipeline=2 --strategy zero1",
            (
                "train: pipeline=2 is for --strategy hybrid; zero1 was asked for.\n"
                "Fix: choose --strategy hybrid, or a --mesh without pipeline."
            ),
        ),
        (
            "--strategy hybrid --schedule interleaved",
            (
                "train: --layers 2 is too few for 2 stages x 2 chunks = 4.\n"
                "Fix: use --layers 4 or more, or another --mesh or --schedule."
            ),
        ),
        (
            "--strategy hybrid --mesh pipeline=8 --layers 4",
            (
                "train: --layers 4 is too few for 8 stages x 1 chunk = 8.\n"
                "Fix: use --layers 8 or more, or another --mesh or --schedule."
            ),
        ),
        (
            "--strategy hybrid --schedule interleaved --layers 4 --micro-batches 3 --batch-size 12",
            (
                "train: with 2 chunks per stage, micro-batches must be a multiple of the 2"
                " stages, got 3.\nFix: use 2 or 4 micro-batches, or another --schedule."
            ),
        ),
        (
            "--strategy hybrid --micro-batches 8",
            (
                "train: --batch-size 8 is not divisible by 2 devices along data x 8 micro-batches ="
                " 16.\nFix: use --batch-size 16, or another --mesh or --micro-batches."
            ),
        ),
        (
            "--strategy hybrid --batch-size 6",
            (
                "train: --batch-size 6 is not divisible by 2 devices along data x 2 micro-batches ="
                " 4.\nFix: use --batch-size 4 or 8, or another --mesh or --micro-batches."
            ),
        ),
        (
            "--strategy hybrid --placement zero1 --gather-dtype bfloat16",
            (
                "train: 1 option for placements that gather weights; hybrid with --placement zero1"
                " does not.\n  --gather-dtype bfloat16\nFix: leave out what is listed, or choose"
                " --strategy fsdp, or hybrid with --placement fsdp."
            ),
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_compiles(
    tiny, tmp_path, capsys, monkeypatch, words, message
):
    monkeypatch.setattr(
        jax._src.compiler, "compile_or_get_cached", lambda *_, **__: pytest.fail("compiled")
    )
    folder = tmp_path / "run"
    assert main([*tiny, "--run-dir", str(folder), *words.split()]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not folder.exists()


def make(where_options=HYBRID, batch_size=16, layers=None, **pipeline):
    options = TrainOptions(
        where=where_options,
        pipeline=PipelineOptions(**pipeline),
        model=ModelOptions(layers=layers),
        training=TrainingOptions(batch_size=batch_size),
    )
    check_options(options)
    mesh = mesh_of(where_options.mesh, jax.devices(), pipelined=where_options.strategy == "hybrid")
    options = fitted(options, mesh)
    config = gpt.config(num_layers=options.model.layers)
    return (
        options.model.layers,
        make_strategy(options, optax.sgd(0.1), mesh, gpt.model(config)).config,
    )


@pytest.mark.parametrize("schedule", [None, *get_args(ScheduleName)])
def test_every_schedule_is_the_one_asked_for(schedule):
    layers, config = make(schedule=schedule)
    chunks = {"num_chunks": 2} if schedule in ("interleaved", "looped_breadth_first") else {}
    assert config.schedule == getattr(so.schedules, schedule or "eager_one_f_one_b")(2, 4, **chunks)
    assert layers == 2 * config.schedule.num_chunks


def stages_of(config):
    """Return the pipeline that fills the first slot of a strategy."""
    return config.slots.differentiate["per_device"].device_loss


@pytest.mark.parametrize("placement", [None, *PLACEMENTS])
@pytest.mark.parametrize("remat", [False, True])
def test_every_placement_is_the_one_asked_for(placement, remat):
    gathers = placement in (None, "fsdp")
    _, config = make(
        dataclasses.replace(HYBRID, gather_dtype="bfloat16" if gathers else None),
        placement=placement,
        remat=remat,
    )
    assert config.strategy == "hybrid"
    assert config.placement == PLACEMENTS[placement or "fsdp"]
    assert config.wire.gather_dtype == ("bfloat16" if gathers else None)
    assert stages_of(config).remat == remat
    assert config.layout.rules == check_rules(gpt.rules)


@pytest.mark.parametrize(
    ("mesh", "batch_size", "requested_count", "micro_batches"),
    [
        ("auto", 16, None, 4),  # twice the stages
        ("auto", 12, None, 2),  # 6 sequences a device, which 4 does not divide
        ("auto", 16, 8, 8),
        ("auto", 16, 1, 1),
        ("pipeline=4,data=2", 16, None, 8),
        ("pipeline=8", 24, None, 8),
        ("data=8", 16, None, 1),  # no pipeline
    ],
)
def test_micro_batches_by_themselves_keep_the_stages_busy(
    mesh, batch_size, requested_count, micro_batches
):
    device_options = dataclasses.replace(HYBRID, mesh=mesh, micro_batches=requested_count)
    assert make(device_options, batch_size)[1].loss.micro_batches == micro_batches


def test_layers_that_are_given_are_kept():
    assert make(layers=6)[0] == 6
    assert make(layers=7)[0] == 7  # stages of 3 and 4
    assert make(DeviceOptions(), layers=3)[0] == 3
    assert make(DeviceOptions())[0] == 2


def test_a_pipeline_of_one_stage_has_no_schedule():
    _, config = make(dataclasses.replace(HYBRID, mesh="data=8"), schedule="interleaved")
    assert config.schedule is None


@pytest.mark.parametrize(
    ("strategy", "schedule", "kept_pipeline"),
    [
        ("fsdp", "interleaved", PipelineOptions()),
        ("hybrid", "gpipe", PipelineOptions(placement="zero1", schedule="interleaved", remat=True)),
    ],
)
def test_a_resumed_run_keeps_what_has_a_meaning_under_its_new_strategy(
    strategy, schedule, kept_pipeline
):
    before = TrainOptions(
        where=HYBRID, pipeline=PipelineOptions("zero1", "interleaved", remat=True)
    )
    now = dataclasses.replace(
        before,
        where=dataclasses.replace(HYBRID, strategy=strategy),
        pipeline=dataclasses.replace(before.pipeline, schedule=schedule),
    )
    assert saved_defaults(before, now) == dataclasses.replace(before, pipeline=kept_pipeline)
