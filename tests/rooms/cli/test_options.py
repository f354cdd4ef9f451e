"""Options that can be typed: mesh sizes, optimizers, help, and the errors for options that cannot."""

import dataclasses
import importlib.metadata
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.cli import main
from shardopt.cli._commands import parse
from shardopt.cli._optimizer import find_optimizer, make_optimizer, make_schedule, optimizers
from shardopt.cli._options import (
    TrainingOptions,
    TrainOptions,
    TuneOptions,
    check_numbers,
    from_json,
    to_json,
)
from shardopt.cli._strategy import mesh_of, parse_mesh
from shardopt.core._errors import calling
from shardopt.runtime._devices import start_devices

pytestmark = pytest.mark.fast


def exit_of(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    out = capsys.readouterr()
    return stopped.value.code, re.sub(r"[╭╮╰╯│─]+", "", out.out + out.err)


def test_help_lists_the_commands_that_exist_and_no_others(capsys):
    code, text = exit_of(capsys, "--help")
    assert code == 0
    assert (
        "usage: shardopt [-h] {train,tune,merge,export,generate,diff,launch,vault,plan,audit,doctor,verify}"
        in text
    )


def test_all_help_of_train_names_every_option_with_its_default(capsys):
    code, text = exit_of(capsys, "train", "--help-all")
    assert code == 0
    words = " ".join(text.split())
    for option, default in {
        "--devices": "8",
        "--mesh": "auto",
        "--strategy": "fsdp",
        "--micro-batches": "None",
        "--placement": "None",
        "--schedule": "None",
        "--remat": "False",
        "--layers": "None",
        "--gather-dtype": "None",
        "--precision": "None",
        "--optimizer": "adamw",
        "--clip": "1.0",
        "--seed": "0",
        "--data": "None",
        "--run-dir": "runs/default",
        "--resume": "False",
        "--checkpoint-every": "100",
        "--evaluate-every": "50",
        "--debug": "False",
    }.items():
        assert re.search(rf"{option}\b[^()]*(\([^()]*\)[^()]*)*\(default: {default}\)", words), (
            option
        )
    for option in ("--learning-rate", "--steps", "--batch-size", "--dim", "--heads", "--length"):
        assert option in words


def shown_options(capsys, *words):
    code, text = exit_of(capsys, *words)
    assert code == 0
    pattern = r"^(?:| |  )(?:--lr FLOAT, )?(--[a-z][a-z-]+)"
    return set(re.findall(pattern, text, re.MULTILINE)), text


@pytest.mark.parametrize(
    ("options", "command", "total"),
    [(TrainOptions(), "train", 27), (TuneOptions(), "tune", 33)],
)
def test_help_shows_at_most_30_options_and_says_where_the_others_are(
    capsys, options, command, total
):
    shown, text = shown_options(capsys, command, "--help")
    everything, _ = shown_options(capsys, command, "--help-all")
    names = {name for group in to_json(options).values() for name in group}
    assert everything == {f"--{name.replace('_', '-')}" for name in names}
    assert len(everything) == total
    assert len(shown) <= 30
    counts = re.findall(r"(\d+) more options?: --help-all", text)
    assert sum(map(int, counts)) == len(everything - shown)
    assert {"--data", "--mesh", "--resume", "--run-dir", "--steps"} <= shown


def test_help_beside_an_option_that_it_leaves_out_is_help(capsys):
    shown, _ = shown_options(capsys, "train", "--strategy", "hybrid", "--remat", "--help")
    assert "--strategy" in shown
    assert "--remat" not in shown


def test_an_option_that_help_leaves_out_works():
    assert parse(["train", "--remat", "--precision", "int8"]).model.precision == "int8"


@pytest.mark.parametrize("before", [False, True])
def test_flags_can_be_given_whatever_the_run_before_had(before):
    """A run that is resumed takes its saved options for defaults, and was perhaps resumed itself."""
    saved = TrainOptions(run=dataclasses.replace(TrainOptions().run, resume=before, debug=before))
    run_options = parse(["train", "--resume", "--debug"], saved).run
    assert (run_options.resume, run_options.debug) == (True, True)
    assert not parse(["train", "--no-debug"], saved).run.debug


def test_warnings_of_a_process_that_runs_a_command_name_no_line_of_source(monkeypatch, capsys):
    def shown():
        return warnings.formatwarning("disk is nearly full", UserWarning, "cli/_train.py", 84)

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["shardopt", "--version"])
    assert main(["--version"]) == 0  # called from Python
    assert "cli/_train.py:84" in shown()
    assert main() == 0
    assert shown() == "warning: disk is nearly full\n"


def test_version_is_one_line_of_versions_and_needs_no_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["--version"]) == 0
    versions = [
        f"{package} {importlib.metadata.version(package)}"
        for package in ("shardopt", "jax", "jaxlib")
    ]
    line = f"{', '.join(versions)}, Python {sys.version.split()[0]}\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("command", ["train", "tune"])
def test_lr_is_the_short_word_for_the_learning_rate(command):
    assert parse([command, "--lr", "0.25"]).training.learning_rate == 0.25


@pytest.mark.parametrize(
    "words",
    [(), ("trian",), ("plam",), ("train", "--strategy", "zero4")],
)
def test_words_that_are_no_options_exit_with_2(capsys, words):
    code, _ = exit_of(capsys, *words)
    assert code == 2


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=4,tensor=2", {"data": 4, "tensor": 2}),
        (" replica=2 , data=-1 ", {"replica": 2, "data": -1}),
        ("tensor=8", {"tensor": 8}),
        ("data=2,tensor=2,pipeline=2", {"data": 2, "tensor": 2, "pipeline": 2}),
    ],
)
def test_mesh_sizes_are_read(text, sizes):
    assert parse_mesh(text) == sizes


def test_every_wrong_part_of_a_mesh_is_named():
    message = (
        "train: --mesh dota=4,tensor=two,data=2,data=2,3 cannot be read.\n  'dota=4': there is no"
        " axis 'dota'\n  'tensor=two': the size must be an integer\n  'data=2': data is there"
        " twice\n  '3': there is no axis '3'\nFix: write --mesh data=4,tensor=2; the axes are"
        " replica, data, tensor, pipeline, context, expert, and one size may be -1."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_mesh("dota=4,tensor=two,data=2,data=2,3")


@pytest.mark.parametrize(("count", "tensor"), [(8, 2), (4, 2), (6, 2), (5, 1), (2, 1), (1, 1)])
def test_the_mesh_by_itself_fits_any_number_of_devices(count, tensor):
    mesh = mesh_of("auto", jax.devices()[:count])
    assert (mesh.shape["data"], mesh.shape["tensor"]) == (count // tensor, tensor)


@pytest.mark.parametrize(
    ("count", "pipeline", "tensor"),
    [(8, 2, 2), (6, 2, 1), (4, 2, 1), (2, 2, 1), (5, 1, 1), (1, 1, 1)],
)
def test_the_mesh_by_itself_has_two_stages_for_hybrid_where_it_can(count, pipeline, tensor):
    mesh = mesh_of("auto", jax.devices()[:count], pipelined=True)
    assert dict(mesh.shape) == {
        "data": count // pipeline // tensor,
        "pipeline": pipeline,
        "tensor": tensor,
    }


def test_a_mesh_that_names_tensor_alone_leaves_no_device_out():
    with pytest.raises(
        ValueError, match=r"^train: --mesh tensor=4 needs 4 devices, but there are 8\."
    ):
        mesh_of("tensor=4", jax.devices())
    assert mesh_of("tensor=8", jax.devices()).shape["tensor"] == 8


def test_the_number_of_devices_is_positive():
    with pytest.raises(ValueError, match=r"^train: --devices must be at least 1, got 0\.$"):
        calling("train")(start_devices)(0)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("adamw", "adamw", {}),
        ("optax.contrib.muon", "contrib.muon", {}),
        ("sgd(momentum=0.9, nesterov=True)", "sgd", {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_optimizers_are_read(text, name, arguments):
    factory, parsed_arguments = find_optimizer(text)
    assert (factory, parsed_arguments) == (optimizers()[name], arguments)


@pytest.mark.parametrize(
    "text", ["adamw(", "adamw(0.9)", "adamw(b2=x)", "adamw(**{})", "", "__import__('os')"]
)
def test_anything_but_a_name_with_literal_arguments_is_refused(text):
    message = (
        f"train: --optimizer {text} cannot be read.\n"
        "Fix: write a name such as adamw, or a call with keywords, such as 'adamw(b2=0.99)'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_optimizer(text)


@pytest.mark.parametrize(
    "text",
    [
        "adamw(b1='x')",
        "adamw(b1=None)",
        "adamw(mask=[1, 2])",
        "sgd(momentum=[1])",
        "adamw(mu_dtype='flat32')",
        "contrib.muon(ns_steps=1.5)",
    ],
)
def test_arguments_with_which_an_optimizer_cannot_run_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"--optimizer {text} cannot run: ")):
        make_optimizer(text, learning_rate=0.1, steps=4, clip=1.0)
    with pytest.raises(ValueError, match=re.escape(f"--optimizer {text} cannot run: ")):
        find_optimizer(text)  # as `plan` does


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        (
            "adamv",
            "optax has no optimizer 'adamv' that a learning rate is enough for.",
            "did you mean ",
        ),
        (
            "muon",
            "optax has no optimizer 'muon' that a learning rate is enough for.",
            "did you mean contrib.muon?",
        ),
        (
            "contrib.sophia",
            "optax has no optimizer 'contrib.sophia' that a learning rate is enough for.",
            "",
        ),
        (
            "1 + 1",
            "optax has no optimizer '1 + 1' that a learning rate is enough for.",
            "choose one of adabelief, ",
        ),
        (
            "sgd(b2=1, b3=1)",
            "--optimizer sgd has no argument 'b2' or 'b3'.",
            "it takes momentum, nesterov",
        ),
    ],
)
def test_unknown_optimizers_and_arguments_are_refused_with_what_is_near(text, problem, fix):
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'train: {problem}')}\nFix: {re.escape(fix)}"
    ):
        make_optimizer(text, learning_rate=0.1, steps=10, clip=1.0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"learning_rate": 0.0}, "train: --learning-rate must be finite, above 0; got 0.0."),
        ({"steps": 0}, "train: --steps must be at least 1, got 0."),
        ({"clip": -1.0}, "train: --clip must be finite, at least 0; got -1.0."),
        *[
            (
                {"seed": seed},
                f"train: --seed must be finite, at least 0 and below 4.29497e+09; got {seed}.",
            )
            for seed in (-1, 2**32, 10**20)
        ],
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_numbers(TrainingOptions(**numbers))


def test_the_learning_rate_rises_in_a_line_and_falls_to_a_tenth():
    schedule = make_schedule(1.0, 100)
    np.testing.assert_allclose(
        [schedule(step) for step in (0, 5, 10, 100)], [0.1, 0.55, 1.0, 0.1], rtol=1e-5
    )
    assert schedule(55) == pytest.approx(0.55)
    for steps in (1, 2, 3):
        assert all(np.isfinite(make_schedule(1.0, steps)(step)) for step in range(steps + 1))


def test_an_optimizer_follows_the_schedule_clips_and_shows_its_rate():
    tx = make_optimizer("sgd(momentum=0.5)", learning_rate=1.0, steps=100, clip=2.0)
    params = {"w": jnp.zeros(4)}
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.full(4, 10.0)}, state, params)
    # rate 0.1, gradient clipped to norm 2
    np.testing.assert_allclose(updates["w"], -0.1 * 1.0, rtol=1e-5)
    assert so.training.hyperparams(so.TrainState(0, params, state, None)) == {
        "learning_rate": pytest.approx(0.1)
    }


@pytest.mark.parametrize(
    "name",
    tiered(
        ["adamw", "rprop", "sm3", "contrib.muon", "lbfgs"],
        lambda name: name in ("adamw", "contrib.muon"),
    ),
)
def test_any_optimizer_of_optax_trains_also_one_that_knows_nothing_of_schedules(name, mesh_of):
    assert name in optimizers()
    tx = make_optimizer(name, learning_rate=0.01, steps=10, clip=0.0)
    opt = so.ddp(tx, mesh_of(data=2), lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
    state = opt.init({"w": jnp.ones((8, 4))})
    losses = []
    for _ in range(3):
        state, metrics = opt.step(state, np.ones((4, 8), np.float32))
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]


def test_only_what_needs_no_more_than_a_learning_rate_is_offered():
    assert {"adamw", "sgd", "lion", "lamb", "adafactor", "contrib.muon"} <= set(optimizers())
    assert not {
        "inject_hyperparams",
        "scale_by_adam",
        "scale_by_learning_rate",
        "contrib.sam",
    } & set(optimizers())
    assert all(
        callable(getattr(optax.contrib if "." in name else optax, name.split(".")[-1]))
        for name in optimizers()
    )


def test_options_survive_json_and_take_defaults_for_what_is_not_in_it():
    assert from_json(to_json(TrainOptions())) == TrainOptions()
    saved = to_json(TrainOptions())
    saved["model"]["dim"] = 64
    del saved["model"]["heads"], saved["run"]
    assert from_json(saved).model.dim == 64
    assert from_json(saved).run == TrainOptions().run
