"""Replicas and reducers on the command line: what they send, what is refused, and runs that change
them.
"""

import contextlib
import dataclasses
import io
import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.cli import main
from shardopt.cli._communication import (
    SentBytes,
    as_sent,
    combined,
    describe,
    make_reducer,
    measure,
    outer_optimizer,
    traffic_text,
)
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
        "--steps 6 --mesh data=2,tensor=2 --replicas 2 --sync-every 4 --reducer int8"
        " --reducer-warmup-steps 1 --strategy ddp"
    )
    return folder, run(*tiny, "--run-dir", folder, *words.split())


@pytest.mark.slow
def test_a_run_with_local_updates_tells_how_they_synchronize_and_what_they_send(finished):
    folder, out = finished
    held, shard = 172_672, 86_656  # bytes of the parameters; of what tensor=2 leaves to a device
    config = gpt.GPTConfig(dim=32, num_layers=2)
    assert held == 4 * gpt.num_parameters(config)
    int8 = so.reducers.int8().wire_bytes(jax.ShapeDtypeStruct((shard // 4,), np.float32), 2)
    # data=2 every step, replica=2 every fourth; ddp over all four
    sent, ddp = shard + int8 / 4, 2 * 3 / 4 * shard
    for piece in (
        "mesh       replica=2 x data=2 x tensor=2\n",
        "synchronized every 4 steps, by nesterov, rate 0.7, momentum 0.9\n",
        (
            "these are of one replica; the shared parameters and the outer optimizer state come on"
            " top\n"
        ),
        (
            "(read off the compiled programs; mean of the 4 steps from one synchronization to the"
            " next)\n"
        ),
    ):
        assert piece in out
    assert "outer gradients by error_feedback(warm_up(int8(block_size=256), steps=1)) " in " ".join(
        out.split()
    )
    (found,) = re.findall(
        r"sent by each device over replica x data: .* a step, (.*)% of the 130 kB of ddp", out
    )
    assert float(found) / 100 == pytest.approx(sent / ddp, rel=2e-3)
    assert json.loads((folder / "config.json").read_text())["communication"]["sync_every"] == 4


@pytest.mark.slow
def test_what_writes_is_the_mean_of_the_replicas_as_they_are(finished, quiet):
    """Two steps after a synchronization.

    The last checkpoint has a state of each replica, to go on from.
    """
    options, config = read_options(finished[0]), gpt.GPTConfig(dim=32, num_layers=2)
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


@pytest.mark.slow
def test_replicas_go_on_as_one_from_their_mean(finished, tmp_path, quiet):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    words = "--steps 7 --sync-every None --replicas None --mesh data=4,tensor=2"
    out = run("train", "--resume", "--run-dir", folder, *words.split())
    assert "Kept of step 6: parameters and optimizer state, the mean of 2 replicas.\n" in out
    assert "error_feedback" not in out  # int8 was for the outer gradients
    assert "sent by each device over data: 130 kB a step, 100.01% of the 130 kB of ddp\n" in out
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [4, 6, 7]
    assert logged[2]["val_loss"] == pytest.approx(logged[1]["val_loss"], abs=0.1)


@pytest.mark.parametrize(
    ("asked", "feedback", "name"),
    [
        ("bf16", True, "exact(bfloat16)"),
        ("int8", True, "error_feedback(int8(block_size=256))"),
        ("int8(block_size=64)", False, "int8(block_size=64)"),
        ("sign", True, "error_feedback(sign(block_size=1024))"),
        ("top_k(density=0.05)", True, "error_feedback(top_k(density=0.05))"),
        ("power_sgd(rank=2)", True, "error_feedback(power_sgd(rank=2))"),
    ],
)
@pytest.mark.parametrize("where", ["ddp", "hybrid", "replicas"])
def test_a_reducer_is_the_one_asked_for_and_where_it_was_asked_for(asked, feedback, name, where):
    hybrid = where == "hybrid"
    options = TrainOptions(
        where=DeviceOptions(
            strategy="hybrid" if hybrid else "ddp", mesh="replica=2,data=4", micro_batches=1
        ),
        pipeline=PipelineOptions(placement="zero1" if hybrid else None),
        communication=CommunicationOptions(
            sync_every=4 if where == "replicas" else None, reducer=asked, error_feedback=feedback
        ),
    )
    check_options(options)
    mesh = mesh_of(options.where.mesh, jax.devices())
    config = make_strategy(options, optax.sgd(0.1), mesh, gpt.model(gpt.GPTConfig())).config
    sent, other = config.wire.reducer, config.local_updates and config.local_updates.reducer
    if where == "replicas":
        sent, other = other, sent
    if hybrid and asked == "bf16":  # zero1 reduce-scatters in the dtype of an exact reducer
        assert (sent, config.wire.scatter_dtype, other) == (None, jnp.bfloat16, None)
        return
    assert (sent.name, other) == (name, None)
    what = "outer gradients" if where == "replicas" else "gradients"
    assert describe(options.communication)[-1] == ("sent", f"{what} by {name}")


def test_a_reducer_can_warm_up_inside_its_error_feedback():
    asked = CommunicationOptions(reducer="sign", reducer_warmup_steps=7)
    reducer = make_reducer(asked)
    assert reducer is not None
    assert reducer.name == "error_feedback(warm_up(sign(block_size=1024), steps=7))"
    for sync_every, taken_over in ((None, 7), (4, 28)):
        options = TrainOptions(communication=dataclasses.replace(asked, sync_every=sync_every))
        assert as_sent(options, taken_over).communication == CommunicationOptions(
            sync_every=sync_every, reducer="sign"
        )
        assert as_sent(options, taken_over - 1).communication == CommunicationOptions(
            sync_every=sync_every
        )


@pytest.mark.parametrize(
    ("asked", "strategy", "how", "line"),
    [
        (
            CommunicationOptions(sync_every=6, outer="average", warmup_sync_steps=2),
            "local_sgd",
            (6, 2, 1, 0, 0.0),
            "synchronized every 6 steps, by their average",
        ),
        (
            CommunicationOptions(sync_every=6, fragments=2, delay=1, mix=0.5),
            "diloco",
            (6, 0, 2, 1, 0.5),
            "synchronized every 6 steps, by nesterov, rate 0.7, momentum 0.9",
        ),
        (
            CommunicationOptions(sync_every=1, outer="sgd", outer_momentum=0.5),
            "diloco",
            (1, 0, 1, 0, 0.0),
            "synchronized every 1 step, by sgd, rate 1, momentum 0.5",
        ),
    ],
)
def test_replicas_synchronize_as_asked(asked, strategy, how, line):
    inner = so.ddp(optax.sgd(0.1), so.make_mesh(replica=2), lambda params, batch: 0.0)
    config = combined(asked, inner).config
    assert config.strategy == strategy
    sync = config.local_updates
    assert (sync.sync_every, sync.warmup_steps, sync.fragments, sync.delay, sync.mix) == how
    assert describe(asked)[0] == ("replicas", line)


@pytest.mark.parametrize(
    ("asked", "rate", "momentum"),
    [
        (CommunicationOptions(sync_every=1), 0.7, 0.9),
        (
            CommunicationOptions(sync_every=1, outer="nesterov", outer_lr=0.5, outer_momentum=0.0),
            0.5,
            0.0,
        ),
        (CommunicationOptions(sync_every=1, outer="sgd"), 1.0, 0.0),
        (
            CommunicationOptions(sync_every=1, outer="sgd", outer_lr=0.1, outer_momentum=0.8),
            0.1,
            0.8,
        ),
    ],
)
def test_the_outer_optimizer_is_the_one_asked_for(asked, rate, momentum):
    found = outer_optimizer(asked)
    expected = optax.sgd(rate, momentum=momentum or None, nesterov=asked.outer != "sgd")
    params = {"w": np.float32(1)}
    state, other = found.init(params), expected.init(params)
    for grad in (1.0, -0.5, 0.25):
        updates, state = found.update({"w": np.float32(grad)}, state, params)
        wanted, other = expected.update({"w": np.float32(grad)}, other, params)
        np.testing.assert_allclose(updates["w"], wanted["w"], rtol=1e-6)


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


SAVED = CommunicationOptions(2, 8, "sgd", 0.5, 0.5, 2, 1, 0.5, 0, "int8", False, 3)


@pytest.mark.parametrize(
    ("strategy", "now", "kept"),
    [
        ("ddp", {}, SAVED),
        ("ddp", {"sync_every": None}, CommunicationOptions(2, 8)),
        ("ddp", {"outer": "average"}, CommunicationOptions(2, 8, "sgd")),
        (
            "ddp",
            {"outer": "nesterov"},
            dataclasses.replace(SAVED, outer_lr=None, outer_momentum=None),
        ),
        (
            "ddp",
            {"reducer": "sign"},
            dataclasses.replace(SAVED, error_feedback=True, reducer_warmup_steps=0),
        ),
    ],
)
def test_a_resumed_run_keeps_what_has_a_meaning_beside_what_is_asked_for(strategy, now, kept):
    options = TrainOptions(
        where=DeviceOptions(strategy=strategy), communication=dataclasses.replace(SAVED, **now)
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
    saved = CommunicationOptions(reducer="sign", error_feedback=False, reducer_warmup_steps=9)
    options = TrainOptions(
        where=DeviceOptions(strategy=strategy),
        pipeline=PipelineOptions(placement=placement),
        communication=saved,
    )
    expected = saved if keeps else CommunicationOptions()
    assert saved_defaults(options, options).communication == expected


def test_traffic_that_cannot_be_told_is_called_unknown():
    text = traffic_text(SentBytes(math.nan, 2e6, ("data",), 1))
    assert text.startswith(
        "sent by each device over data: unknown, as a loop of the program does not tell"
    )
    assert text.endswith("; ddp sends 2 MB a step")


@pytest.mark.parametrize("delay", tiered([0, 1], bool))
def test_traffic_counts_each_fragment_once_a_round(delay):
    """On data the gradients of every step; on replica each half of the model once in four steps."""
    mesh, size = so.make_mesh(replica=4, data=2), 2 * 64 * 32 * 4

    def loss_fn(params, batch):
        return ((batch @ params["a"] @ params["b"].T) ** 2).mean()

    inner = so.ddp(optax.sgd(0.1), mesh, loss_fn)
    opt = so.diloco(inner, sync_every=4, fragments=2, delay=delay)
    state = opt.init({"a": np.ones((64, 32), np.float32), "b": np.ones((64, 32), np.float32)})
    found = measure(opt, state, np.ones((8, 64), np.float32))
    assert found.sent == pytest.approx(size * 2 / 2 + size * 2 * 3 / 4 / 4, abs=32)  # and the loss
    assert (found.ddp, found.axes, found.steps) == (size * 2 * 7 / 8, ("replica", "data"), 4)


STAGES, MICRO, LAYERS, WIDTH, ROWS = 2, 4, 4, 64, 32


@pytest.mark.parametrize(
    ("placement", "local", "times"),
    # fsdp gathers forward and backward and scatters, each micro-batch; a ring sends half of what an
    # all-reduce does
    tiered(
        [
            ("fsdp", False, 3 * MICRO / 2),
            ("zero1", False, 1),
            ("ddp", False, 1),
            ("fsdp", True, 3 * MICRO / 2),
        ],
        lambda row: row[0] == "ddp",
    ),
)
def test_a_pipeline_sends_what_its_schedule_runs(placement, local, times):
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=lambda w, x: x + jax.numpy.tanh(x @ w["kernel"]),
        loss=lambda outer, x, batch: ((x - batch) ** 2).mean(),
    )
    mesh = so.make_mesh(replica=2 if local else 1, data=2 if local else 4, pipeline=STAGES)
    how = {
        "schedule": so.schedules.eager_one_f_one_b,
        "micro_batches": MICRO,
        "placement": placement,
    }
    opt = so.hybrid(optax.sgd(0.1), mesh, model, **how)
    if local:
        opt = so.local_sgd(opt, sync_every=4)
    state = opt.init({"blocks": {"kernel": np.full((LAYERS, WIDTH, WIDTH), 1e-2, np.float32)}})
    found = measure(opt, state, np.ones((ROWS, WIDTH), np.float32))

    held, data = LAYERS / STAGES * WIDTH * WIDTH * 4, mesh.shape["data"]
    expected = 2 * (data - 1) / data * held * times
    if local:  # and once in four steps the average of two replicas, of shards
        expected += 2 * (1 / 2) * held / data / 4
    assert found.sent == pytest.approx(expected, rel=0.01)
    size = mesh.size // STAGES
    assert found.ddp == pytest.approx(2 * (size - 1) / size * held)


GRADIENTS = (
    "Fix: leave out what is listed, or choose --strategy ddp, or hybrid with --placement ddp or zero1; or compress outer"
    " gradients instead: --sync-every."
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--outer sgd --delay 1",
            (
                "train: 2 options for local updates, and no --sync-every.\n  --outer sgd\n  --delay"
                " 1\nFix: leave out what is listed, or give the steps between synchronizations:"
                " --sync-every 50."
            ),
        ),
        (
            "--replicas 2 --sync-every 4 --outer average --outer-lr 0.5 --reducer int8",
            (
                "train: 2 options for an outer optimizer; --outer average has none.\n  --outer-lr"
                " 0.5\n  --reducer int8\nFix: leave out what is listed, or choose --outer sgd,"
                " which averages by default too."
            ),
        ),
        (
            "--replicas 2 --sync-every 4 --warmup-sync-steps 3",
            (
                "train: 1 option for --outer average.\n  --warmup-sync-steps 3\n"
                "Fix: leave out what is listed, or choose --outer average."
            ),
        ),
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
        ("--replicas 2 --sync-every 4 --delay -1", "train: --delay must be at least 0, got -1."),
        (
            "--replicas 2 --sync-every 4 --outer-lr 0",
            "train: --outer-lr must be finite, above 0; got 0.0.",
        ),
        (
            "--replicas 2 --sync-every 4 --outer-momentum 1",
            "train: --outer-momentum must be finite, at least 0 and below 1; got 1.0.",
        ),
        (
            "--replicas 2 --sync-every 4 --fragments 3",
            (
                "diloco: sync_every=4 is not divisible by fragments=3, remainder 1.\nFix: use"
                " sync_every=3 or 6."
            ),
        ),
        (
            "--replicas 2 --sync-every 4 --fragments 2 --delay 2",
            (
                "diloco: delay=2 must be below sync_every / fragments = 2: the next fragment is"
                " sent then.\nFix: use a delay of at most 1, or sync less often."
            ),
        ),
        ("--replicas 2 --sync-every 4 --mix 2", "diloco: mix must be between 0 and 1, got 2.0."),
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
            "--strategy ddp --no-error-feedback",
            (
                "train: 1 option for a reducer, and there is none.\n  --no-error-feedback\n"
                "Fix: leave out what is listed, or choose one with --reducer."
            ),
        ),
        (
            "--strategy ddp --reducer bf16 --no-error-feedback",
            (
                "train: --no-error-feedback has no meaning for bf16, which rounds and feeds nothing"
                " back.\nFix: leave it out."
            ),
        ),
        (
            "--strategy ddp --reducer-warmup-steps 3",
            (
                "train: 1 option for a reducer, and there is none.\n  --reducer-warmup-steps 3\n"
                "Fix: leave out what is listed, or choose one with --reducer."
            ),
        ),
        (
            "--strategy ddp --reducer sign --reducer-warmup-steps -1",
            "train: --reducer-warmup-steps must be at least 0, got -1.",
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
            "train: --reducer top_k has no argument 'rank'.\nFix: it takes density, momentum.",
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
