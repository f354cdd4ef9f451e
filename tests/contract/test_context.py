"""A context axis: positions of sequences split over it, on losses that look at one position at a
time.

Attention over positions that others hold is tested in tests/rooms/nn, and in models in
`test_context_models.py`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.reference import relative_difference, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.config import _config as config
from shardopt.step import _build as build

ROWS = 8
LENGTH = 12
WIDTH = 8
TX = optax.sgd(0.05, momentum=0.9)


def params():
    draw = np.random.default_rng(0)
    return {
        "w": draw.normal(size=(WIDTH, 16)),
        "v": draw.normal(size=16),
        "bias": draw.normal(size=3),
    }


def batches(steps=3):
    draw = np.random.default_rng(1)
    # positions differ, so that each must count as it should
    scale = np.linspace(0.2, 2.0, LENGTH)[:, None]
    return [
        {
            "x": scale * draw.normal(size=(ROWS, LENGTH, WIDTH)),
            "y": draw.normal(size=(ROWS, LENGTH)),
            "mask": np.maximum(0.0, draw.uniform(-0.5, 1.0, size=(ROWS, LENGTH))),
            "scale": draw.uniform(0.5, 2.0, size=ROWS),
        }
        for _ in range(steps)
    ]


def errors(params, batch):
    predictions = jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["bias"].sum()
    return batch["scale"][:, None] * (predictions - batch["y"]) ** 2


def plain(params, batch):
    return errors(params, batch).mean()


def weighted(params, batch):
    each = errors(params, batch)
    loss = so.losses.Weighted((each * batch["mask"]).sum(), batch["mask"].sum())
    return loss, {
        "masked": so.losses.Sum((batch["mask"] == 0).sum()),
        "largest": so.losses.Max(each.max()),
        "mean": each.mean(),
    }


def on_one_device(loss):
    def reference(params, batch):
        value = loss(params, batch)
        value = (
            value[0]
            if isinstance(value, tuple) and not isinstance(value, so.losses.Weighted)
            else value
        )
        return value.total / value.weight if isinstance(value, so.losses.Weighted) else value

    return reference


TABLE = [
    ("ddp", {"context": 2, "data": 2}, weighted, {}),
    ("ddp", {"context": 4, "replica": 2, "data": 1}, plain, {"micro_batches": 2}),
    ("zero1", {"context": 4, "data": 2}, weighted, {"micro_batches": 4}),
    ("zero2", {"context": 2, "data": 1, "replica": 2}, weighted, {"micro_batches": 2}),
    ("fsdp", {"context": 2, "data": 2}, weighted, {"micro_batches": 2}),
    ("fsdp", {"context": 4, "data": 1}, plain, {}),
    ("fsdp", {"context": 2, "data": 2, "replica": 2}, weighted, {}),
    ("ddp", {"context": 4, "data": 2}, weighted, {"view": "global"}),
    ("zero1", {"context": 2, "data": 2}, weighted, {"view": "global", "micro_batches": 2}),
    ("fsdp", {"context": 2, "data": 2, "replica": 2}, plain, {"view": "global"}),
]
QUICK = [TABLE[i] for i in (4, 8)]


def row_id(row):
    name, mesh, loss, options = row
    sizes = ",".join(f"{axis}{size}" for axis, size in mesh.items())
    return "-".join(
        [name, sizes, loss.__name__, *(f"{key}={value}" for key, value in options.items())]
    )


@pytest.mark.parametrize(
    ("name", "mesh", "loss", "options"), tiered(TABLE, lambda row: row in QUICK, ids=row_id)
)
def test_equals_one_device_on_the_union_batch(name, mesh, loss, options, mesh_of, x64):
    opt = STRATEGIES[name](TX, mesh_of(**mesh), loss, **options)
    expected, final = train(TX, on_one_device(loss), params(), batches())
    state = opt.init(params())
    losses_and_norms = []
    for batch in batches():
        state, metrics = opt.step(state, batch)
        losses_and_norms.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert relative_difference(state.params, final) <= 1e-10
    np.testing.assert_allclose(losses_and_norms, expected, rtol=1e-10)
    if loss is weighted:
        last = batches()[-1]
        assert int(metrics["masked"]) == int((last["mask"] == 0).sum())
    short_batch = jax.tree.map(lambda x: x[:5], batches()[0])  # rows that the devices do not divide
    evaluated = so.training.evaluation(opt, [short_batch])(state)
    np.testing.assert_allclose(
        evaluated["val_loss"], on_one_device(loss)(final, short_batch), rtol=1e-10
    )


def test_placements_shard_over_data_and_context_together(mesh_of):
    opt = so.fsdp(TX, mesh_of(data=2, context=4), plain, min_shard_elements=8)
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.float32, params()))
    specs = opt.specs(abstract)
    assert specs.params == {
        "w": P(None, ("data", "context")),
        "v": P(("data", "context")),
        "bias": P(None),
    }
    assert specs.opt_state[0].trace == specs.params
    report = opt.config.report(abstract)
    assert [row.replicated_because for row in report.replicated] == [
        "3 elements, fewer than min_shard_elements=8"
    ]
    assert {row.path: row.bytes_per_device for row in report.rows}["w"] == WIDTH * 16 * 4 // 8
    uneven = so.fsdp(TX, mesh_of(data=2, context=4), plain, min_shard_elements=1).config.report(
        abstract
    )
    assert (
        uneven.replicated[0].replicated_because
        == "shape (3,): no dim is divisible by data x context=8"
    )


def test_gradients_cross_the_wire_once(mesh_of):
    """A step has one reduce-scatter over data and context, N = 4. It sends as many bytes as fsdp on
    4 data devices.
    """
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.float32, params()))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), batches()[0])
    sent = []
    for mesh in (mesh_of(data=2, context=2), mesh_of(data=4)):
        opt = so.fsdp(TX, mesh, plain, min_shard_elements=8)
        report = so.hlo.audit(opt.step, opt.abstract_state(abstract), shapes)
        sent.append(
            {
                (collective.kind, collective.bytes)
                for collective in report.collectives
                if collective.bytes > 64
            }
        )
    assert sent[0] == sent[1]
    assert any(kind == "reduce-scatter" for kind, _ in sent[0])


def test_axes_of_a_users_mesh_share_the_role(x64):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("dp", "ring", "ulysses"))
    opt = so.fsdp(
        TX,
        so.Axes(mesh, data="dp", context=("ring", "ulysses")),
        weighted,
        min_shard_elements=8,
    )
    _, final = train(TX, on_one_device(weighted), params(), batches())
    state = opt.init(params())
    for batch in batches():
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, final) <= 1e-10
    assert state.params["w"].sharding.spec == P(None, ("dp", "ring", "ulysses"))


def test_batch_dims_say_where_positions_are(mesh_of, x64):
    def loss(params, batch):  # x [B, WIDTH, T]; table [B, 5] has none
        return (
            plain(params, batch | {"x": batch["x"].swapaxes(1, 2)})
            + 0 * batch["table"].sum(1).mean()
        )

    turned = [
        inputs | {"x": inputs["x"].swapaxes(1, 2), "table": np.ones((ROWS, 5))}
        for inputs in batches()
    ]
    opt = so.ddp(
        TX, mesh_of(data=2, context=4), loss, batch_dims=[("^x$", (0, 2)), ("^table$", (0, None))]
    )
    _, final = train(TX, loss, params(), turned)
    state = opt.init(params())
    for batch in turned:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, final) <= 1e-10


def test_replicas_that_train_apart_have_context_within(mesh_of, x64):
    """DiLoCo with H=1, inner SGD with rate a and outer SGD with rate 1 equals ddp with SGD and rate
    a.
    """
    tx = optax.sgd(0.05)
    inner = so.fsdp(tx, mesh_of(replica=2, data=2, context=2), plain, min_shard_elements=8)
    opt = so.diloco(inner, outer=optax.sgd(1.0), sync_every=1)
    _, final = train(tx, plain, params(), batches())
    state = opt.init(params())
    for batch in batches():
        state, _ = opt.step(state, batch)
    assert relative_difference(opt.synchronize(state).params, final) <= 1e-10


def test_stages_have_context_within(mesh_of, x64):
    """Gradients of a stage are summed over context. Gradients of the outer leaves are summed over
    the stages too.
    """

    def loss(outer, x, batch):
        each = (x @ outer["v"] - batch["y"]) ** 2
        return so.losses.Weighted((each * batch["mask"]).sum(), batch["mask"].sum())

    def block(weights, x):
        return x + jnp.tanh(x @ weights["w"])

    model = so.BlockModel(lambda outer, batch: batch["x"] @ outer["in"], block, loss)
    draw = np.random.default_rng(2)
    start = {
        "blocks": {"w": draw.normal(size=(2, 8, 8)) / 3},
        "in": draw.normal(size=(WIDTH, 8)),
        "v": np.ones(8),
    }
    opt = so.hybrid(
        TX, mesh_of(data=1, context=2, pipeline=2), model, micro_batches=2, min_shard_elements=8
    )
    _, final = train(TX, on_one_device(model.loss_fn), start, batches(2))
    state = opt.init(start)
    for batch in batches(2):
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, final) <= 1e-10


def shifted(params, batch):
    return errors(params, batch)[:, 1:].mean()


def attends(params, batch):
    scores = jax.nn.softmax(jnp.einsum("btf,bsf->bts", batch["x"], batch["x"]))
    return ((scores @ batch["x"] @ params["w"]) ** 2).mean()


def counts_its_own(params, batch):
    return (errors(params, batch) * jnp.arange(batch["x"].shape[1])[None]).mean()


def pooled(params, batch):
    return ((batch["x"] @ params["w"]).mean(1) ** 2).mean()


def recurrent(params, batch):
    def turn(h, x):
        return (jnp.tanh(h + x @ params["w"]), None)

    start = jnp.zeros((batch["x"].shape[0], 16), batch["x"].dtype)
    return (jax.lax.scan(turn, start, batch["x"].swapaxes(0, 1))[0] ** 2).mean()


def counts_rows(params, batch):
    return errors(params, batch).mean(), {"rows": so.losses.Sum(batch["scale"].sum())}


@pytest.mark.parametrize(
    ("loss", "operation"),
    [
        (shifted, "slice"),
        (attends, "dot_general"),
        (counts_its_own, "iota"),
        (pooled, "reduce_sum"),
        (recurrent, "scan|while|add|dot_general"),
        (counts_rows, ""),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_loss_that_mixes_positions_is_refused_before_anything_compiles(loss, operation, mesh_of):
    opt = so.ddp(TX, mesh_of(data=2, context=2), loss, view="per_device")
    with pytest.raises(
        so.errors.NotSeparableError, match=r"is not shown to be a \(weighted\) mean over positions"
    ) as error:
        opt.step(opt.init(params()), batches()[0])
    assert re.match(operation, error.value.operation)
    opt = so.ddp(TX, mesh_of(data=2, context=2), loss, view="global")
    if loss is attends:  # any loss is exact there
        metrics = opt.step(opt.init(params()), batches()[0])[1]
        np.testing.assert_allclose(metrics["loss"], loss(params(), batches()[0]), rtol=1e-5)


def test_rows_of_the_whole_batch_are_not_to_be_had(mesh_of):
    def loss(p, batch):
        return (so.losses.batch_mean(errors(p, batch)) ** 2).mean()

    opt = so.ddp(TX, mesh_of(data=2, context=2), loss, view="per_device")
    with pytest.raises(ValueError, match="on a context axis the loss sees a part of each sequence"):
        opt.step(opt.init(params()), batches()[0])


def test_attention_over_an_array_that_context_does_not_split_is_refused(mesh_of):
    """It would be taken for parts of one sequence."""

    def loss(params, batch):
        heads = (batch["whole"] @ params["w"])[:, :, None]
        return errors(params, batch).mean() + (so.nn.attention(heads, heads, heads) ** 2).mean()

    whole_batch = batches()[0] | {"whole": batches()[0]["x"]}
    opt = so.ddp(
        TX, mesh_of(data=2, context=2), loss, view="per_device", batch_dims=[("^whole$", (0, None))]
    )
    with pytest.raises(
        so.errors.NotSeparableError, match=r"not shown to be a .* mean over positions"
    ):
        opt.step(opt.init(params()), whole_batch)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            lambda batch: jax.tree.map(lambda x: x[:, :11] if x.ndim > 1 else x, batch),
            {},
            (
                "ddp: 3 batch leaves cannot be split over mesh axis 'context' (size 2).\n  mask:"
                " shape (8, 11); dim 1 is 11, which context=2 does not divide; it divides 10 or 12\n"
                "  x: shape (8, 11, 8); dim 1 is 11, which context=2 does not divide; it divides 10 or"
                " 12\n  y: shape (8, 11); dim 1 is 11, which context=2 does not divide; it divides 10"
                " or 12\nFix: use a length that"
                " it divides, with inputs and targets [B, T] each rather than tokens [B, T + 1]; or"
                " batch_dims=[(regex, (0, None))] for leaves without positions."
            ),
        ),
        (
            lambda batch: {"scale": batch["scale"]},
            {},
            (
                "ddp: mesh axis 'context' (size 2) splits positions, and no batch leaf has any.\n"
                "Fix: make the mesh with context=1, or name the dim of positions in batch_dims."
            ),
        ),
        (
            lambda batch: batch,
            {"batch_dims": [("^y$", (0, 2))]},
            (
                "ddp: batch_dims do not fit the batch.\n"
                "  y: shape (8, 12); no dim 2 for positions\n"
                "Fix: name a dim that the leaf has and that does not count rows, or None."
            ),
        ),
    ],
    ids=["uneven", "none", "missing"],
)
def test_batches_that_cannot_be_split_are_refused_with_numbers(change, options, message, mesh_of):
    opt = so.ddp(TX, mesh_of(data=2, context=2), plain, **options)
    with pytest.raises(ValueError, match=r"^ddp: ") as error:
        opt.step(opt.init(params()), change(batches()[0]))
    assert str(error.value) == message


def test_tables_are_exchanged_over_data_and_context(mesh_of, x64):
    """Rows of an embedding that is sharded by columns over both."""
    model = so.BlockModel(
        embed=lambda outer, batch: so.nn.embedding(outer["table"], batch["ids"]),
        block=lambda weights, x: x + jnp.tanh(x @ weights["w"]),
        loss=lambda outer, x, batch: (x * batch["mask"][..., None]).mean(),
        tables=("table",),
    )
    draw = np.random.default_rng(2)
    start = {"blocks": {"w": draw.normal(size=(2, 8, 8))}, "table": draw.normal(size=(512, 8))}
    ids = [inputs | {"ids": draw.integers(0, 512, size=(ROWS, LENGTH))} for inputs in batches()]
    opt = so.fsdp(TX, mesh_of(data=2, context=2), model, min_shard_elements=8)
    assert opt.specs(start).params["table"] == P(None, ("data", "context"))
    _, final = train(TX, model.loss_fn, start, ids)
    state = opt.init(start)
    for batch in ids:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, final) <= 1e-10
    kinds = so.hlo.audit(opt.step, state, ids[0]).by_kind()
    assert "all-to-all" in kinds


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["not summed", "first positions on every device"])
def test_mutations_go_red(broken, mesh_of, x64, monkeypatch):
    axes_of = config.axes_of
    place = build.place_batch

    def without_context(*args, **keywords):
        axes = axes_of(*args, **keywords)
        return axes._replace(summed=tuple(axis for axis in axes.summed if axis != "context"))

    def first_positions(config, batch):
        def half(x):
            return np.concatenate([x[:, : LENGTH // 2]] * 2, axis=1) if x.ndim > 1 else x

        return place(config, jax.tree.map(half, batch))

    if broken == "not summed":
        monkeypatch.setattr(config, "axes_of", without_context)
    else:
        monkeypatch.setattr(build, "place_batch", first_positions)
    opt = so.ddp(TX, mesh_of(data=2, context=2), weighted)
    _, final = train(TX, on_one_device(weighted), params(), batches())
    state = opt.init(params())
    for batch in batches():
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, final) > 1e-4
