"""In the per-device view a loss that is no (weighted) mean over rows is refused before anything compiles, and only such."""

import itertools
import linecache
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.losses import LOSSES, cast
from support.separable_losses import BATCH, SEPARABLE
from support.tiers import tiered

import shardopt as so
from shardopt.core.block_model import takes_rng
from shardopt.core.types import abstract
from shardopt.engine.separable import find_mixing
from shardopt.models import gpt

KEY = jax.eval_shape(lambda: jax.random.key(0))


@pytest.fixture
def no_compile(monkeypatch):
    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", lambda *_, **__: pytest.fail("compiled"))


def abstract_state(opt, params):
    opt.specs(abstract(params))
    return opt.abstract_state()


@pytest.mark.parametrize("cut", ["devices", "micro_batches"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_that_mixes_rows_is_refused(name, cut, no_compile):
    loss = LOSSES[name]
    params, (batch,) = cast(loss.params, np.float32), loss.batches(1, np.float32)
    mesh, sizes = (
        (so.make_mesh(data=8), {})
        if cut == "devices"
        else (so.make_mesh(devices=jax.devices()[:1]), {"micro_batches": 2})
    )
    opt = so.ddp(optax.sgd(0.1), mesh, loss.loss_fn, **sizes)
    state = abstract_state(opt, params)
    with pytest.raises(so.NotSeparableError, match="is not a \\(weighted\\) mean over rows") as caught:
        opt.step.lower(state, abstract(batch))
    assert re.search(r"tests/support/losses.py:\d+ \(", caught.value.operation)
    assert "separable=True" in str(caught.value)
    with pytest.raises(so.NotSeparableError):
        opt.evaluate.lower(state, abstract(batch))
    trusted = so.ddp(optax.sgd(0.1), mesh, loss.loss_fn, separable=True, **sizes)
    trusted.evaluate.lower(state, abstract(batch))


@pytest.mark.parametrize(
    ("name", "rows"),
    tiered(
        itertools.product(SEPARABLE, [4, 1]),
        lambda row: row not in [("linen_transformer", 4), ("haiku", 4), ("linen_cnn", 4)],
    ),
)
def test_mean_over_rows_is_shown_to_be_one(name, rows):
    params, loss_fn = SEPARABLE[name]()
    batch = abstract(jax.tree.map(lambda x: x[:rows], BATCH))
    for key in (KEY, None) if takes_rng(loss_fn) else (None,):
        assert find_mixing(loss_fn, abstract(params), batch, key=key) is None


def pairs(params, batch):
    """Rows come in pairs: a mean over these, which the trace does not show."""
    x = (batch["x"] @ params["up"]).reshape(-1, 2, 16)
    return jnp.mean((x[:, 0] - x[:, 1]) ** 2)


def groups(params, batch):
    """As many groups as there are rows in four: the trace does not show what they are made of."""
    x = (batch["x"] @ params["up"]).reshape(2, -1, 16)
    return jnp.mean((x - x.mean(1, keepdims=True)) ** 2)


def test_numbers_tell_where_the_trace_does_not():
    mesh, batch = so.make_mesh(data=2, devices=jax.devices()[:2]), BATCH
    params = {"up": jnp.asarray(np.random.default_rng(1).normal(size=(12, 16)), jnp.float32)}
    opt = so.ddp(optax.sgd(0.1), mesh, pairs)
    opt.step(opt.init(params), batch)
    opt = so.ddp(optax.sgd(0.1), mesh, groups)
    state = opt.init(params)
    opt.step.lower(*abstract((state, batch)))  # without values there are no numbers, and nothing is settled
    with pytest.raises(so.NotSeparableError, match="Numbers of two pieces of 4 rows differ, relatively,") as caught:
        opt.step(state, batch)
    assert "reshape at tests/strategies/test_separable.py" in caught.value.operation


@jax.custom_vjp
def normalised(x):
    return x


def by_its_norm(_, g):
    return (g / (1 + jnp.sqrt(jnp.sum(g**2))),)


normalised.defvjp(lambda x: (x, None), by_its_norm)


@jax.custom_vjp
def centred(x):
    return x


def less_its_mean(_, g):
    return (g - g.mean(0, keepdims=True),)


centred.defvjp(lambda x: (x, None), less_its_mean)


@jax.custom_vjp
def by_sign(x):
    return x


by_sign.defvjp(lambda x: (x, None), lambda _, g: (jnp.sign(g),))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


@jax.custom_vjp
def reversed_gradient(x, w):
    return jnp.tanh(x @ w)


def scaled_back(saved, g):
    x, w, y = saved
    g = -0.1 * g * (1 - y**2)
    return g @ w.T, x.T @ g


def forward_of_reversed(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


reversed_gradient.defvjp(forward_of_reversed, scaled_back)


def test_backward_rules_are_followed():
    params, rows = abstract({"up": jnp.ones((12, 16))}), abstract({"x": jnp.ones((4, 12))})
    losses = {
        "by_its_norm": lambda params, batch: jnp.mean(normalised(batch["x"] @ params["up"]) ** 2),
        "less_its_mean": lambda params, batch: jnp.mean(jax.checkpoint(centred)(batch["x"] @ params["up"]) ** 2),
    }
    for rule, loss_fn in losses.items():
        mixing = find_mixing(loss_fn, params, rows)
        assert mixing.sure
        assert mixing.why == "the backward rule of a jax.custom_vjp mixes rows, or depends on their number."
        assert re.fullmatch(r"reduce_sum at tests/strategies/test_separable.py:\d+ \(.*<lambda>\)", mixing.operation), (
            rule
        )
        assert find_mixing(loss_fn, params, rows, training=False) is None
    for rule in (by_sign, clipped):  # what comes back is of the size of 1/B
        assert find_mixing(lambda params, batch, f=rule: jnp.mean(f(batch["x"] @ params["up"])), params, rows).sure
    of_shared = find_mixing(lambda params, batch: jnp.mean(batch["x"] @ normalised(params["up"])), params, rows)
    assert of_shared.sure
    assert "test_separable.py" in of_shared.operation
    fine = lambda params, batch: jnp.mean(reversed_gradient(batch["x"], params["up"]))  # noqa: E731
    assert find_mixing(fine, params, rows) is None


FIX = (
    'Fix: view="global", which is exact for every loss; or so.gather_batch, so.batch_mean or so.batch_sum for what a row needs of '
    "the whole batch, and so.Weighted for a normaliser that depends on the rows; or separable=True if you know better."
)


def summed(params, batch):
    return jnp.sum((batch["x"] @ params["up"]) ** 2)


def root_of_mean(params, batch):
    return jnp.sqrt(jnp.mean(batch["x"] @ params["up"]))


@pytest.mark.parametrize(
    ("loss_fn", "cut", "why", "uses"),
    [
        (summed, "2 devices", "it is a sum over rows, where a mean is expected.", ["reduce_sum"]),
        (
            root_of_mean,
            "2 devices and 2 micro-batches",
            "rows are mixed.",
            ["reduce_sum", "whose result goes into sqrt"],
        ),
    ],
)
def test_the_message_of_a_refusal(loss_fn, cut, why, uses):
    opt = so.ddp(
        optax.sgd(0.1),
        so.make_mesh(data=2, devices=jax.devices()[:2]),
        loss_fn,
        micro_batches=2 if "micro" in cut else 1,
    )
    state = abstract_state(opt, {"up": np.ones((12, 16), np.float32)})
    with pytest.raises(so.NotSeparableError) as caught:
        opt.step.lower(state, {"x": jax.ShapeDtypeStruct((8, 12), np.float32)})
    at = loss_fn.__code__.co_firstlineno + 1
    source = linecache.getline(__file__, at).strip()
    lines = [f"  {one} at tests/strategies/test_separable.py:{at} ({loss_fn.__name__}): {source}" for one in uses]
    what = f"ddp: the loss is not a (weighted) mean over rows, so {cut} would train on another: {why}"
    assert str(caught.value) == "\n".join([what, *lines, FIX])


def trusting(**options):
    loss = LOSSES["root_of_mean"]
    opt = so.fsdp(optax.sgd(0.1), so.make_mesh(data=4, devices=jax.devices()[:4]), loss.loss_fn, **options)
    return opt, opt.init(cast(loss.params, np.float32)), loss.batches(1, np.float32)[0]


def test_check_prints_what_differs_and_raises(capsys):
    opt, state, batch = trusting(separable=True)
    with pytest.raises(so.NotSeparableError, match="fsdp: the step is not that of one device on this batch") as caught:
        so.check(opt, state, batch)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed] == [
        "loss",
        *(f"gradient of {one}" for one in ("down", "scale", "up")),
    ]
    assert all(line.endswith("differs") for line in printed)
    assert "gradient of up: " in str(caught.value)
    opt.step(state, batch)  # nothing was donated


@pytest.mark.slow
def test_check_finds_a_pipeline_and_the_global_view_right():
    opt, state, batch = trusting(view="global")
    report = so.check(opt, state, batch)
    assert max(one.relative for one in report.differences) < 1e-5
    config = gpt.GPTConfig(vocab_size=12, dim=8, num_layers=4, num_heads=2, max_length=8)
    mesh = so.make_mesh(data=2, pipeline=2, devices=jax.devices()[:4])
    opt = so.hybrid(optax.sgd(0.1), mesh, gpt.model(config), micro_batches=2)
    report = so.check(opt, opt.init(gpt.init(config, jax.random.key(0))), {"tokens": BATCH["tokens"]})
    assert max(one.relative for one in report.differences) < 1e-4
