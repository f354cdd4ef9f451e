"""Losses that look across rows, with gather_batch, batch_mean and batch_sum: as one device on the
whole batch.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.reference import relative_difference, train, trains_as_one_device
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so

ONE_DEVICE = SimpleNamespace(
    gather_batch=lambda x: x,
    batch_mean=lambda x: jax.tree.map(lambda x: x.mean(0), x),
    batch_sum=lambda x: jax.tree.map(lambda x: x.sum(0), x),
)


def clip(rows, params, batch):
    """Return a loss with in-batch negatives in both directions."""
    images = hidden(params, batch)
    texts = batch["y"] @ params["text"]
    to_texts = images @ rows.gather_batch(texts).T
    to_images = texts @ rows.gather_batch(images).T
    matched_scores = (images * texts).sum(1)
    return jnp.mean(
        jax.nn.logsumexp(to_texts, 1) + jax.nn.logsumexp(to_images, 1) - 2 * matched_scores
    )


def advantages(rows, params, batch):
    mean = rows.batch_mean(batch["weights"])
    std = jnp.sqrt(rows.batch_mean((batch["weights"] - mean) ** 2))
    return -jnp.mean((batch["weights"] - mean) / std * jnp.tanh(hidden(params, batch).sum(1)))


def batch_norm(rows, params, batch):
    x = hidden(params, batch)
    mean, square = rows.batch_mean((x, x**2))
    x = (x - mean[None]) * jax.lax.rsqrt(square - mean**2 + 1e-3)[None]
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2)


def root_of_mean(rows, params, batch):
    return jnp.sqrt(rows.batch_mean(errors(params, batch)))


def summed(rows, params, batch):
    return 0.01 * rows.batch_sum(errors(params, batch))


def own_normaliser(rows, params, batch):
    gates = jax.nn.sigmoid(batch["x"][:, 0] * params["scale"])
    return rows.batch_sum(gates * errors(params, batch)) / rows.batch_sum(gates)


def expert_balance(rows, params, batch):
    chosen = jax.nn.softmax(hidden(params, batch))
    loads, probabilities = rows.batch_mean(
        (jax.nn.one_hot(chosen.argmax(1), 8, dtype=chosen.dtype), chosen)
    )
    return 8 * (loads * probabilities).sum()


def hidden(params, batch):
    return jnp.tanh(batch["x"] @ params["in"])


def errors(params, batch):
    return ((hidden(params, batch) @ params["out"] - batch["y"]) ** 2).sum(1)


LOSSES = [clip, advantages, batch_norm, root_of_mean, summed, own_normaliser, expert_balance]


def all_of_them(rows, params, batch):
    return sum(loss(rows, params, batch) for loss in LOSSES)


PLACES = {
    "ddp": ("ddp", {"data": 4}),
    "zero1": ("zero1", {"data": 4}),
    "fsdp": ("fsdp", {"data": 4}),
    "hsdp": ("fsdp", {"replica": 2, "data": 2}),
    "tensor": ("fsdp", {"data": 2, "tensor": 2}),
}
RULES = [("in", P(None, "tensor")), ("text", P(None, "tensor")), ("out", P("tensor"))]


def exactly(message):
    # jax adds a note to errors under jit
    return rf"^{re.escape(message)}(\n-+\nFor simplicity, JAX.*)?$"


def setup(dtype=np.float64):
    draw = np.random.default_rng(0)
    shapes = {"in": (6, 8), "out": (8, 4), "text": (4, 8)}
    params = {name: (0.5 * draw.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}
    params["scale"] = np.ones((), dtype)
    # Rows of growing scale: no two devices see alike.
    scale = np.linspace(0.2, 2.0, 16)
    batches = [
        {
            "x": (scale[:, None] * draw.normal(size=(16, 6))).astype(dtype),
            "y": draw.normal(size=(16, 4)).astype(dtype),
            "weights": (scale * draw.uniform(size=16)).astype(dtype),
        }
        for _ in range(3)
    ]
    return params, batches


def distance(build, mesh, loss, tx=None, dtype=np.float64, **options):
    """Train by a strategy and on one device; return how far losses and parameters are apart."""
    params, batches = setup(dtype)
    tx = tx or optax.adamw(1e-2, eps=1e-4)
    opt = build(tx, mesh, lambda params, batch: loss(so.losses, params, batch), **options)
    history, expected = train(
        tx, lambda params, batch: loss(ONE_DEVICE, params, batch), params, batches
    )
    state = opt.init(params)
    losses = []
    for batch in batches:
        state, metrics = opt.step(state, batch)
        losses.append(metrics["loss"])
    return relative_difference(
        (losses, state.params), ([np.asarray(loss) for loss, _ in history], expected)
    )


ROWS = [(place, loss) for place in PLACES for loss in [all_of_them, *LOSSES]]


@pytest.mark.parametrize(
    ("place", "loss"),
    tiered(
        ROWS,
        lambda row: row == ("hsdp", all_of_them),
        ids=lambda row: f"{row[0]}-{row[1].__name__}",
    ),
)
def test_equals_one_device(place, loss, mesh_of, x64):
    strategy, sizes = PLACES[place]
    assert (
        distance(
            STRATEGIES[strategy], mesh_of(**sizes), loss, rules=RULES if "tensor" in sizes else ()
        )
        < 1e-10
    )


def two_normalisers(rows, params, batch):
    """A masked mean plus a mean over all rows.

    On one device their quotients, else so.losses.Weighted of both terms.
    """
    mask = batch["weights"] > 0.3
    totals = (errors(params, batch) * mask).sum(), jnp.tanh(hidden(params, batch)).sum()
    loss = so.losses.Weighted(totals, (mask.sum(), 3 * len(mask)))
    return (
        sum(total / weight for total, weight in zip(*loss, strict=True))
        if rows is ONE_DEVICE
        else loss
    )


SEVERAL_TERMS = [
    ("ddp", {"data": 4}, {}),
    ("ddp", {"data": 4}, {"micro_batches": 2}),
    ("zero2", {"data": 4}, {"micro_batches": 2}),
    ("fsdp", {"data": 4}, {}),
    ("fsdp", {"replica": 2, "data": 2}, {"micro_batches": 2}),
    ("ddp", {"data": 4}, {"reducer": so.reducers.exact()}),
    ("fsdp", {"data": 4}, {"view": "global"}),
]


@pytest.mark.parametrize(
    ("strategy", "sizes", "options"),
    tiered(
        SEVERAL_TERMS,
        lambda row: row == SEVERAL_TERMS[4],
        ids=lambda row: f"{row[0]}-{row[1]}-{list(row[2])}",  # a reducer's text has an address
    ),
)
def test_several_terms_each_over_its_own_weight(strategy, sizes, options, mesh_of, x64):
    assert distance(STRATEGIES[strategy], mesh_of(**sizes), two_normalisers, **options) < 1e-10


def masked_mean_plus_count(outer, x, batch):
    """Return a masked mean, plus a mean whose weight only the last block's output gives."""
    mask = batch["weights"] > 0.3
    above = x[:, 0] > 0
    totals = (x.sum(1) ** 2 * mask).sum(), (above * (x @ outer["scale"])).sum()
    return so.losses.Weighted(totals, (mask.sum(), above.sum()))


def test_several_terms_in_a_pipeline(mesh_of, x64):
    model = so.BlockModel(
        lambda outer, batch: batch["x"],
        lambda kernel, x: jnp.tanh(x @ kernel),
        masked_mean_plus_count,
    )
    draw = np.random.default_rng(0)
    params = {"blocks": draw.normal(size=(2, 6, 6)), "scale": draw.normal(size=6)}
    batches = setup()[1]
    mesh = mesh_of(data=2, pipeline=2)
    opt = so.hybrid(optax.adamw(1e-2), mesh, model, micro_batches=4)

    def of_one_device(params, batch):
        loss = model.loss_fn(params, batch)
        return sum(total / weight for total, weight in zip(*loss, strict=True))

    case = SimpleNamespace(reference=of_one_device, params=params, batches=batches)
    trains_as_one_device(opt, case, optax.adamw(1e-2))


def normalised_block(rows):
    """Return a block that normalises over the batch, within vmap (over two groups of features) and
    jax.checkpoint.
    """

    @jax.checkpoint
    def normalise(x):
        mean, square = rows.batch_mean((x, x**2))
        return (x - mean[None]) * jax.lax.rsqrt(square - mean**2 + 1e-2)[None]

    def block(block_params, x):
        groups = x.reshape(len(x), 2, -1)
        groups = jax.vmap(jax.jit(normalise), in_axes=1, out_axes=1)(groups)
        return x + jnp.tanh(groups.reshape(x.shape) @ block_params["w"])

    return block


def deep(rows, remat=None):
    return so.BlockModel(
        embed=lambda outer, batch: batch["x"] @ outer["in"],
        block=normalised_block(rows),
        loss=lambda outer, x, batch: jnp.sqrt(
            rows.batch_mean(((x @ outer["out"] - batch["y"]) ** 2).sum(1))
        ),
        remat=remat,
    )


@pytest.mark.parametrize(
    ("strategy", "remat"),
    tiered(
        [("fsdp", None), ("fsdp", "full"), ("ddp", None)],
        lambda row: row == ("fsdp", None),
        ids=str,
    ),
)
def test_in_blocks_that_are_gathered_one_at_a_time(strategy, remat, mesh_of, x64):
    params, batches = setup()
    params = {
        "in": params["in"],
        "out": params["out"],
        "blocks": {"w": np.stack([np.eye(8), -np.eye(8)])},
    }
    tx = optax.adam(1e-2, eps=1e-4)
    opt = STRATEGIES[strategy](tx, mesh_of(data=4), deep(so.losses, remat))
    history, expected = train(tx, deep(ONE_DEVICE).loss_fn, params, batches)
    state = opt.init(params)
    for batch, (loss, _) in zip(batches, history, strict=True):
        state, metrics = opt.step(state, batch)
        assert abs(metrics["loss"] - loss) < 1e-10
    assert relative_difference(state.params, expected) < 1e-10


@pytest.mark.slow
def test_line_searches_differentiate_it_again(mesh_of, x64):
    params, batches = setup()
    params = {
        "in": params["in"],
        "out": params["out"],
        "blocks": {"w": np.stack([np.eye(8), -np.eye(8)])},
    }
    opt = so.fsdp(optax.lbfgs(), mesh_of(data=4), deep(so.losses), min_shard_elements=8)
    history, expected = train(
        optax.lbfgs(), deep(ONE_DEVICE).loss_fn, params, batches[:1], value_fn=True
    )
    state, metrics = opt.step(opt.init(params), batches[0])
    assert abs(metrics["loss"] - history[0][0]) < 1e-10
    assert relative_difference(state.params, expected) < 1e-9


def test_the_global_view_has_all_rows(mesh_of, x64):
    assert distance(so.fsdp, mesh_of(data=4), all_of_them, view="global") < 1e-10


def both(rows, params, batch):
    return clip(rows, params, batch) + batch_norm(rows, params, batch)


@pytest.mark.slow
def test_half_precision_works_on_a_tensor_axis_too(mesh_of):
    params, (batch, *_) = setup(jnp.bfloat16)
    opt = so.fsdp(
        optax.sgd(0.1), mesh_of(data=2, tensor=2), lambda *args: both(so.losses, *args), rules=RULES
    )
    state, metrics = opt.step(opt.init(params), batch)
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch))
    loss, grads = jax.jit(jax.value_and_grad(lambda params: both(ONE_DEVICE, params, wide[1])))(
        wide[0]
    )
    expected = jax.tree.map(lambda x, grad: x - 0.1 * grad, wide[0], grads)
    assert (
        relative_difference(
            (metrics["loss"], state.params), (np.asarray(loss), jax.device_get(expected))
        )
        < 0.05
    )
    assert state.params["in"].dtype == jnp.bfloat16


def test_a_function_that_the_user_jitted_is_traced_again_where_the_rows_are_elsewhere(mesh_of):
    mean = jax.jit(so.losses.batch_mean)

    def loss_fn(params, batch):
        return params * mean(batch) ** 2

    mesh = mesh_of(data=2)
    rows = np.arange(8, dtype=np.float32)
    assert mean(rows[:4]) == 1.5

    def run(micro_batches, rows):
        return (
            opt := so.ddp(
                optax.sgd(0.1), mesh, loss_fn, micro_batches=micro_batches, view="per_device"
            )
        ).step(opt.init(np.float32(1)), rows)

    assert run(1, rows[:4])[1]["loss"] == 1.5**2
    with pytest.raises(ValueError, match="micro_batches=2"):
        run(2, rows)
    assert mean(rows[:2]) == 0.5


@pytest.mark.parametrize(
    "name", tiered(["gather_batch", "batch_mean", "batch_sum"], lambda name: name == "batch_sum")
)
def test_what_sees_a_part_of_the_batch_is_refused(name, mesh_of):
    function = getattr(so.losses, name)

    def loss_fn(params, x):
        return (params * function(x)).sum()

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), loss_fn, micro_batches=2)
    with pytest.warns(UserWarning, match="micro_batches=2"):
        _, metrics = opt.step(opt.init(np.float32(1)), np.arange(4, dtype=np.float32))
    assert metrics["loss"] == loss_fn(1, np.arange(4, dtype=np.float32))
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), loss_fn, micro_batches=2, view="per_device")
    message = (
        f"{name}: with micro_batches=2 the loss sees one micro-batch at a time, never the rows of"
        " the whole batch.\nFix: use micro_batches=1, or view='global'."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        opt.step(opt.init(np.float32(1)), np.ones(4, np.float32))
    blocks = so.BlockModel(
        lambda outer, x: x[:, None],
        lambda block_params, x: x * block_params[None],
        lambda _, x, batch: function(x).sum(),
    )
    opt = so.hybrid(optax.sgd(0.1), mesh_of(data=1, pipeline=2), blocks, micro_batches=2)
    message = (
        f"{name}: in a pipeline the loss sees one micro-batch at a time, never the rows of the"
        " whole batch.\nFix: use a mesh with pipeline=1."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        opt.step(opt.init({"blocks": np.ones((2, 1), np.float32)}), np.ones(4, np.float32))
    message = (
        f"{name}: an array without dims has no rows.\n  mean\n"
        "Fix: pass what each row gives, [rows, ...]; a mean over rows is no row."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        function({"mean": jnp.float32(1), "rows": jnp.ones(2)})
    message = (
        f"{name}: it was called in the per-device view, but outside of a strategy's loss.\nFix:"
        " call it in the loss itself, not in a shard_map of your own or in a rule of"
        " jax.custom_vjp."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        jax.shard_map(
            function, mesh=mesh_of(data=2), in_specs=P("data"), out_specs=P(), check_vma=False
        )(jnp.ones(4))


def test_a_batch_that_devices_do_not_divide_is_not_evaluated_in_parts(mesh_of):
    opt = so.ddp(
        optax.sgd(0.1), mesh_of(data=2), lambda params, x: params * so.losses.batch_mean(x) ** 2
    )
    rows = np.arange(5, dtype=np.float32)
    state = opt.init(np.float32(1))
    assert so.training.evaluation(opt, [rows[:4], rows[1:3]])(state)["val_loss"] == 1.5**2
    with pytest.warns(UserWarning, match="runs in the global view"):
        # of five rows at once
        assert so.training.evaluation(opt, [rows])(state)["val_loss"] == pytest.approx(4)
    message = (
        "batch_mean: of a batch that the devices do not divide the loss sees a part at a time,"
        " never the rows of the whole batch."
    )
    opt = so.ddp(
        optax.sgd(0.1),
        mesh_of(data=2),
        lambda params, x: params * so.losses.batch_mean(x) ** 2,
        view="unproved",
    )
    with pytest.raises(
        ValueError,
        match=exactly(f"{message}\nFix: use batches of a multiple of 2 rows, or view='global'."),
    ):
        so.training.evaluation(opt, [rows])(state)


def test_alone_they_are_plain_and_keep_dtypes():
    rows = {"half": jnp.ones((4, 2), jnp.bfloat16), "whole": jnp.arange(4)}
    same = jax.tree.map(
        lambda x: (x.shape, x.dtype),
        (so.losses.gather_batch(rows), so.losses.batch_mean(rows), so.losses.batch_sum(rows)),
    )
    plain = (
        rows,
        jax.tree.map(lambda x: jnp.mean(x, 0), rows),
        jax.tree.map(lambda x: jnp.sum(x, 0), rows),
    )
    assert same == jax.tree.map(lambda x: (x.shape, x.dtype), plain)
