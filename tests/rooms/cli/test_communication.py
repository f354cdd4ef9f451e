"""Replicas and reducers on the command line: what is refused, and runs that change them."""

import contextlib
import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.cli import main
from shardopt.cli._communication import combined, describe
from shardopt.cli._conditions import saved_defaults
from shardopt.cli._optimizer import make_optimizer
from shardopt.cli._options import CommunicationOptions, DeviceOptions, PipelineOptions, TrainOptions
from shardopt.cli._run_folder import read_options
from shardopt.cli._strategy import check_options, make_strategy, mesh_of
from shardopt.models import gpt


def run(*words):
    """Run the command here, and return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([str(word) for word in words]) == 0, err.getvalue()
    return re.sub(" +\n", "\n", out.getvalue())


@pytest.fixture(scope="module")
def quiet():
    """Runs without a sample of what the model writes: other tests show it.

    Here are the parameters that would write.
    """
    writers = []
    with pytest.MonkeyPatch.context() as patch:

        def write(params, *_, **__):
            return writers.append(jax.device_get(params)) or ""

        patch.setattr("shardopt.cli._train.continue_text", write)
        yield writers


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory, quiet):
    """Six steps of DiLoCo with H = 4: it ends between two synchronizations."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = (
        "--steps 6 --mesh data=2,tensor=2 --replicas 2 --sync-every 4 --reducer int8 --strategy ddp"
    )
    return folder, run(*tiny, "--run-dir", folder, *words.split())


@pytest.mark.slow
def test_a_run_with_local_updates_tells_how_they_synchronize(finished):
    folder, out = finished
    for piece in (
        "mesh       replica=2 x data=2 x tensor=2\n",
        "synchronized every 4 steps, by nesterov\n",
        (
            "these are of one replica; the shared parameters and the outer optimizer state come on"
            " top\n"
        ),
        "outer gradients by error_feedback(int8(block_size=256))\n",
    ):
        assert piece in out
    assert json.loads((folder / "config.json").read_text())["communication"]["sync_every"] == 4


@pytest.mark.slow
def test_what_writes_is_the_mean_of_the_replicas_as_they_are(finished, quiet):
    """Two steps after a synchronization.

    The last checkpoint has a state of each replica, to go on from.
    """
    options, config = read_options(finished[0]), gpt.config(dim=32, num_layers=2)
    mesh = mesh_of(options.where.mesh, jax.devices(), replicas=2)
    tx = make_optimizer(
        options.training.optimizer, learning_rate=1.0, steps=6, clip=options.training.clip
    )
    opt = make_strategy(options, tx, mesh, gpt.model(config))
    abstract = jax.eval_shape(lambda rng: gpt.init(config, rng), jax.random.key(0))
    state = jax.device_get(
        so.restore(finished[0] / "checkpoints", opt, step=6, abstract_params=abstract)
    )
    own = jax.tree.leaves(state.opt_state.params.value)
    assert max(np.abs(rows[0] - rows[1]).max() for rows in own) > 1e-4
    writer = jax.tree.leaves(quiet[0])
    for found, rows in zip(writer, own, strict=True):
        np.testing.assert_allclose(found, rows.mean(0), rtol=1e-6, atol=1e-7)
    shared = jax.tree.leaves(state.params)
    assert max(np.abs(found - x).max() for found, x in zip(writer, shared, strict=True)) > 1e-4


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("bf16", "exact(bfloat16)"),
        ("int8", "error_feedback(int8(block_size=256))"),
        ("sign", "error_feedback(sign(block_size=1024))"),
        ("top_k(density=0.05)", "error_feedback(top_k(density=0.05))"),
        ("power_sgd(rank=2)", "error_feedback(power_sgd(rank=2))"),
    ],
)
@pytest.mark.parametrize("where", ["ddp", "hybrid", "replicas"])
def test_a_reducer_is_the_one_asked_for_and_where_it_was_asked_for(asked, name, where):
    hybrid = where == "hybrid"
    options = TrainOptions(
        where=DeviceOptions(
            strategy="hybrid" if hybrid else "ddp", mesh="replica=2,data=4", micro_batches=1
        ),
        pipeline=PipelineOptions(placement="zero1" if hybrid else None),
        communication=CommunicationOptions(
            sync_every=4 if where == "replicas" else None, reducer=asked
        ),
    )
    check_options(options)
    mesh = mesh_of(options.where.mesh, jax.devices())
    config = make_strategy(options, optax.sgd(0.1), mesh, gpt.model(gpt.config())).config
    sent, other = config.wire.reducer, config.local_updates and config.local_updates.reducer
    if where == "replicas":
        sent, other = other, sent
    if hybrid and asked == "bf16":  # zero1 reduce-scatters in the dtype of an exact reducer
        assert (sent, config.wire.scatter_dtype, other) == (None, jnp.bfloat16, None)
        return
    assert (sent.name, other) == (name, None)
    what = "outer gradients" if where == "replicas" else "gradients"
    assert describe(options.communication)[-1] == ("sent", f"{what} by {name}")


def test_replicas_synchronize_by_diloco():
    inner = so.ddp(optax.sgd(0.1), so.make_mesh(replica=2), lambda params, batch: 0.0)
    options = CommunicationOptions(sync_every=6)
    config = combined(options, inner).config
    assert config.strategy == "diloco"
    assert config.local_updates.sync_every == 6
    assert describe(options) == [("replicas", "synchronized every 6 steps, by nesterov")]


@pytest.mark.parametrize(
    ("sizes", "replicas", "found"),
    [
        ("auto", None, (1, 4, 2)),
        ("auto", 2, (2, 2, 2)),
        ("auto", 4, (4, 2, 1)),
        ("data=4", 2, (2, 4, 1)),
        ("replica=2,data=-1", 2, (2, 4, 1)),
    ],
)
def test_replicas_are_an_axis_of_the_mesh(sizes, replicas, found):
    shape = dict(mesh_of(sizes, jax.devices(), replicas=replicas).shape)
    assert tuple(shape.get(axis, 1) for axis in ("replica", "data", "tensor")) == found


SAVED = CommunicationOptions(2, 8, "int8")


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ({}, SAVED),
        ({"sync_every": None}, CommunicationOptions(2, 8)),
        ({"reducer": "sign"}, SAVED),
    ],
)
def test_a_resumed_run_keeps_what_has_a_meaning_beside_what_is_asked_for(now, kept):
    options = TrainOptions(
        where=DeviceOptions(strategy="ddp"), communication=dataclasses.replace(SAVED, **now)
    )
    saved = dataclasses.replace(options, communication=SAVED)
    assert saved_defaults(saved, options).communication == kept


@pytest.mark.parametrize(
    ("strategy", "placement", "keeps"),
    [
        ("ddp", None, True),
        ("hybrid", "zero1", True),
        ("hybrid", None, False),
        ("zero1", None, False),
        ("fsdp", None, False),
    ],
)
def test_a_resumed_run_keeps_its_reducer_of_gradients_where_there_are_whole_ones(
    strategy, placement, keeps
):
    saved = CommunicationOptions(reducer="sign")
    options = TrainOptions(
        where=DeviceOptions(strategy=strategy),
        pipeline=PipelineOptions(placement=placement),
        communication=saved,
    )
    expected = saved if keeps else CommunicationOptions()
    assert saved_defaults(options, options).communication == expected


GRADIENTS = (
    "Fix: leave out what is listed, or choose --strategy ddp, or hybrid with --placement ddp or zero1; or compress outer"
    " gradients instead: --sync-every."
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--sync-every 4",
            (
                "train: --sync-every 4 is for several replicas, and there is one.\n"
                "Fix: add --replicas 2, or leave --sync-every out."
            ),
        ),
        (
            "--replicas 2 --sync-every 4 --norms-every 5",
            (
                "train: 1 option for norms of one gradient; with --sync-every the replicas train"
                " apart.\n  --norms-every 5\nFix: leave out what is listed, or train without"
                " --sync-every."
            ),
        ),
        ("--replicas 2 --sync-every 0", "train: --sync-every must be at least 1, got 0."),
        (
            "--replicas 3",
            (
                "train: 8 devices cannot be shared evenly by --replicas 3.\n"
                "Fix: choose another number of either, or name sizes with --mesh."
            ),
        ),
        (
            "--replicas 2 --mesh replica=4,data=2",
            (
                "train: --mesh replica=4,data=2 and --replicas 2 disagree.\nFix: leave one of them"
                " out."
            ),
        ),
        (
            "--reducer sign",
            (
                "train: 1 option for the mean of replicated gradients; fsdp shards them or what"
                f" they update.\n  --reducer sign\n{GRADIENTS}"
            ),
        ),
        (
            "--reducer sign --strategy hybrid --placement zero2",
            (
                "train: 1 option for the mean of replicated gradients; hybrid with --placement"
                f" zero2 shards them or what they update.\n  --reducer sign\n{GRADIENTS}"
            ),
        ),
        (
            "--strategy ddp --reducer int4",
            "train: there is no reducer 'int4'.\nFix: choose bf16, int8, sign, top_k or power_sgd.",
        ),
        (
            "--strategy ddp --reducer top_k(0.1)",
            (
                "train: --reducer top_k(0.1) cannot be read.\nFix: write a name such as top_k, or a"
                " call with keywords, such as 'top_k(density=0.05)'."
            ),
        ),
        (
            "--strategy ddp --reducer top_k(rank=4)",
            "train: --reducer top_k has no argument 'rank'.\nFix: it takes density.",
        ),
        (
            "--strategy ddp --reducer top_k(density=2)",
            (
                "top_k: density must be above 0 and at most 1, got 2.\n"
                "Fix: use 1 to send everything, 0.01 to send one entry in a hundred."
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
