"""Evaluation of sets of any size equals numpy on the whole set at once, also where rows weigh
unevenly.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.training import evaluation


def token_loss(params, batch):
    """A masked loss, a mean over rows, and a metric with a weight of its own."""
    error = (batch["x"] @ params["w"] - batch["y"]) ** 2  # [rows, 3]
    masked = so.losses.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())
    largest = error.max(axis=1)
    of_positive = so.losses.Weighted(
        (largest * (batch["x"][:, 0] > 0)).sum(), (batch["x"][:, 0] > 0).sum()
    )
    return masked, {"largest": largest.mean(), "of_positive": of_positive}


def row_loss(params, batch):
    return (jnp.abs(batch["x"] @ params["w"] - batch["y"])).mean()


BLOCKS = so.BlockModel(
    embed=lambda outer, batch: batch["x"],
    block=lambda w, x: x + w["scale"] * x,
    loss=lambda outer, x, batch: token_loss(outer, batch | {"x": x}),
)


def rows_of(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 8))
    y = rng.normal(size=(count, 3))
    mask = (rng.random(size=(count, 3)) < np.linspace(0.1, 1, count)[:, None]) | (np.arange(3) == 0)
    return {
        name: value.astype(np.float32) for name, value in {"x": x, "y": y, "mask": mask}.items()
    }


def cut_at(rows, *sizes):
    edges = np.cumsum((0, *sizes))
    return [
        {name: value[a:b] for name, value in rows.items()} for a, b in itertools.pairwise(edges)
    ]


def expected(rows, w):
    """Return the metrics by numpy, in double precision."""
    rows = {name: value.astype(np.float64) for name, value in rows.items()}
    error = (rows["x"] @ w - rows["y"]) ** 2
    positive = rows["x"][:, 0] > 0
    return {
        "val_loss": (error * rows["mask"]).sum() / rows["mask"].sum(),
        "val_largest": error.max(1).mean(),
        "val_of_positive": (
            error.max(1)[positive].sum() / positive.sum() if positive.any() else np.nan
        ),
    }


W = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)

OPTIMIZERS = {
    "ddp": lambda: so.ddp(optax.sgd(0.1), so.make_mesh(), token_loss),
    "replicas": lambda: so.fsdp(
        optax.sgd(0.1),
        so.make_mesh(replica=2, data=4),
        token_loss,
        micro_batches=2,
        min_shard_elements=1,
    ),
    "hsdp": lambda: so.fsdp(
        optax.adam(0.1),
        so.make_mesh(replica=4, data=2),
        token_loss,
        min_shard_elements=1,
    ),
    "diloco": lambda: so.diloco(
        so.ddp(optax.sgd(0.1), so.make_mesh(replica=2, data=4), token_loss), sync_every=2
    ),
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    tiered(
        [
            ("ddp", (1,)),
            ("ddp", (7,)),
            ("ddp", (8, 5)),
            ("ddp", (64,)),
            ("replicas", (16, 16, 13)),
            ("replicas", (19, 1, 5)),
            ("hsdp", (8, 3)),
            ("diloco", (8, 7)),
        ],
        quick=lambda row: row in (("ddp", (8, 5)), ("replicas", (19, 1, 5))),
        ids=lambda row: f"{row[0]}-{'+'.join(map(str, row[1]))}",
    ),
)
def test_any_set_equals_numpy_on_the_whole(name, sizes):
    opt = OPTIMIZERS[name]()
    rows = rows_of(sum(sizes))
    metrics = evaluation(opt, cut_at(rows, *sizes))(opt.init({"w": W}))
    assert metrics == pytest.approx(expected(rows, W), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    "sizes", tiered([((8, 7),), ((4,),), ((3, 1),)], quick=lambda row: row[0] == (8, 7))
)
def test_a_pipeline_evaluates_sets_of_any_size(sizes):
    opt = so.hybrid(
        optax.sgd(0.1),
        so.make_mesh(data=2, pipeline=2, devices=jax.devices()[:4]),
        BLOCKS,
        micro_batches=2,
    )
    rows = rows_of(sum(sizes))
    state = opt.init({"blocks": {"scale": np.array([0.5, 1.0], np.float32)}, "w": W})
    metrics = evaluation(opt, cut_at(rows, *sizes))(state)
    assert metrics == pytest.approx(expected(rows | {"x": 3 * rows["x"]}, W), rel=1e-5)


def test_a_metric_that_is_an_array_is_a_list_of_numbers():
    def loss_fn(params, batch):
        return row_loss(params, batch), {
            "mean": batch["x"].mean(0),
            "table": jnp.ones((2, 3)),
            "sum": so.losses.Sum(batch["y"].sum(0)),
        }

    opt = so.ddp(optax.sgd(0.1), so.make_mesh(), loss_fn)
    rows = rows_of(21)
    metrics = evaluation(opt, cut_at(rows, 8, 16))(opt.init({"w": np.zeros((8, 3), np.float32)}))
    np.testing.assert_allclose(metrics["val_mean"], rows["x"].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["val_sum"], rows["y"].sum(0), rtol=1e-5, atol=1e-5)
    assert metrics["val_table"] == [[1.0] * 3] * 2


def test_an_evaluation_may_have_a_loss_of_its_own():
    """If the strategy has `evaluate_fn`, `opt.evaluate` runs it.

    If `evaluation` has it, only that evaluation runs it. Training does not change.
    """
    mesh = so.make_mesh(data=2, devices=jax.devices()[:2])
    rows = rows_of(5)
    wanted = np.abs(rows["x"] @ W - rows["y"]).mean()
    plain = so.ddp(optax.sgd(0.1), mesh, token_loss)
    row_opt = so.ddp(optax.sgd(0.1), mesh, token_loss, evaluate_fn=row_loss)
    state = row_opt.init({"w": W})
    assert evaluation(row_opt, [rows])(state) == pytest.approx({"val_loss": wanted})
    assert evaluation(plain, [rows], evaluate_fn=row_loss, prefix="")(state) == pytest.approx(
        {"loss": wanted}
    )
    (four,) = cut_at(rows, 4)
    assert float(row_opt.evaluate(state, four)["loss"]) == pytest.approx(
        np.abs(four["x"] @ W - four["y"]).mean()
    )
    _, metrics = row_opt.step(state, four)
    assert float(metrics["loss"]) == pytest.approx(expected(four, W)["val_loss"])


@pytest.mark.parametrize(
    ("evaluate_fn", "message"),
    [
        (
            "mse",
            (
                "ddp: evaluate_fn must be a function (params, batch) -> loss, or a BlockModel, got"
                " 'mse'.\nFix: pass evaluate_fn=loss, or leave it out to evaluate loss_fn."
            ),
        ),
        (
            BLOCKS,
            (
                "ddp: evaluate_fn is a BlockModel, but loss_fn is not.\nFix: train on the"
                " BlockModel too, or pass lambda params, batch: model.loss_fn(params, batch)."
            ),
        ),
    ],
)
def test_a_loss_that_cannot_run_is_refused(evaluate_fn, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        so.ddp(optax.sgd(0.1), so.make_mesh(), token_loss, evaluate_fn=evaluate_fn)
    with pytest.raises(TypeError, match=re.escape(message.replace("ddp", "evaluation", 1))):
        evaluation(
            so.ddp(optax.sgd(0.1), so.make_mesh(), token_loss),
            [rows_of(8)],
            evaluate_fn=evaluate_fn,
        )


def test_a_loss_alone_is_no_strategy():
    message = (
        "evaluation: opt must be a so.ShardedOptimizer, got function.\n"
        "Fix: pass what so.ddp, so.zero, so.fsdp or so.hybrid returns."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        evaluation(row_loss, [rows_of(8)])


def test_a_loss_that_mixes_rows_is_refused_or_evaluated_whole():
    """A perplexity: the exponential of a mean is no mean.

    In the global view a batch runs at once, of one row too.
    """
    mesh = so.make_mesh(data=2, devices=jax.devices()[:2])
    rows = rows_of(1)

    def perplexity(params, batch):
        return jnp.exp(row_loss(params, batch))

    for view in ("per_device", "global"):
        opt = so.ddp(optax.sgd(0.1), mesh, row_loss, view=view)
        evaluate = evaluation(opt, [rows], evaluate_fn=perplexity)
        state = opt.init({"w": W})
        if view == "per_device":
            # one row alone is a mean of one
            evaluate = evaluation(opt, [rows_of(3)], evaluate_fn=perplexity)
            with pytest.raises(
                so.errors.NotSeparableError,
                match=r"^ddp: the loss is not shown to be a \(weighted\) mean over rows",
            ):
                evaluate(state)
        else:
            assert evaluate(state)["val_loss"] == pytest.approx(
                np.exp(np.abs(rows["x"] @ W - rows["y"]).mean())
            )


def test_stages_want_blocks_to_evaluate():
    message = (
        "hybrid: evaluate_fn must be a BlockModel, because the stages of the pipeline hold its"
        " blocks.\nFix: pass model._replace(loss=...), or so.BlockModel(...)."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        so.hybrid(
            optax.sgd(0.1),
            so.make_mesh(data=4, pipeline=2),
            BLOCKS,
            micro_batches=2,
            evaluate_fn=row_loss,
        )


def test_what_has_no_weight_is_no_number():
    opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), token_loss)
    rows = rows_of(3)
    metrics = evaluation(opt, [rows | {"mask": np.zeros_like(rows["mask"])}])(opt.init({"w": W}))
    assert np.isnan(metrics["val_loss"])
    assert np.isfinite(metrics["val_largest"])
