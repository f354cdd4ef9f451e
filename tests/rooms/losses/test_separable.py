"""The per-device view runs a loss that is proved to be a (weighted) mean over rows.

Every other one runs in the global view.
"""

import itertools
import linecache
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.host import host_params
from support.losses import LOSSES, cast
from support.separable_losses import BATCH, SEPARABLE
from support.tiers import tiered

import shardopt as so
from shardopt.core._block_model import takes_rng
from shardopt.core._types import abstract
from shardopt.losses._separable import Cut, LossCall, find_mixing
from shardopt.models import gpt

KEY = jax.eval_shape(lambda: jax.random.key(0))


@pytest.fixture
def no_compile(monkeypatch):
    monkeypatch.setattr(
        jax._src.compiler, "compile_or_get_cached", lambda *_, **__: pytest.fail("compiled")
    )


def abstract_state(opt, params):
    opt.specs(abstract(params))
    return opt.abstract_state()


@pytest.mark.parametrize(
    ("name", "cut"),
    tiered(
        itertools.product(LOSSES, ["devices", "micro_batches"]),
        lambda row: row[1] == "devices" or row[0] == "clip",
        ids="-".join,
    ),
)
def test_loss_that_mixes_rows_is_refused(name, cut, no_compile):
    loss = LOSSES[name]
    params, (batch,) = cast(loss.params, np.float32), loss.batches(1, np.float32)
    mesh, sizes = (
        (so.make_mesh(data=8), {})
        if cut == "devices"
        else (so.make_mesh(devices=jax.devices()[:1]), {"micro_batches": 2})
    )
    opt = so.ddp(optax.sgd(0.1), mesh, loss.loss_fn, view="per_device", **sizes)
    state = abstract_state(opt, params)
    with pytest.raises(
        so.errors.NotSeparableError, match="is not shown to be a \\(weighted\\) mean over rows"
    ) as caught:
        opt.step.lower(state, abstract(batch))
    assert re.search(r"tests/support/losses.py:\d+ \(", caught.value.operation)
    assert "view='unproved'" in str(caught.value)
    with pytest.raises(so.errors.NotSeparableError):
        opt.evaluate.lower(state, abstract(batch))
    trusted = so.ddp(optax.sgd(0.1), mesh, loss.loss_fn, view="unproved", **sizes)
    trusted.evaluate.lower(state, abstract(batch))


NOT_PROVED_OF_ONE = {
    "linear_algebra": "it does other things on the whole batch than on a piece of it."
}
"""Means that the proof leaves to the global view with one row per piece: jax solves a single system
in another way.
"""


AGAIN = {("nnx_transformer", 4), ("equinox", 4), ("gpt", 4)}  # as with one row
# the time is that of their init
AGAIN |= set(itertools.product(["linen_transformer", "haiku", "linen_cnn"], [4, 1]))


OF_ONE_ROW = ("looped", "linear_algebra", "gpt", "nnx_transformer")
"""Pieces of one row in every run: those that are not proved, and those that run in no other number.
"""


@pytest.mark.parametrize(
    ("name", "rows"),
    tiered(
        itertools.product(SEPARABLE, [4, 1]),
        lambda row: row not in AGAIN and (row[1] == 4 or row[0] in OF_ONE_ROW),
    ),
)
def test_mean_over_rows_is_shown_to_be_one(name, rows):
    params, loss_fn = SEPARABLE[name]()
    pieces = len(BATCH["x"]) // rows
    expected = NOT_PROVED_OF_ONE.get(name) if rows == 1 else None
    for key in (KEY, None) if takes_rng(loss_fn) else (None,):
        mixing = find_mixing(
            loss_fn, abstract(params), abstract(BATCH), Cut(pieces), LossCall(key=key)
        )
        assert (mixing and mixing.reason) == expected


def with_class_token(params, batch):
    rows = jnp.stack([batch["x"], batch["x"] ** 2], axis=1)
    token = jnp.broadcast_to(params["token"][None, None], (len(rows), 1, 12))
    # of rows, and also of one row
    row_sums = jnp.broadcast_to(jnp.sum(rows, axis=2, keepdims=True), rows.shape)
    return jnp.mean(jnp.concatenate([token, rows * row_sums], axis=1) ** 2)


def centred_rows(params, batch):
    mean = jnp.broadcast_to(jnp.mean(batch["x"], axis=0, keepdims=True), batch["x"].shape)
    return jnp.mean((batch["x"] - mean) ** 2 * params["token"][None])


def summed_tokens(params, batch):
    return jnp.sum(jnp.broadcast_to(params["token"][None], batch["x"].shape)) + jnp.mean(batch["x"])


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (with_class_token, None),
        (centred_rows, "rows are mixed."),
        (summed_tokens, "it depends on the number of rows otherwise than a mean over them."),
    ],
)
@pytest.mark.parametrize("pieces", [16, 4])
def test_a_value_that_is_repeated_for_each_row(loss_fn, reason, pieces):
    """jax omits the broadcast of one row: `broadcast_to(x, [1, 12])` of [1, 12] is x."""
    params = abstract({"token": jnp.ones(12)})
    mixing = find_mixing(loss_fn, params, abstract({"x": jnp.ones((16, 12))}), Cut(pieces))
    assert (mixing and mixing.reason) == reason


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


@jax.custom_jvp
def centred_tangent(x):
    return jnp.tanh(x)


@centred_tangent.defjvp
def _(primals, tangents):
    return jnp.tanh(primals[0]), tangents[0] - tangents[0].mean(0, keepdims=True)


PARAMS = abstract({"up": jnp.ones((12, 16))})
ROWS = abstract({"x": jnp.ones((16, 12))})
RULE = (
    "the derivative rule of a jax.custom_vjp or jax.custom_jvp mixes rows, or depends on their"
    " number."
)


@pytest.mark.parametrize("rule", [normalised, centred, by_sign, clipped, centred_tangent])
def test_derivative_rules_are_followed(rule):
    def loss_fn(params, batch):
        return jnp.mean(jax.checkpoint(rule)(batch["x"] @ params["up"]) ** 2)

    mixing = find_mixing(loss_fn, PARAMS, ROWS, Cut(4))
    assert mixing.reason == RULE
    assert re.fullmatch(
        r"custom_[jv][vj]p_call at tests/rooms/losses/test_separable.py:\d+ \(.*loss_fn\)",
        mixing.operation,
    )
    assert find_mixing(loss_fn, PARAMS, ROWS, Cut(4), LossCall(training=False)) is None


def test_derivative_rules_of_what_all_rows_share():
    of_shared = find_mixing(
        lambda params, batch: jnp.mean(batch["x"] @ normalised(params["up"])), PARAMS, ROWS, Cut(4)
    )
    assert of_shared.reason == RULE

    def fine(params, batch):
        return jnp.mean(reversed_gradient(batch["x"], params["up"]))

    assert find_mixing(fine, PARAMS, ROWS, Cut(4)) is None


FIX = (
    'view="global", which is exact for every loss; or so.per_row(a loss of one row), which needs no'
    " proof; so.losses.gather_batch, so.losses.batch_mean or so.losses.batch_sum for what a row needs of the whole batch, and so.losses.Weighted for a normaliser that"
    " depends on the rows; or view='unproved' if you know better."
)


def summed(params, batch):
    return jnp.sum((batch["x"] @ params["up"]) ** 2)


def root_of_mean(params, batch):
    return jnp.sqrt(jnp.mean(batch["x"] @ params["up"]))


def named(loss_fn, uses):
    """Return operations of a loss as messages show them, with their lines."""
    at = loss_fn.__code__.co_firstlineno + 1
    source = linecache.getline(__file__, at).strip()
    return [
        f"  {operation} at tests/rooms/losses/test_separable.py:{at} ({loss_fn.__name__}): {source}"
        for operation in uses
    ]


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
def test_a_refusal_names_the_reason_and_the_uses(loss_fn, cut, why, uses):
    opt = so.ddp(
        optax.sgd(0.1),
        so.make_mesh(data=2, devices=jax.devices()[:2]),
        loss_fn,
        micro_batches=2 if "micro" in cut else 1,
        view="per_device",
    )
    state = abstract_state(opt, {"up": np.ones((12, 16), np.float32)})
    with pytest.raises(so.errors.NotSeparableError) as caught:
        opt.step.lower(state, {"x": jax.ShapeDtypeStruct((8, 12), np.float32)})
    problem = (
        f"ddp: the loss is not shown to be a (weighted) mean over rows, so {cut} could train on"
        f" another: {why}"
    )
    assert str(caught.value) == "\n".join([problem, *named(loss_fn, uses), f"Fix: {FIX}"])


def test_the_global_view_is_taken_with_one_warning_and_reported(mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), summed)
    params = {"up": np.ones((12, 16), np.float32)}
    batch = {"x": np.ones((8, 12), np.float32)}
    state = opt.init(params)
    assert opt.config.report().view == "view: the first step chooses it."
    with pytest.warns(UserWarning, match="the global view") as caught:
        state, metrics = opt.step(state, batch)
    problem = (
        "the loss is not shown to be a (weighted) mean over rows, so 2 devices could train on"
        " another: it is a sum over rows, where a mean is expected."
    )
    assert [str(warning.message) for warning in caught] == [
        "\n".join(
            [
                f"ddp: the loss runs in the global view, once on the whole batch: {problem}",
                *named(summed, ["reduce_sum"]),
                (
                    "  The step is exact. It costs the collectives that the partitioner places for"
                    " these operations, and an all-reduce where a reduce-scatter would do:"
                    " docs/any_loss.md has the bytes."
                ),
                (
                    "Fix: view='global' asks for it without this warning. For less traffic:"
                    f" {FIX.partition('; or ')[2]}"
                ),
            ]
        )
    ]
    assert opt.config.report().view == f"view: global: {problem}"
    np.testing.assert_allclose(metrics["loss"], 8 * 16 * 144, rtol=1e-6)
    with warnings.catch_warnings():  # no second warning for other shapes
        warnings.simplefilter("error")
        opt.step(state, {"x": np.ones((16, 12), np.float32)})


def test_the_verdict_is_that_of_the_shapes(mesh_of):
    def first_rows(params, batch):  # a mean over rows where there are at most eight
        return jnp.mean((batch["x"][:8] @ params["up"]) ** 2)

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), first_rows, view="per_device")
    state = abstract_state(opt, {"up": np.ones((12, 16), np.float32)})
    opt.step.lower(state, {"x": jax.ShapeDtypeStruct((8, 12), np.float32)})
    with pytest.raises(so.errors.NotSeparableError, match="mean over rows"):
        opt.step.lower(state, {"x": jax.ShapeDtypeStruct((16, 12), np.float32)})


@pytest.mark.parametrize("how", ["jit", "scan", "eval_shape"])
def test_a_step_within_a_trace_gets_the_same_verdict(how, mesh_of):
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=2), root_of_mean, view="per_device")
    state = opt.init({"up": np.ones((12, 16), np.float32)})
    batch = {"x": np.ones((8, 12), np.float32)}

    def step(state, batch):
        return opt.step(state, batch)

    calls = {
        "jit": jax.jit(step),
        "scan": lambda state, batch: jax.lax.scan(
            lambda state, _: step(state, batch), state, None, 2
        ),
        "eval_shape": lambda *args: jax.eval_shape(step, *args),
    }
    with pytest.raises(so.errors.NotSeparableError, match="rows are mixed"):
        calls[how](state, batch)


def trained_weight(params, batch):
    gate = jax.nn.sigmoid(batch["x"] @ params["gate"])
    return so.losses.Weighted(jnp.sum(gate * (batch["x"] @ params["up"]) ** 2), jnp.sum(gate))


def on_one_device(params, batch):
    total, weight = trained_weight(params, batch)
    return total / weight


@pytest.mark.parametrize(
    "strategy", tiered([so.ddp, so.fsdp], lambda strategy: strategy is so.fsdp)
)
def test_a_weight_that_is_trained_has_its_gradient(strategy, mesh_of, x64):
    params = {"up": np.linspace(-1, 1, 12), "gate": np.linspace(2, -1, 12)}
    batches = [
        {"x": np.random.default_rng(step).normal(size=(8, 12)) * np.arange(1, 9)[:, None]}
        for step in range(3)
    ]
    tx = optax.sgd(0.1, momentum=0.9)
    opt = strategy(tx, mesh_of(data=4), trained_weight)
    state = opt.init(params)
    expected_params = params
    moments = tx.init(params)
    with pytest.warns(
        UserWarning, match=r"the weight of so\.losses\.Weighted depends on the parameters"
    ):
        state, _ = opt.step(state, batches[0])
    for batch in batches[1:]:
        state, _ = opt.step(state, batch)
    for batch in batches:
        updates, moments = tx.update(jax.grad(on_one_device)(expected_params, batch), moments)
        expected_params = optax.apply_updates(expected_params, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), state.params, expected_params
    )
    refusing = strategy(tx, mesh_of(data=4), trained_weight, view="per_device")
    with pytest.raises(
        so.errors.NotSeparableError,
        match=r"the weight of so\.losses\.Weighted depends on the parameters",
    ):
        refusing.step(refusing.init(params), batches[0])


def trusting(**options):
    loss = LOSSES["root_of_mean"]
    opt = so.fsdp(
        optax.sgd(0.1), so.make_mesh(data=4, devices=jax.devices()[:4]), loss.loss_fn, **options
    )
    return opt, opt.init(cast(loss.params, np.float32)), loss.batches(1, np.float32)[0]


def test_check_prints_what_differs_and_raises(capsys):
    opt, state, batch = trusting(view="unproved")
    with pytest.raises(
        so.errors.NotSeparableError, match="fsdp: the step is not that of one device on this batch"
    ) as caught:
        so.check(opt, state, batch)
    printed = capsys.readouterr().out.splitlines()
    differing = [line.split("  ")[0] for line in printed if line.endswith("differs")]
    gradients = [f"gradient of {leaf_name}" for leaf_name in ("down", "scale", "up")]
    assert differing == ["evaluated loss", "loss", *gradients]
    assert "gradient of up: " in str(caught.value)
    opt.step(state, batch)  # nothing was donated


@pytest.mark.slow
def test_check_finds_a_pipeline_and_the_global_view_right():
    opt, state, batch = trusting(view="global")
    report = so.check(opt, state, batch)
    assert max(difference.relative for difference in report.differences) < 1e-5
    config = gpt.config(vocab_size=12, dim=8, num_layers=4, num_heads=2, max_length=8)
    mesh = so.make_mesh(data=2, pipeline=2, devices=jax.devices()[:4])
    opt = so.hybrid(optax.sgd(0.1), mesh, gpt.model(config), micro_batches=2)
    report = so.check(opt, opt.init(host_params(gpt.init, config)), {"tokens": BATCH["tokens"]})
    assert max(difference.relative for difference in report.differences) < 1e-4
