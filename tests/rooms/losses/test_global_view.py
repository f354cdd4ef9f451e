"""view="global": losses that mix rows, as people write them, take the steps that one device takes
on the whole batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import diloco as reference
from support.losses import LOSSES, cast
from support.reference import OPTIMIZERS, relative_difference, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so

WAYS = {
    "ddp": ("ddp", {"data": 8}),
    "zero1": ("zero1", {"data": 8}),
    "zero2": ("zero2", {"data": 8}),
    "fsdp": ("fsdp", {"data": 8}),
    "hsdp": ("fsdp", {"replica": 2, "data": 4}),
}
TOLERANCE = {"float64": 1e-10, "float32": 2e-5}
GRID = [(loss, way, "float64") for loss in LOSSES for way in WAYS]
# each loss once
PAIRED = [row for i, row in enumerate(GRID) if i // len(WAYS) % len(WAYS) == i % len(WAYS)]
# in float32 a row may fall on the other side of a threshold
SMOOTH = ("clip", "batch_norm", "root_of_mean")
GRID += [(loss, way, "float32") for loss in SMOOTH for way in WAYS]
FAST = [PAIRED[0], PAIRED[3]]
# mixed as in others
REPEATED = ("advantages", "inner_gradient", "constant_key", "top_half", "balance", "root_of_mean")
QUICK = [row for row in PAIRED if row[0] not in REPEATED][:4]


def check(opt, loss_fn, params, batches, *, tx, dtype="float64", **how):
    """Train, and compare losses, norms and parameters with one device; return what came out."""
    history, final = train(tx, loss_fn, params, batches, **how)
    state = opt.init(params)
    losses_and_norms = []
    for batch in batches:
        state, metrics = opt.step(state, batch)
        losses_and_norms.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(losses_and_norms, history, rtol=TOLERANCE[dtype])
    assert relative_difference(state.params, final) <= TOLERANCE[dtype]
    return state


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    tiered(GRID, lambda row: row in QUICK, fast=lambda row: row in FAST, ids="-".join),
)
def test_any_loss_is_exact(name, way, dtype, mesh_of):
    strategy, sizes = WAYS[way]
    with jax.enable_x64(True):
        case = LOSSES[name]
        tx = OPTIMIZERS["momentum"]()
        params = cast(case.params, np.dtype(dtype))
        opt = STRATEGIES[strategy](tx, mesh_of(**sizes), case.loss_fn, view="global")
        check(opt, case.loss_fn, params, case.batches(4, np.dtype(dtype)), tx=tx, dtype=dtype)


@pytest.mark.parametrize(
    ("way", "optimizer"), tiered([("fsdp", "muon"), ("zero1", "adafactor")], lambda row: False)
)
def test_any_optimizer_is_exact(way, optimizer, mesh_of, x64):
    case, (strategy, sizes) = LOSSES["batch_norm"], WAYS[way]
    tx = OPTIMIZERS[optimizer]()
    opt = STRATEGIES[strategy](tx, mesh_of(**sizes), case.loss_fn, view="global")
    check(opt, case.loss_fn, case.params, case.batches(3), tx=tx)


MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh((x - x.mean(0, keepdims=True)) @ w["up"]) @ w["down"],
    loss=lambda outer, x, batch: jnp.sqrt(jnp.mean((x @ outer["out"] - batch["y"]) ** 2)),
)
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]


def block_params():
    draw = np.random.default_rng(2)

    def normal(*shape):
        return np.asarray(draw.normal(size=shape) * 0.3)

    return {
        "blocks": {"up": normal(3, 16, 24), "down": normal(3, 24, 16)},
        "in": normal(12, 16),
        "out": normal(16, 5),
    }


@pytest.mark.slow  # test_any_loss_is_exact
@pytest.mark.parametrize(
    ("strategy", "sizes", "remat"),
    [
        ("fsdp", {"data": 4, "tensor": 2}, None),
        pytest.param("fsdp", {"replica": 2, "data": 4}, "full", marks=pytest.mark.slow),
        pytest.param("zero1", {"data": 4, "tensor": 2}, "full", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_blocks_that_mix_rows_equal_one_device(strategy, sizes, remat, mesh_of, x64):
    tx = OPTIMIZERS["clip_adamw"]()
    model = MODEL._replace(remat=remat)
    rules = RULES if "tensor" in sizes else ()
    opt = STRATEGIES[strategy](tx, mesh_of(**sizes), model, rules=rules, view="global")
    check(opt, model.loss_fn, block_params(), LOSSES["batch_norm"].batches(3), tx=tx)


@pytest.mark.slow
def test_hybrid_on_one_stage_equals_one_device(mesh_of, x64):
    tx = OPTIMIZERS["momentum"]()
    opt = so.hybrid(
        tx, mesh_of(data=8), MODEL, micro_batches=1, min_shard_elements=8, view="global"
    )
    check(opt, MODEL.loss_fn, block_params(), LOSSES["batch_norm"].batches(2), tx=tx)


def test_a_line_search_sees_the_whole_batch(mesh_of, x64):
    case = LOSSES["root_of_mean"]
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(6))
    opt = so.fsdp(tx, mesh_of(data=8), case.loss_fn, min_shard_elements=8, view="global")
    check(opt, case.loss_fn, case.params, case.batches(3), tx=tx, value_fn=True)


def test_evaluation_of_batches_that_devices_do_not_divide(mesh_of, x64):
    case = LOSSES["batch_norm"]
    opt = so.fsdp(
        optax.sgd(0.1), mesh_of(data=8), case.loss_fn, min_shard_elements=8, view="global"
    )
    batches = [*case.batches(1), *case.batches(1, rows=5)]
    with pytest.warns(UserWarning, match="rows are mixed"):
        val_loss = so.training.evaluation(opt, batches)(opt.init(case.params))["val_loss"]
    first_loss, other = (float(jax.jit(case.loss_fn)(case.params, batch)) for batch in batches)
    np.testing.assert_allclose(val_loss, (32 * first_loss + 5 * other) / 37, rtol=1e-12)


def test_evaluation_weighs_batches_that_are_cut_as_those_that_run_whole(mesh_of, x64):
    case = LOSSES["batch_norm"]

    def of_rows(params, batch):
        return ((batch["x"] @ params["up"]) ** 2).mean(1)

    def loss(params, batch):
        return so.losses.Weighted(
            of_rows(params, batch).sum(), jnp.sum(jnp.ones_like(batch["x"][:, 0]))
        )

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), loss, view="global", micro_batches=2)
    batches = [*case.batches(1), *case.batches(1, rows=5)]
    val_loss = so.training.evaluation(opt, batches)(opt.init(case.params))["val_loss"]
    np.testing.assert_allclose(
        val_loss, np.concatenate([of_rows(case.params, batch) for batch in batches]).mean()
    )


def sam(opaque_mode):
    rise = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    return optax.contrib.sam(optax.sgd(0.05, momentum=0.9), rise, opaque_mode=opaque_mode)


SOPHIA = optax.contrib.sophia(1e-2, update_interval=2)
ASKING = {
    "sam": ("fsdp", sam(True), "global", ["grad_fn"]),
    "sophia": ("zero1", SOPHIA, "global", ["obj_fn"]),
    "sam per device": ("zero1", sam(True), "per_device", ["grad_fn"]),
    "sophia per device": ("fsdp", SOPHIA, "per_device", ["obj_fn"]),
    "sam in turns": ("ddp", sam(False), "global", []),
}


@pytest.mark.parametrize("name", tiered(ASKING, lambda name: name == "sam"))
def test_optimizers_that_ask_for_more_than_a_gradient(name, mesh_of, x64):
    way, tx, view, asks = ASKING[name]
    case, (strategy, sizes) = LOSSES["batch_norm"], WAYS[way]
    loss_fn = case.loss_fn if view == "global" else mean_square
    opt = STRATEGIES[strategy](tx, mesh_of(**sizes), loss_fn, view=view)
    check(opt, loss_fn, case.params, case.batches(4), tx=tx, asks=asks)


def mean_square(params, batch):
    return jnp.mean(
        (
            jnp.tanh(batch["x"] @ params["up"] * params["scale"][None, :]) @ params["down"]
            - batch["y"]
        )
        ** 2
    )


def noisy(params, batch, rng):
    mask = jax.random.bernoulli(rng, 0.7, batch["x"].shape)
    error = jnp.where(mask, batch["x"], 0.0) @ params["up"] * params["scale"][None, :]
    total = so.losses.Weighted((error.mean(-1) ** 2 * batch["mask"]).sum(), batch["mask"].sum())
    mean = jax.lax.stop_gradient(error).mean(0) + params["mean"]
    metrics = {
        "largest": jnp.abs(error).max(),
        "masked": so.losses.Weighted(error.sum(), batch["mask"].sum()),
    }
    return total, {**metrics, "stats": so.losses.Updated({"mean": mean})}


def test_keys_weights_metrics_and_updates_are_those_of_one_device(mesh_of, x64):
    params = {**LOSSES["batch_norm"].params, "mean": np.zeros(16)}
    del params["down"]
    runs = []
    for data, view in ((1, "per_device"), (8, "global")):
        opt = so.fsdp(
            optax.sgd(0.1),
            mesh_of(data=data),
            noisy,
            min_shard_elements=8,
            rules=[("mean", "frozen")],
            view=view,
        )
        state = opt.init(params, jax.random.key(3))
        for batch in LOSSES["batch_norm"].batches(2):
            state, metrics = opt.step(state, batch)
        runs.append((state.params, metrics))
    assert relative_difference(runs[1], jax.device_get(runs[0])) <= 1e-10


CUT = [(loss, way) for loss in LOSSES for way in ("fsdp", "zero1")]
CUT_QUICK = [("weighted_by_data", "zero1")]


@pytest.mark.parametrize(("name", "way"), tiered(CUT, lambda row: row in CUT_QUICK, ids="-".join))
def test_micro_batches_of_a_loss_that_mixes_rows_run_at_once_and_it_is_said(
    name, way, mesh_of, x64
):
    case, tx, (strategy, sizes) = LOSSES[name], OPTIMIZERS["momentum"](), WAYS[way]
    opt = STRATEGIES[strategy](tx, mesh_of(**sizes), case.loss_fn, micro_batches=2, view="global")
    with pytest.warns(
        UserWarning,
        match=r": micro_batches=2, but the whole batch runs at once: the loss is not shown",
    ):
        check(opt, case.loss_fn, case.params, case.batches(2), tx=tx)


def masked(params, batch):
    error = (
        jnp.tanh(batch["x"] @ params["up"] * params["scale"][None, :]) @ params["down"] - batch["y"]
    ) ** 2
    return so.losses.Weighted((error.mean(-1) * batch["weight"]).sum(), batch["weight"].sum()), {
        "mean": error.mean()
    }


@pytest.mark.parametrize(
    ("way", "local"),
    tiered([("fsdp", False), ("hsdp", False), ("hsdp", True)], lambda row: row == ("fsdp", False)),
)
def test_micro_batches_of_a_mean_over_rows_are_cut(way, local, mesh_of, x64):
    case, tx, (strategy, sizes) = LOSSES["weighted_by_data"], OPTIMIZERS["momentum"](), WAYS[way]
    opt = STRATEGIES[strategy](tx, mesh_of(**sizes), masked, micro_batches=2, view="global")
    batches = case.batches(2)
    if not local:
        state = check(opt, case.loss_fn, case.params, batches, tx=tx)
        assert "while" in opt.step.lower(state, batches[0]).as_text()
        return
    opt = so.local_sgd(opt, sync_every=2)
    state = opt.init(case.params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    outer_options = {"rate": 1.0, "momentum": 0.0, "nesterov": False}
    shared, _ = reference.diloco(
        tx, case.loss_fn, case.params, batches, 2, sync_every=2, outer=outer_options
    )
    assert relative_difference(state.params, shared) < 1e-10


@pytest.mark.slow
def test_blocks_in_micro_batches_equal_one_device(mesh_of, x64):
    tx = OPTIMIZERS["momentum"]()
    model = MODEL._replace(
        block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
        loss=lambda outer, x, batch: jnp.mean((x @ outer["out"] - batch["y"]) ** 2),
    )
    opt = STRATEGIES["fsdp"](
        tx, mesh_of(data=4, tensor=2), model, rules=RULES, micro_batches=2, view="global"
    )
    check(opt, model.loss_fn, block_params(), LOSSES["batch_norm"].batches(2), tx=tx)


@pytest.mark.slow  # test_rows.py
def test_replicas_that_train_apart_each_see_their_whole_rows(mesh_of, x64):
    case = LOSSES["batch_norm"]
    tx = OPTIMIZERS["momentum"]()
    strategy = so.fsdp(
        tx, mesh_of(replica=2, data=4), case.loss_fn, min_shard_elements=8, view="global"
    )
    opt = so.local_sgd(strategy, sync_every=2)
    batches = case.batches(5)
    state = opt.init(case.params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    outer_options = {"rate": 1.0, "momentum": 0.0, "nesterov": False}
    shared, replica_params = reference.diloco(
        tx, case.loss_fn, case.params, batches, 2, sync_every=2, outer=outer_options
    )
    assert relative_difference(state.params, shared) < 1e-10
    stacked = jax.tree.map(lambda *x: np.stack(x), *replica_params)
    assert relative_difference(state.opt_state.params.value, stacked) < 1e-10


@pytest.mark.slow
def test_in_warm_up_steps_there_is_one_loss_of_the_whole_batch(mesh_of, x64):
    case = LOSSES["batch_norm"]
    tx = OPTIMIZERS["momentum"]()
    strategy = so.ddp(tx, mesh_of(replica=2, data=4), case.loss_fn, view="global")
    opt = so.local_sgd(strategy, sync_every=2, warmup_steps=2)
    check(opt, case.loss_fn, case.params, case.batches(2), tx=tx)


@pytest.mark.parametrize("strategy", tiered(["zero1", "fsdp"], lambda row: row == "fsdp"))
def test_specs_are_true_buffers_are_reused_and_nothing_recompiles(strategy, mesh_of):
    case = LOSSES["clip"]
    params, (first, second) = cast(case.params, np.float32), case.batches(2, np.float32)
    opt = STRATEGIES[strategy](optax.adam(1e-3), mesh_of(data=8), case.loss_fn, view="global")
    specs = opt.specs(params)
    expected = jax.tree.map(
        lambda spec: NamedSharding(opt.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    state = opt.init(params)
    old = jax.tree.leaves(state)
    state, _ = opt.step(state, first)
    assert all(leaf.is_deleted() for leaf in old if leaf.size > 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax._src.compiler,
            "compile_or_get_cached",
            lambda *_, **__: pytest.fail("compiled again"),
        )
        state, _ = opt.step(state, second)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == expected


def constrained(params, batch):
    x = jax.lax.with_sharding_constraint(batch["x"] @ params["up"], P("data"))
    with linen.logical_axis_rules([("batch", "data"), ("embed", None)]):
        x = linen.with_logical_constraint(x * params["scale"][None, :], ("batch", "embed"))
    return jnp.sqrt(jnp.mean((x @ params["down"] - batch["y"]) ** 2))


def test_models_that_carry_constraints_run_as_they_are(mesh_of, x64):
    case = LOSSES["batch_norm"]
    tx = OPTIMIZERS["momentum"]()
    opt = so.fsdp(tx, mesh_of(data=8), constrained, min_shard_elements=8, view="global")

    def plain(params, batch):
        return jnp.sqrt(
            jnp.mean(
                (batch["x"] @ params["up"] * params["scale"][None, :] @ params["down"] - batch["y"])
                ** 2
            )
        )

    check(opt, plain, case.params, case.batches(2), tx=tx)


AXIS_TYPES = {"Explicit": AxisType.Explicit, "Auto": AxisType.Auto}
CONSTRAINTS = {
    "spec": lambda mesh, x: jax.lax.with_sharding_constraint(x, P("dp")),
    "sharding": lambda mesh, x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp"))),
    "reshard": lambda mesh, x: jax.sharding.reshard(x, P("dp")),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_a_constraint_over_an_axis_of_the_users_own_mesh_holds_or_has_a_remedy(kind, name):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AXIS_TYPES[kind],))
    params = {"w": np.ones((8, 2), np.float32)}

    def loss_fn(params, batch):
        return jnp.mean(CONSTRAINTS[name](mesh, batch @ params["w"]) ** 2)

    def step(view):
        opt = so.fsdp(optax.sgd(0.1), so.Axes(mesh, data="dp"), loss_fn, view=view)
        return opt.step.lower(opt.abstract_state(params), np.ones((8, 8), np.float32))

    assert refused(lambda: step("auto")).startswith(
        "fsdp: the loss constrains a sharding, but with view='per_device'"
    )
    if name == "spec" or (name, kind) == ("sharding", "Auto"):
        step("global")
    else:
        assert refused(lambda: step("global")).endswith(
            "\nFix: call jax.lax.with_sharding_constraint(x, PartitionSpec(...)), without a mesh."
        )


def test_a_loss_written_for_the_other_view_is_refused(mesh_of):
    case = LOSSES["batch_norm"]
    mesh = mesh_of(data=8)
    (batch,), tx = case.batches(1, np.float32), optax.sgd(0.1)

    def placed(params, batch):
        return jnp.mean(jax.lax.with_sharding_constraint(batch["x"] @ params["up"], P("data")) ** 2)

    opt = so.fsdp(tx, mesh, placed)
    assert (
        refused(lambda: opt.step(opt.init(case.params), batch))
        == "fsdp: the loss constrains a sharding, but with view='per_device' every device runs it"
        " on its own rows.\n  The spec of NamedSharding passed to with_sharding_constraint can"
        " only refer to Auto axes of the mesh. Got spec=P('data',)\nFix: use view='global', in"
        " which with_sharding_constraint and flax's logical axes hold as they are, or leave out"
        " all axes but tensor (in logical_axis_rules map them to None)."
    )
    other = so.ddp(
        tx, mesh, lambda params, batch: jax.lax.pmean(params["up"].mean(), "data"), view="global"
    )
    assert (
        refused(lambda: other.step(other.init(case.params), batch))
        == "ddp: the loss calls a collective over 'data', but with view='global' it runs once, on"
        " the whole batch.\nFix: take the collective out (a mean is jnp.mean; flax's BatchNorm"
        " has axis_name=None), use so.losses.batch_mean, right in both views, or view='per_device'."
    )


SENT = {
    "ddp": {"all-reduce": 1},
    "zero1": {"all-reduce": 1, "all-gather": 1},
    "fsdp": {"all-reduce": 1, "all-gather": 2},
}
"""What XLA:CPU sends, in bytes of all parameters."""


@pytest.mark.parametrize("way", tiered(SENT, lambda way: way == "fsdp"))
def test_the_partitioner_sends_the_bytes_of_the_table(way, mesh_of):
    strategy, sizes = WAYS[way]
    model = MODEL._replace(block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"])
    shapes = {"blocks": {"up": (4, 64, 256), "down": (4, 256, 64)}, "in": (16, 64), "out": (64, 16)}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: type(x) is tuple,
    )
    batch = {
        "x": jax.ShapeDtypeStruct((32, 16), jnp.float32),
        "y": jax.ShapeDtypeStruct((32, 16), jnp.float32),
    }
    opt = STRATEGIES[strategy](optax.adamw(1e-3), mesh_of(**sizes), model, view="global")
    report = so.hlo.audit(opt.step, opt.abstract_state(params), batch)
    psi = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    sent = {kind: traffic.bytes / psi for kind, traffic in report.by_kind().items()}
    assert sent == pytest.approx(SENT[way], rel=0.02)
    gathers = report.of(kind="all-gather", in_loop=True).collectives
    # one block, forwards and again backwards
    assert all(collective.bytes <= 2 * 64 * 256 * 4 for collective in gathers)
    assert bool(gathers) == (way == "fsdp")


def refused(build):
    with pytest.raises((TypeError, ValueError)) as caught:
        build()
    return str(caught.value)


def test_bad_input_is_refused(mesh_of):
    loss_fn = LOSSES["clip"].loss_fn
    tx = optax.sgd(0.1)
    fix = (
        "Fix: use view='auto' (chosen by a proof), 'per_device' (each device runs the loss on its"
        " rows), 'unproved' (the same without a proof) or 'global' (one loss of the whole batch)."
    )
    assert (
        refused(lambda: so.ddp(tx, mesh_of(data=8), loss_fn, view="whole"))
        == f"ddp: unknown view 'whole'.\n{fix}"
    )
    assert (
        refused(lambda: so.zero(tx, mesh_of(data=8), loss_fn, view=1))
        == f"zero: view must be a string, got 1.\n{fix}"
    )
    assert (
        refused(
            lambda: so.ddp(tx, mesh_of(data=8), loss_fn, reducer=so.reducers.int8(), view="global")
        )
        == "ddp: a reducer takes each device's own gradient, and with view='global' there is only"
        " that of the whole batch.\nFix: leave reducer out, or use view='per_device'."
    )
    assert (
        refused(
            lambda: so.hybrid(
                tx, mesh_of(data=4, pipeline=2), MODEL, micro_batches=2, view="global"
            )
        )
        == "hybrid: a pipeline computes the loss one micro-batch after another, and view='global'"
        " that of the whole batch.\nFix: make the mesh with pipeline=1, or use"
        " view='per_device'."
    )
