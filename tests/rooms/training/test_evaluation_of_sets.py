"""The evaluation of several batches is exact if the loss is a (weighted) mean over rows, or says
its parts. Otherwise it warns once, on any number of devices and in each view.
"""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
PARAMS = {"w": np.ones(4, np.float32)}


def squares(params, batch):
    return (batch @ params["w"]) ** 2


def weights(batch):
    return jnp.abs(batch[:, 0])


MEANS = {
    "mean": lambda params, batch: squares(params, batch).mean(),
    "weighted": lambda params, batch: so.losses.Weighted(
        (weights(batch) * squares(params, batch)).sum(), weights(batch).sum()
    ),
    "two terms": lambda params, batch: so.losses.Weighted(
        ((weights(batch) * squares(params, batch)).sum(), squares(params, batch).sum()),
        (weights(batch).sum(), jnp.float32(len(batch))),
    ),
    "a row": so.per_row(lambda params, row: (row @ params["w"]) ** 2),
    "metrics of a kind": lambda params, batch: (
        squares(params, batch).mean(),
        {"sum": so.losses.Sum(squares(params, batch).sum()), "max": so.losses.Max(batch.max())},
    ),
}
OTHERS = {
    "a root": (lambda params, batch: jnp.sqrt(squares(params, batch).mean()), "the loss"),
    "a sum": (lambda params, batch: squares(params, batch).sum(), "the loss"),
    "a ratio": (
        lambda params, batch: (
            (weights(batch) * squares(params, batch)).sum() / weights(batch).sum()
        ),
        "the loss",
    ),
    "a median": (lambda params, batch: jnp.median(squares(params, batch)), "the loss"),
    "a largest row": (
        lambda params, batch: (
            squares(params, batch).mean(),
            {"worst": squares(params, batch).max()},
        ),
        "metric 'worst'",
    ),
}


def strategy_of(loss_fn, devices, view="auto"):
    mesh = so.make_mesh(devices=jax.devices()[:devices])
    return so.ddp(optax.sgd(0.1), mesh, loss_fn, view=view)


@functools.cache
def state_of(devices):
    """Return a state for every loss on so many devices: evaluations take no memory of it."""
    return strategy_of(MEANS["mean"], devices).init(PARAMS)


def evaluate_twice(loss_fn, devices, view):
    opt = strategy_of(loss_fn, devices, view)
    evaluate = so.training.evaluation(opt, [X[:4], X[4:12], X[12:]])
    state = state_of(devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluate(state)
        metrics = evaluate(state)
    said = [str(warning.message) for warning in caught]
    return metrics, [text for text in said if text.startswith("evaluation: ")]


@pytest.mark.parametrize(
    ("kind", "devices", "view"),
    [
        *itertools.product(MEANS, [4], ["auto"]),
        ("weighted", 1, "auto"),
        ("two terms", 4, "global"),
        ("metrics of a kind", 4, "global"),
    ],
)
def test_a_mean_over_rows_is_that_of_the_set(kind, devices, view):
    metrics, said = evaluate_twice(MEANS[kind], devices, view)
    assert said == []
    loss = MEANS[kind](PARAMS, X)
    if isinstance(loss, so.losses.Weighted):
        loss = sum(np.divide(a, b) for a, b in zip(*map(np.atleast_1d, loss), strict=True))
    else:
        loss = loss[0] if isinstance(loss, tuple) else loss
    np.testing.assert_allclose(metrics["val_loss"], loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "devices", "view"),
    [*itertools.product(OTHERS, [4], ["auto"]), ("a root", 1, "auto"), ("a median", 4, "global")],
)
def test_any_other_loss_warns_once_with_a_remedy(kind, devices, view):
    loss_fn, result = OTHERS[kind]
    _, (said,) = evaluate_twice(loss_fn, devices, view)
    assert said.startswith(
        f"evaluation: {result} of the set is taken as the mean of its batches, by rows, but it is"
        " not shown to be a (weighted) mean over rows: "
    )
    assert said.endswith(
        "Fix: return so.losses.Weighted(total, weight) or so.losses.Sum of rows, whose parts add up;"
        " or evaluate the set as one batch; or view='unproved' if you know better."
    )


GRAPHS = [{"nodes": X[:rows], "edges": np.zeros((2 * rows, 2), np.int32)} for rows in (4, 8, 4)]


def of_nodes(metrics):
    return strategy_of(lambda params, graph: metrics(squares(params, graph["nodes"])), 4, "global")


def test_batches_without_a_common_number_of_rows_warn_unless_the_loss_says_its_parts():
    """A graph counts as one row, so a mean over its nodes is no mean over those of the set."""
    opt = of_nodes(lambda x: (so.losses.Weighted(x.sum(), jnp.float32(len(x))), {"mean": x.mean()}))
    with pytest.warns(UserWarning, match="evaluation: metric 'mean' of the set is taken as"):
        metrics = so.training.evaluation(opt, GRAPHS)(state_of(4))
    nodes = np.concatenate([graph["nodes"] for graph in GRAPHS])
    np.testing.assert_allclose(metrics["val_loss"], squares(PARAMS, nodes).mean(), rtol=1e-5)
    opt = of_nodes(lambda x: so.losses.Weighted(x.sum(), jnp.float32(len(x))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        so.training.evaluation(opt, GRAPHS)(state_of(4))


def test_one_batch_needs_no_proof():
    opt = strategy_of(OTHERS["a median"][0], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = so.training.evaluation(opt, [X])(state_of(1))
    np.testing.assert_allclose(metrics["val_loss"], np.median(squares(PARAMS, X)), rtol=1e-5)
