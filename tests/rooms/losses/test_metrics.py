"""What becomes of metrics and of losses with several weights, however the batch is cut: numpy on
the whole batch.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so

ROWS = np.arange(16.0) ** 1.5
X = {"x": np.stack([ROWS, -ROWS, np.sin(ROWS), np.ones(16)], axis=1), "mask": ROWS % 3 > 1}


def told(x, mask):
    """One metric of each kind, and what numpy makes of it on the whole batch."""
    values = x[:, 0] + x[:, 2]
    metrics = {
        "mean": values.mean(),
        "of_masked": so.losses.Weighted((values * mask).sum(), mask.sum()),
        "two_terms": so.losses.Weighted(
            ((values * mask).sum(), values.sum()), (mask.sum(), 4.0 * len(x))
        ),
        "tokens": so.losses.Sum(mask.sum()),
        "any": so.losses.Max(mask.any()),
        "total": so.losses.Sum(values.sum()),
        "largest": so.losses.Max(values.max()),
        "smallest": so.losses.Min(values.min()),
        "longest": so.losses.Max((100 * values).astype(np.int32).max()),
        "columns": so.losses.Min(x.min(0)),
    }
    return (
        {name: wanted(metric) for name, metric in metrics.items()}
        if isinstance(x, np.ndarray)
        else metrics
    )


def wanted(metric):
    if isinstance(metric, so.losses.Weighted):
        terms = metric if isinstance(metric.total, tuple) else ([metric.total], [metric.weight])
        return sum(total / weight for total, weight in zip(*terms, strict=True))
    return metric.value if isinstance(metric, tuple) else metric


def loss_fn(params, batch):
    return params * batch["x"].mean(), told(batch["x"], batch["mask"])


def block_loss(outer, x, batch):
    return x.mean(), told(batch["x"], batch["mask"])


BLOCKS = so.BlockModel(
    lambda outer, batch: batch["x"], lambda scale, x: x * scale[None], block_loss
)
PARAMS = {"blocks": np.ones((2, 4))}


def check(metrics):
    expected = told(X["x"], X["mask"])
    assert {name: metrics[name].shape for name in expected} == {
        name: np.shape(x) for name, x in expected.items()
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-12, err_msg=name)
    assert metrics["tokens"].dtype.kind == metrics["longest"].dtype.kind == "i"


def test_nan_of_one_device_is_the_extreme_of_all(mesh_of):
    def loss_fn(params, batch):
        return params * batch.mean(), {
            "largest": so.losses.Max(batch.max()),
            "smallest": so.losses.Min(batch.min()),
        }

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=4), loss_fn)
    batch = np.arange(16.0)
    _, metrics = opt.step(opt.init(np.float32(1)), batch)
    assert (metrics["largest"], metrics["smallest"]) == (15, 0)
    batch[5] = np.nan
    _, metrics = opt.step(opt.init(np.float32(1)), batch)
    assert np.isnan([metrics["largest"], metrics["smallest"]]).all()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"micro_batches": 2}, marks=pytest.mark.fast),
        pytest.param({"view": "global"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_metrics_of_each_kind_are_combined(options, mesh_of, x64):
    opt = so.fsdp(optax.sgd(0.1), mesh_of(replica=2, data=2), loss_fn, **options)
    state = opt.init(np.ones(()))
    check(opt.evaluate(state, X))
    check(opt.step(state, X)[1])


@pytest.mark.slow  # contract/test_hybrid_features.py has most kinds
def test_a_pipeline_combines_metrics_of_each_kind(mesh_of, x64):
    opt = so.hybrid(optax.sgd(0.1), mesh_of(data=2, pipeline=2), BLOCKS, micro_batches=2)
    state = opt.init(PARAMS)
    check(opt.evaluate(state, X))
    check(opt.step(state, X)[1])


def test_replicas_that_train_apart_average_their_metrics(mesh_of, x64):
    opt = so.local_sgd(so.ddp(optax.sgd(0.1), mesh_of(replica=2, data=2), loss_fn), sync_every=2)
    metrics = opt.step(opt.init(np.ones(())), X)[1]
    union_metrics, *halves = (
        told(X["x"][rows], X["mask"][rows]) for rows in (slice(16), slice(8), slice(8, 16))
    )
    for name in ("mean", "of_masked", "two_terms"):
        np.testing.assert_allclose(
            metrics[name], (halves[0][name] + halves[1][name]) / 2, rtol=1e-12
        )
        metrics[name] = np.asarray(union_metrics[name])
    check(metrics)


def rows(start, stop):
    return jax.tree.map(lambda x: x[start:stop], X)


def test_of_workers_whose_pushes_are_one_update(x64):
    shares = [rows(0, 6), rows(6, 16)]
    opt = so.async_sgd(optax.sgd(0.1), loss_fn, workers=2)
    history = opt.run(np.ones(()), lambda worker: [shares[worker]], num_updates=1).metrics[
        "history"
    ]
    check({name: values[0] for name, values in history.items()})


def test_of_islands_over_the_steps_of_a_round(x64):
    shares = [[rows(0, 4), rows(4, 8)], [rows(8, 12), rows(12, 16)]]
    islands = [
        so.ddp(optax.sgd(0.1), so.make_mesh(devices=jax.devices()[i : i + 2]), loss_fn)
        for i in (0, 2)
    ]
    opt = so.parameter_server.async_local_sgd(islands, local_steps=2, max_staleness=0)
    history = opt.run(np.ones(()), lambda worker: shares[worker], num_updates=1).metrics["history"]
    history = {name: values[0] for name, values in history.items()}
    union_metrics, *parts = (
        told(batch["x"], batch["mask"]) for batch in (X, *shares[0], *shares[1])
    )
    for name in ("mean", "of_masked", "two_terms"):
        np.testing.assert_allclose(
            history[name], np.mean([part[name] for part in parts]), rtol=1e-12
        )
        history[name] = np.asarray(union_metrics[name])
    check(history)


def test_of_each_kind_over_batches_that_devices_do_not_divide(mesh_of, x64):
    def plain(params, batch):
        return (loss_fn(params, batch)[0], told(batch["x"], batch["mask"]) | {"columns": 0.0})

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), plain, micro_batches=2)
    batches = [jax.tree.map(lambda x: x[:11], X), jax.tree.map(lambda x: x[11:], X)]
    val_metrics = so.training.evaluation(opt, batches, prefix="")(opt.init(np.ones(())))
    expected = told(X["x"], X["mask"])
    for name in expected.keys() - {"columns"}:
        np.testing.assert_allclose(val_metrics[name], expected[name], rtol=1e-12, err_msg=name)


def test_what_does_not_say_how_its_parts_become_one_is_refused(mesh_of):
    aux = {
        "tokens": jnp.int32(3),
        "padded": jnp.ones(2, bool),
        "rows": 4,
        "mean": 1.0,
        "sum": so.losses.Sum(jnp.int32(3)),
    }
    opt = so.ddp(
        optax.sgd(0.1), mesh_of(data=2), lambda params, batch: (params * batch.mean(), aux)
    )
    message = (
        "ddp: 3 metrics of integers or booleans: a count, or a mean?\n  tokens: int32[]\n  padded:"
        " bool[2]\n  rows: int32[]\nFix: say which: so.losses.Sum(x), so.losses.Max(x), so.losses.Min(x),"
        " so.losses.Weighted(total, weight), or x.astype(float) for the mean."
    )
    with pytest.raises(TypeError) as caught:
        opt.step(opt.init(np.float32(1)), np.ones(4, np.float32))
    assert str(caught.value) == message
    uneven = so.losses.Weighted((jnp.float32(1), jnp.float32(2)), jnp.float32(1))
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), lambda params, batch: uneven)
    with pytest.raises(
        ValueError, match=re.escape("ddp: the loss is so.losses.Weighted of 2 totals and 1 weight.")
    ):
        opt.step(opt.init(np.float32(1)), np.ones(4, np.float32))
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), lambda params, batch: so.losses.Sum(params))
    with pytest.raises(TypeError, match=re.escape("ddp: loss_fn must return a number, got Sum.")):
        opt.step(opt.init(np.float32(1)), np.ones(4, np.float32))
