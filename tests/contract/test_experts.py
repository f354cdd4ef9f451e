"""An expert axis splits rows as data does, and splits leaves of experts. The loss itself sends
tokens to experts.

The layer here gathers tokens and scatters results, in a few lines; `so.nn.mixture_of_experts` is
tested in tests/rooms/nn."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.reference import relative_difference, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.config import _axes as axes
from shardopt.trace._marks import EXPERTS as EXPERTS_MARK
from shardopt.trace._marks import marked

EXPERTS = 8
WIDTH = 4
HIDDEN = 6
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
LEAVES = [("experts/", "experts")]


def experts(weights, x, router):
    """Each token through the expert that it scores highest, weighted by the score."""
    scores = jax.nn.softmax(x @ router)
    weight = jax.nn.one_hot(scores.argmax(-1), EXPERTS) * scores
    num_local = weights["up"].shape[0]
    if num_local < EXPERTS:
        x, weight = (jax.lax.all_gather(array, "expert", tiled=True) for array in (x, weight))
        weight = jax.lax.dynamic_slice_in_dim(
            weight, jax.lax.axis_index("expert") * num_local, num_local, 1
        )
    hidden = jnp.tanh(jnp.einsum("bd,edf->bef", x, weights["up"]))
    y = jnp.einsum("bef,efd,be->bd", hidden, weights["down"], weight)
    return jax.lax.psum_scatter(y, "expert", tiled=True) if num_local < EXPERTS else y


def layer(weights, x, router):
    return x + marked(EXPERTS_MARK, experts, top_k=1)(weights, x, router)


def weighted(params, batch):
    x = batch["x"] @ params["in"]
    for layer_params in (params["first"], params["second"]):
        x = layer(layer_params["experts"], x, layer_params["router"])
    each = ((x - batch["y"]) ** 2).sum(-1)
    return so.losses.Weighted((each * batch["weight"]).sum(), batch["weight"].sum())


MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda block, x: layer(block["experts"], x, block["router"]),
    loss=lambda outer, x, batch: ((x - batch["y"]) ** 2).mean(),
)


def one_layer(draw, *stacked):
    up = draw.normal(size=(*stacked, EXPERTS, WIDTH, HIDDEN))
    down = draw.normal(size=(*stacked, EXPERTS, HIDDEN, WIDTH))
    return {
        "experts": {"up": up / 2, "down": down / 2},
        "router": draw.normal(size=(*stacked, WIDTH, EXPERTS)),
    }


def params(loss):
    draw = np.random.default_rng(0)
    start = {"in": draw.normal(size=(WIDTH, WIDTH))}
    if loss is MODEL:
        return start | {"blocks": one_layer(draw, 4)}
    return start | {"first": one_layer(draw), "second": one_layer(draw)}


def batches(steps=3):
    draw = np.random.default_rng(1)
    scale = np.linspace(0.2, 2.0, 16)[:, None]  # rows differ, so that each must count as it should

    def drawn():
        return draw.normal(size=(16, WIDTH))

    return [
        {"x": scale * drawn(), "y": drawn(), "weight": draw.uniform(size=16)} for _ in range(steps)
    ]


def on_one_device(loss):
    def reference(params, batch):
        if loss is MODEL:
            return MODEL.loss_fn(params, batch)
        weighted_loss = weighted(params, batch)
        return weighted_loss.total / weighted_loss.weight

    return reference


TABLE = [
    ("ddp", {"expert": 4, "data": 2}, weighted, {}),
    ("ddp", {"expert": 2, "data": 2, "replica": 2}, weighted, {"micro_batches": 2}),
    ("zero1", {"expert": 4, "data": 2}, weighted, {}),
    ("zero2", {"expert": 2, "data": 2}, weighted, {"micro_batches": 4}),
    ("fsdp", {"expert": 2, "data": 2}, weighted, {"micro_batches": 2}),
    ("fsdp", {"expert": 8, "data": 1}, weighted, {}),
    ("fsdp", {"expert": 4, "data": 2}, MODEL, {}),
    ("zero1", {"expert": 2, "data": 4}, MODEL, {"micro_batches": 2}),
    ("fsdp", {"expert": 2, "data": 2, "replica": 2}, MODEL, {"micro_batches": 2}),
    ("hybrid", {"expert": 2, "data": 2, "pipeline": 2}, MODEL, {"micro_batches": 2}),
    (
        "hybrid",
        {"expert": 4, "data": 1, "pipeline": 2},
        MODEL,
        {"micro_batches": 4, "placement": "zero1"},
    ),
]
QUICK = [TABLE[3], TABLE[9]]


def row_id(row):
    name, mesh, loss, options = row
    sizes = ",".join(f"{axis}{size}" for axis, size in mesh.items())
    return "-".join(
        [
            name,
            sizes,
            "blocks" if loss is MODEL else "plain",
            *(f"{k}={v}" for k, v in options.items()),
        ]
    )


def strategy(name, mesh, loss, **options):
    if name == "hybrid":
        options["min_shard_elements"] = 1
    return {"hybrid": so.hybrid, **STRATEGIES}[name](
        TX, mesh, loss, rules=[*LEAVES, *options.pop("rules", ())], **options
    )


@pytest.mark.parametrize(
    ("name", "mesh", "loss", "options"), tiered(TABLE, lambda row: row in QUICK, ids=row_id)
)
def test_equals_one_device_on_the_union_batch(name, mesh, loss, options, mesh_of, x64):
    opt = strategy(name, mesh_of(**mesh), loss, view="unproved", **options)
    expected, final = train(TX, on_one_device(loss), params(loss), batches())
    state = opt.init(params(loss))
    losses_and_norms = []
    for batch in batches():
        state, metrics = opt.step(state, batch)
        losses_and_norms.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert relative_difference(state.params, final) <= 1e-10
    np.testing.assert_allclose(losses_and_norms, expected, rtol=1e-10)
    if mesh["expert"] < 8:
        short_batch = jax.tree.map(
            lambda x: x[:5], batches()[0]
        )  # rows that the devices do not divide
        evaluated = so.training.evaluation(opt, [short_batch])(state)
        np.testing.assert_allclose(
            evaluated["val_loss"], on_one_device(loss)(final, short_batch), rtol=1e-10
        )


@pytest.mark.slow  # a mutation
def test_gradients_of_experts_summed_over_expert_are_seen(mesh_of, x64, monkeypatch):
    table = axes.TABLE | {"expert": axes.TABLE["expert"]._replace(sums="all")}
    monkeypatch.setattr(axes, "TABLE", table)
    opt = strategy("ddp", mesh_of(expert=2), weighted, view="unproved")
    state, _ = opt.step(opt.init(params(weighted)), batches()[0])
    _, final = train(TX, on_one_device(weighted), params(weighted), batches(1))
    assert relative_difference(state.params, final) > 1e-3


def shapes(loss):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params(loss))


def test_experts_live_on_their_devices_and_are_sharded_over_data_besides(mesh_of):
    opt = strategy("fsdp", mesh_of(data=2, expert=4), weighted)
    specs = opt.specs(shapes(weighted))
    # the first dim that data divides
    expert_specs = dict.fromkeys(("up", "down"), P("expert", "data", None))
    assert specs.params["first"] == {"experts": expert_specs, "router": P(None, ("data", "expert"))}
    assert specs.opt_state[1][0].trace == specs.params
    rows = {row.path: row.bytes_per_device for row in opt.config.report(shapes(weighted)).rows}
    assert rows["first/experts/up"] == EXPERTS * WIDTH * HIDDEN * 4 // 8
    blocks = (
        strategy("fsdp", mesh_of(data=2, expert=4), MODEL).specs(shapes(MODEL)).params["blocks"]
    )
    assert blocks["experts"]["up"] == P(None, "expert", "data", None)
    ruled = strategy(
        "fsdp", mesh_of(data=2, expert=4), weighted, rules=[("experts/down$", P(None, "tensor"))]
    )
    assert ruled.specs(shapes(weighted)).params["first"]["experts"] == expert_specs, (
        "a rule for tensor=1 takes a dim from data"
    )
    replicated = strategy("ddp", mesh_of(data=2, expert=4), weighted).specs(shapes(weighted)).params
    assert replicated["first"] == {
        "experts": dict.fromkeys(expert_specs, P("expert", None, None)),
        "router": P(None, None),
    }


@pytest.mark.parametrize(
    "counts", tiered([[4, 1], [4, 2, 1]], lambda counts: len(counts) == 2, ids=str)
)
def test_restores_on_another_number_of_expert_devices(counts, mesh_of, tmp_path):
    batch = jax.tree.map(jnp.float32, batches(1)[0])
    start = jax.tree.map(jnp.float32, params(MODEL))
    makers = {
        4: lambda: strategy("fsdp", mesh_of(expert=4, data=2), MODEL, view="unproved"),
        2: lambda: strategy("fsdp", mesh_of(expert=2), MODEL, view="unproved"),
        1: lambda: strategy("zero1", mesh_of(data=4), MODEL),
    }
    opts = [makers[count]() for count in counts]
    state, _ = opts[0].step(opts[0].init(start), batch)
    so.save(tmp_path / "run", state)
    stepped_params = []
    for opt in opts:
        restored = so.restore(tmp_path / "run", opt.abstract_state(shapes(MODEL)))
        assert relative_difference(restored.params, state.params) == 0
        stepped_params.append(opt.step(restored, batch)[0].params)
    assert all(
        relative_difference(params, stepped_params[0]) < 1e-6 for params in stepped_params[1:]
    )


def penalised(params, batch):
    loss = weighted(params, batch)
    return loss.total / loss.weight + 0.1 * (params["second"]["experts"]["up"] ** 2).mean()


def test_experts_used_elsewhere_than_in_their_layer_are_refused(mesh_of):
    """A penalty on weights would count only one device's experts."""
    opt = strategy("ddp", mesh_of(expert=2), penalised, view="per_device")
    with pytest.raises(so.errors.NotSeparableError) as caught:
        opt.step(opt.init(params(penalised)), batches(1)[0])
    said = str(caught.value)
    assert said.startswith(
        "ddp: the loss uses 1 leaf of experts outside of so.nn.mixture_of_experts, and each of 2"
        " devices along expert has its own experts.\n  second/experts/up: integer_pow at "
    )
    assert "(penalised): return loss.total" in said


def test_experts_used_elsewhere_in_a_block_are_refused(mesh_of):
    def block(block, x):
        return MODEL.block(block, x) + block["experts"]["down"].sum()

    opt = strategy("fsdp", mesh_of(expert=2), MODEL._replace(block=block), view="per_device")
    with pytest.raises(
        so.errors.NotSeparableError,
        match=r"blocks/experts/down: reduce_sum at tests/contract/test_experts\.py",
    ):
        opt.step(opt.init(params(MODEL)), batches(1)[0])
    opt = strategy("fsdp", mesh_of(expert=2), MODEL)
    opt.step(opt.init(params(MODEL)), batches(1)[0])


@pytest.mark.parametrize(
    ("leaves", "options", "message"),
    [
        ((), {}, "fsdp: mesh axis 'expert' (size 4) is above 1, but no leaf is split over it.\n"
         "Fix: name the leaves whose first dim counts experts, rules=[(regex, 'experts'), ...], or make the mesh with expert=1."),
        (["first/router"], {"min_shard_elements": 1}, None),
        (["^in$", "scale"], {}, "fsdp: 1 rule matched no parameter.\n  'scale'\nFix: match a key path, such as: "
         "first/experts/down, first/experts/up, first/router, in, second/experts/down, second/experts/up, second/router."),
        (["experts/"], {"rules": [("up", P("tensor", None, None))]}, "fsdp: rules split the first dim of 2 leaves of experts, "
         "which mesh axis 'expert' (size 4) splits.\n  first/experts/up: shape (8, 4, 6)\n"
         "  second/experts/up: shape (8, 4, 6)\n"
         "Fix: let the rules name other dims of these leaves."),
    ],
    ids=["nothing named", "rows of a router", "no such leaf", "a rule takes the dim"],
)  # fmt: skip
def test_bad_input_is_refused(leaves, options, message, mesh_of):
    opt = so.fsdp(
        TX,
        mesh_of(expert=4, tensor=2 if "rules" in options else 1),
        weighted,
        rules=[*((leaf, "experts") for leaf in leaves), *options.pop("rules", ())],
        **options,
    )
    if message is None:
        assert opt.specs(shapes(weighted)).params["first"]["router"] == P("expert", None)
        return
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        opt.specs(shapes(weighted))


def test_experts_that_the_axis_does_not_divide_are_refused(mesh_of):
    odd = shapes(weighted) | {
        "first": {"experts": {"up": jax.ShapeDtypeStruct((6, 4, 6), jnp.float32)}}
    }
    message = (
        "ddp: 1 leaf of experts cannot be split over mesh axis 'expert' (size 4).\n "
        " first/experts/up: shape (6, 4, 6); dim 0 is 6, which expert=4 does not divide; it divides"
        " 4 or 8\nFix: choose expert=1 or 2, or let rules name only leaves [experts, ...] as"
        " experts."
    )
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        so.ddp(TX, mesh_of(expert=4), weighted, rules=[("up", "experts")]).specs(odd)


def test_a_leaf_of_experts_without_dims_is_refused(mesh_of):
    scalar = shapes(weighted) | {"scale": jax.ShapeDtypeStruct((), jnp.float32)}
    with pytest.raises(ValueError, match=r"scale: shape \(\); no dim counts experts\nFix: choose"):
        so.ddp(TX, mesh_of(expert=4), weighted, rules=[("scale", "experts")]).specs(scalar)


def test_a_reducer_is_refused(mesh_of):
    with pytest.raises(ValueError, match="those of experts differ along expert"):
        so.ddp(TX, mesh_of(expert=4), weighted, rules=LEAVES, reducer=so.reducers.int8())
