"""`opt_state_layout="matrices"`: optimizers of matrices equal one device, each matrix on an owner, few bytes on the wire."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.problems import BATCH
from support.reference import OPTIMIZERS, relative_difference, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.audit import audit

LAYERS, WIDTH, INPUTS = 8, 16, 8
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"][None, :],
    loss=lambda outer, x, batch: jnp.mean((x @ outer["out"] - batch["y"]) ** 2),
)


def model_params(layers=LAYERS, dtype=jnp.float64):
    draw = np.random.default_rng(0)
    shapes = {
        "blocks": {"up": (layers, WIDTH, 32), "down": (layers, 32, WIDTH), "bias": (layers, WIDTH)},
        "in": (INPUTS, WIDTH),
        "out": (WIDTH, 8),
    }
    make = lambda shape: jnp.asarray(draw.normal(size=shape) * 0.2, dtype)  # noqa: E731
    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


def batches(steps, dtype=jnp.float64):
    draw = np.random.default_rng(1)
    rows = lambda width: jnp.asarray(draw.normal(size=(BATCH, width)), dtype)  # noqa: E731
    return [{"x": rows(INPUTS), "y": rows(8)} for _ in range(steps)]


def blocks_as_matrices(params):
    """Muon's own way to say that the first dim counts matrices; all other leaves go to Adam."""
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers((1,), (2,)) if x.ndim == 3 else None, params)


def muon():
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=blocks_as_matrices)


OWNED = {**OPTIMIZERS, "muon": muon}
PIPELINE = {"data": 2, "tensor": 2, "pipeline": 2}


def strategy(name, tx, mesh, model=MODEL, **options):
    if mesh.shape["tensor"] > 1:
        options["rules"] = RULES
    if name == "hybrid":
        return so.hybrid(tx, mesh, model, micro_batches=2, min_shard_elements=8, **options)
    return STRATEGIES[name](tx, mesh, model, **options)


def after(opt, params, steps):
    state = opt.init(params)
    for batch in batches(steps):
        state, _ = opt.step(state, batch)
    return state


# Two sizes of matrices, nine in all: no number of devices divides them.
def flat_params(dtype=jnp.float64):
    draw = np.random.default_rng(0)
    shapes = {"in": (INPUTS, WIDTH), "out": (WIDTH, 8), "scale": (WIDTH,)}
    for i in range(4):
        shapes |= {f"up{i}": (WIDTH, 32), f"down{i}": (32, WIDTH)}
    return {name: jnp.asarray(draw.normal(size=shape) * 0.2, dtype) for name, shape in shapes.items()}


def flat_loss(params, batch):
    x = batch["x"] @ params["in"]
    for i in range(4):
        x = x + jnp.tanh(x @ params[f"up{i}"]) @ params[f"down{i}"]
    return jnp.mean(((x * params["scale"][None]) @ params["out"] - batch["y"]) ** 2)


TABLE = [
    (name, one, sizes)
    for name in ("zero1", "zero2", "fsdp")
    for one in OWNED
    for sizes in ({"data": 8}, {"data": 4, "tensor": 2})
]
TABLE += [("hybrid", one, PIPELINE) for one in OWNED]
QUICK = [("zero2", "muon", {"data": 8}), ("fsdp", "muon", {"data": 4, "tensor": 2}), ("hybrid", "lamb", PIPELINE)]


@pytest.mark.parametrize(("name", "one", "sizes"), tiered(TABLE, quick=lambda row: row in QUICK), ids=str)
def test_equals_one_device(name, one, sizes, mesh_of, x64):
    params = model_params()
    opt = strategy(name, OWNED[one](), mesh_of(**sizes), opt_state_layout="matrices")
    _, expected = train(OWNED[one](), MODEL.loss_fn, params, batches(3))
    assert relative_difference(after(opt, params, 3).params, expected) < 1e-10


# Blocks that no axis divides, and matrices that are not stacked: units of work, each at an owner.
UNEVEN = [
    (layers, name, one, sizes) for layers in (6, None) for name, one, sizes in TABLE if layers or name != "hybrid"
]
QUICK_UNEVEN = [
    (6, "fsdp", "muon", {"data": 8}),
    (6, "hybrid", "muon", PIPELINE),
    (None, "zero1", "muon", {"data": 4, "tensor": 2}),
]


@pytest.mark.parametrize(
    ("layers", "name", "one", "sizes"), tiered(UNEVEN, quick=lambda row: row in QUICK_UNEVEN), ids=str
)
def test_equals_one_device_where_matrices_do_not_divide(layers, name, one, sizes, mesh_of, x64):
    params, model = (flat_params(), flat_loss) if layers is None else (model_params(layers), MODEL)
    make = OPTIMIZERS[one] if layers is None else OWNED[one]
    opt = strategy(name, make(), mesh_of(**sizes), model, opt_state_layout="matrices")
    _, expected = train(make(), model if layers is None else MODEL.loss_fn, params, batches(3))
    assert relative_difference(after(opt, params, 3).params, expected) < 1e-10


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_muon_sends_little_more_than_adam(name, mesh_of):
    params = model_params(dtype=jnp.float32)

    def sent(tx, layout):
        opt = strategy(name, tx, mesh_of(data=8), opt_state_layout=layout)
        state = opt.abstract_state(params)
        specs = jax.tree.leaves(opt.specs(params).opt_state, is_leaf=lambda x: isinstance(x, P))
        assert (P("data", None, None) in specs) is (layout == "matrices")
        return audit(opt.step, state, batches(1, jnp.float32)[0]).total_wire_bytes

    adam = sent(optax.adamw(1e-2), "within")
    assert sent(muon(), "matrices") < 1.15 * adam < 1.4 * adam < sent(muon(), "within")


def test_what_is_not_a_layout_is_refused(mesh_of):
    with pytest.raises(ValueError, match=r"^fsdp: unknown opt_state_layout 'rows'\.\nFix: use 'within'"):
        so.fsdp(muon(), mesh_of(data=8), MODEL, opt_state_layout="rows")
    with pytest.raises(TypeError, match=r"^fsdp: opt_state_layout must be a string, got 3\.\nFix: use 'within'"):
        so.fsdp(muon(), mesh_of(data=8), MODEL, opt_state_layout=3)
    with pytest.raises(ValueError, match=r"this placement replicates it\.\nFix: use a placement that shards it"):
        so.hybrid(
            muon(), mesh_of(data=4, pipeline=2), MODEL, micro_batches=2, placement="ddp", opt_state_layout="matrices"
        )
