"""`opt_state="matrices"`: optimizers of matrices equal one device, each matrix on an owner,
few bytes on the wire.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.problems import BATCH, problem
from support.reference import OPTIMIZERS, relative_difference, same_bits, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.config import _layout as layout
from shardopt.core._types import leaves_with_paths
from shardopt.hlo import audit, inner_product_flops
from shardopt.matrices import _owned_stage as owned_stage
from shardopt.matrices import _owners as owners

LAYERS = 8
WIDTH = 16
INPUTS = 8
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

    def make(shape):
        return np.asarray(draw.normal(size=shape) * 0.2, dtype)

    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


def batches(steps, dtype=jnp.float64):
    draw = np.random.default_rng(1)

    def rows(width):
        return np.asarray(draw.normal(size=(BATCH, width)), dtype)

    return [{"x": rows(INPUTS), "y": rows(8)} for _ in range(steps)]


def blocks_as_matrices(params):
    """Muon's own way to say that the first dim counts matrices; all other leaves go to Adam."""
    return jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers((1,), (2,)) if x.ndim == 3 else None, params
    )


def muon():
    return optax.contrib.muon(
        1e-2, weight_decay=1e-2, muon_weight_dimension_numbers=blocks_as_matrices
    )


def schedule_free():
    """Return an optimizer whose state is a second set of parameters; it reads the first set too."""
    return optax.contrib.schedule_free_adamw(1e-2, eps=1e-4, weight_decay=1e-2)


def schedule_free_muon():
    return optax.contrib.schedule_free(muon(), 1e-2)


RULES_OF_MATRICES = [("up|down", so.optimizers.Matrix())]
OWNED = {
    **OPTIMIZERS,
    "muon": muon,
    "schedule_free": schedule_free,
    "schedule_free_muon": schedule_free_muon,
    "soap": lambda: so.optimizers.soap(
        1e-2, eps=1e-4, ridge=1e-3, weight_decay=1e-2, interval=2, matrices=RULES_OF_MATRICES
    ),
}
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
    return {
        name: np.asarray(draw.normal(size=shape) * 0.2, dtype) for name, shape in shapes.items()
    }


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
FAST = ("fsdp", "muon", {"data": 4, "tensor": 2})


@pytest.mark.parametrize(
    ("name", "optimizer_name", "sizes"),
    tiered(TABLE, quick=lambda row: False, fast=lambda row: row == FAST),
    ids=str,
)
def test_equals_one_device(name, optimizer_name, sizes, mesh_of, x64):
    params = model_params()
    opt = strategy(name, OWNED[optimizer_name](), mesh_of(**sizes), opt_state="matrices")
    _, expected = train(OWNED[optimizer_name](), MODEL.loss_fn, params, batches(3))
    assert relative_difference(after(opt, params, 3).params, expected) < 1e-10


# Blocks that no axis divides, and matrices that are not stacked: units of work, each at an owner.
UNEVEN = [
    (layers, name, one, sizes)
    for layers in (6, None)
    for name, one, sizes in TABLE
    if layers or name != "hybrid"
]
FAST_UNEVEN = (6, "fsdp", "muon", {"data": 8})


@pytest.mark.parametrize(
    ("layers", "name", "optimizer_name", "sizes"),
    tiered(UNEVEN, quick=lambda row: False, fast=lambda row: row == FAST_UNEVEN),
    ids=str,
)
def test_equals_one_device_where_matrices_do_not_divide(
    layers, name, optimizer_name, sizes, mesh_of, x64
):
    params, model = (flat_params(), flat_loss) if layers is None else (model_params(layers), MODEL)
    make = ((OWNED | OPTIMIZERS) if layers is None else OWNED)[optimizer_name]
    opt = strategy(name, make(), mesh_of(**sizes), model, opt_state="matrices")
    _, expected = train(make(), model if layers is None else MODEL.loss_fn, params, batches(3))
    assert relative_difference(after(opt, params, 3).params, expected) < 1e-10


@pytest.mark.slow  # test_equals_one_device_where_matrices_do_not_divide
@pytest.mark.parametrize(
    "optimizer_name", [pytest.param("muon", marks=pytest.mark.slow), "adafactor"]
)
def test_equals_one_device_where_some_owners_return_nothing(optimizer_name, mesh_of, x64):
    """Fewer matrices than devices, and some that no device shards: their results are combined
    instead of sent.
    """
    case = problem("odd", weighted=True, steps=3)
    opt = strategy(
        "fsdp", OPTIMIZERS[optimizer_name](), mesh_of(data=8), case.loss_fn, opt_state="matrices"
    )
    _, expected = train(OPTIMIZERS[optimizer_name](), case.reference, case.params, case.batches)
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, expected) < 1e-10


# Stacks outside of a BlockModel: eight matrices, six matrices, and a leaf of three dims that is a
# single matrix.
STACKS = {
    "up": (8, WIDTH, 32),
    "down": (8, 32, WIDTH),
    "mix": (6, WIDTH, WIDTH),
    "heads": (WIDTH, 4, 4),
}


def dims_of_stacks(params):
    is_stack = {"up": True, "down": True, "mix": True, "heads": False}
    dims = {True: ((1,), (2,)), False: ((0,), (1, 2))}
    return {name: optax.contrib.MuonDimensionNumbers(*dims[is_stack[name]]) for name in params}


def stacks_loss(params, batch):
    x = jnp.concatenate([batch["x"]] * 2, axis=1)
    for up, down in zip(params["up"], params["down"], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    for mix in params["mix"]:
        x = x + jnp.tanh(x @ mix)
    return jnp.mean((x @ params["heads"].reshape(WIDTH, WIDTH))[:, :8] * batch["y"])


@pytest.mark.slow  # test_a_stack_whose_first_dim_is_split_has_one_owner_a_matrix
@pytest.mark.parametrize(
    "sizes", [{"data": 8}, pytest.param({"data": 4, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_stack_outside_of_a_block_model_has_one_owner_a_matrix(sizes, mesh_of, x64):
    draw = np.random.default_rng(0)
    params = {name: draw.normal(size=shape) * 0.2 for name, shape in STACKS.items()}
    tx = optax.contrib.muon(1e-2, weight_decay=1e-2, muon_weight_dimension_numbers=dims_of_stacks)
    rules = {"rules": RULES} if "tensor" in sizes else {}
    opt = so.fsdp(
        tx,
        mesh_of(**sizes),
        stacks_loss,
        min_shard_elements=8,
        opt_state="matrices",
        **rules,
    )
    owners = opt.config.report(params).owners
    is_split = "tensor" in sizes
    assert {row.paths: (len(row.owners), row.state) for row in owners.rows} == {
        ("up",): (8, not is_split),
        ("down",): (8, not is_split),  # the rule splits the dim that counts matrices
        ("mix",): (6, False),
        ("heads",): (1, False),
    }
    if not is_split:  # with tensor the partitioner has all-to-alls of its own
        compiled = opt.step.lower(opt.abstract_state(params), batches(1)[0]).compile()
        assert audit(compiled).by_kind()["all-to-all"].wire_bytes == owners.bytes_sent
    state, _ = opt.step(opt.init(params), batches(1)[0])
    _, expected = train(tx, stacks_loss, params, batches(1))
    assert relative_difference(state.params, expected) < 1e-10


# Stacks whose first dim expert or tensor splits, and blocks of experts. In the last two rows
# devices have whole matrices.
EXPERTS = {"rules": [("up", "experts"), ("experts", "experts")]}
SPLIT_STACKS = [
    ("muon", 8, {"data": 4, "expert": 2}, EXPERTS),
    ("soap", 8, {"data": 4, "tensor": 2}, {"rules": [("up", P("tensor"))]}),
    (
        "muon",
        6,
        {"data": 2, "expert": 2, "tensor": 2},
        {"rules": [*EXPERTS["rules"], ("up|experts", P(None, None, "tensor"))]},
    ),
    ("muon", 8, {"data": 1, "expert": 8}, EXPERTS),
    ("soap", 8, {"data": 1, "tensor": 8}, {"rules": [("up", P("tensor"))]}),
]
SPLIT_SLOPES = {
    name: np.random.default_rng(3).normal(size=(8, *shape))
    for name, shape in (("up", (16, 32)), ("experts", (8, 16)))
}
SPLIT_MODEL = so.BlockModel(
    embed=lambda outer, batch: jnp.mean(batch["x"]) * split_sum(outer["up"], "up"),
    block=lambda w, x: x + split_sum(w["experts"], "experts") if "experts" in w else x,
    loss=lambda outer, x, batch: x,
)


def split_sum(x, name):
    return jnp.sum(jnp.tanh(x) * SPLIT_SLOPES[name][: len(x)])


def last_dims_as_matrices(params):
    return jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers((x.ndim - 2,), (x.ndim - 1,)), params
    )


@pytest.mark.parametrize(
    ("name", "count", "sizes", "options"),
    tiered(SPLIT_STACKS, quick=lambda row: False, fast=lambda row: row is SPLIT_STACKS[0]),
    ids=str,
)
def test_a_stack_whose_first_dim_is_split_has_one_owner_a_matrix(
    name, count, sizes, options, mesh_of, x64
):
    """Devices with the same matrices share them out.

    The loss has no products, so all products of the step are the optimizer's.

    The mutations: the stack has one owner; devices along expert repeat the work of a block; state
    is sharded differently where it is sent from."""
    params = {"up": SPLIT_SLOPES["up"][:count] * 0.2}
    batch = batches(1)[0]

    def loss(params, batch):
        return SPLIT_MODEL.embed(params, batch)

    model = loss
    tx = OWNED[name]()
    if "expert" in sizes:
        params["blocks"] = {"experts": np.random.default_rng(4).normal(size=(8, 8, 8, 16)) * 0.2}
        model = SPLIT_MODEL
        loss = SPLIT_MODEL.loss_fn
        tx = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=last_dims_as_matrices)
    opt = so.fsdp(
        tx,
        mesh_of(**sizes),
        model,
        min_shard_elements=8,
        view="global",
        opt_state="matrices",
        **options,
    )
    owners = opt.config.report(params).owners
    step = opt.step.lower(opt.abstract_state(params), batch).compile()
    assert {row.paths[0]: len(set(row.owners)) for row in owners.rows} == {
        path: count if path == "up" else 8 for path, _ in leaves_with_paths(params)
    }
    shares = [
        update_flops(tx, {key: leaf}) / (count if key == "up" else 8)
        for key, leaf in params.items()
    ]
    assert inner_product_flops(step) == sum(shares) > 0
    by_kind = audit(step).by_kind()
    assert (by_kind["all-to-all"].wire_bytes if "all-to-all" in by_kind else 0) == owners.bytes_sent
    state, _ = opt.step(opt.init(params), batch)
    _, expected = train(tx, loss, params, [batch])
    assert relative_difference(state.params, expected) < 1e-10


def update_flops(tx, params):
    return inner_product_flops(
        jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).compile()
    )


def test_an_optimizer_without_work_on_matrices_sends_nothing_more(mesh_of):
    """Its state stays within the leaf: blocks at owners would cost the gradient there and the
    update back.
    """
    params = model_params(dtype=jnp.float32)
    for tx in (optax.adamw(1e-2), optax.lamb(1e-2)):
        within, matrices = (
            so.fsdp(tx, mesh_of(data=8), MODEL, min_shard_elements=8, opt_state=state_layout)
            for state_layout in ("within", "matrices")
        )
        assert matrices.specs(params) == within.specs(params)
        assert matrices.config.report(params).owners.bytes_sent == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_muon_sends_little_more_than_adam(name, mesh_of):
    params = model_params(dtype=jnp.float32)

    def sent(tx, layout):
        opt = strategy(name, tx, mesh_of(data=8), opt_state=layout)
        state = opt.abstract_state(params)
        specs = jax.tree.leaves(opt.specs(params).opt_state, is_leaf=lambda x: isinstance(x, P))
        assert (P("data", None, None) in specs) is (layout == "matrices")
        return audit(opt.step, state, batches(1, jnp.float32)[0]).total_wire_bytes

    adam = sent(optax.adamw(1e-2), "within")
    assert sent(muon(), "matrices") < 1.15 * adam < 1.4 * adam < sent(muon(), "within")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_name", ["muon", "soap"])
@pytest.mark.parametrize("layers", [8, 16])
def test_each_device_computes_its_share_of_the_update(optimizer_name, layers, mesh_of):
    """The whole job computes as many products of an update with matrices as one device: nothing is
    computed twice.
    """
    params, (batch,) = model_params(layers, jnp.float32), batches(1, jnp.float32)

    def flops(tx, devices):
        opt = so.fsdp(tx, mesh_of(data=devices), MODEL, min_shard_elements=8, opt_state="matrices")
        return inner_product_flops(opt.step.lower(opt.abstract_state(params), batch).compile())

    total_flops, share = (
        flops(OWNED[optimizer_name](), devices) - flops(optax.sgd(1e-2), devices)
        for devices in (1, 8)
    )
    assert share == total_flops / 8 > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "lower_bound", "upper_bound"), [(0, 1.5, 1.82), (6, 2.2, 2.9), (8, 1, 1.09)]
)
def test_soap_sends_the_bytes_of_the_docs_compared_with_adam(
    blocks, lower_bound, upper_bound, mesh_of
):
    """The ratios are the figures of docs/matrices.md, for eight squares and for blocks."""

    def draw(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {f"w{i}": draw(64, 64) for i in range(8)}

    def loss(params, batch):
        return jnp.mean(sum(jnp.tanh(batch @ entry) for entry in params.values()) ** 2)

    if blocks:
        params = {
            "blocks": {"up": draw(blocks, 64, 256), "down": draw(blocks, 256, 64)},
            "scale": draw(),
        }
        loss = so.BlockModel(
            embed=lambda outer, batch: batch * outer["scale"],
            block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
            loss=lambda outer, x, batch: jnp.mean(x**2),
        )
    soap = so.optimizers.soap(1e-2, matrices=[("up|down|w", so.optimizers.Matrix())])
    for name in ("zero1", "fsdp"):
        sent = []
        for tx, entry in ((optax.adam(1e-2), "within"), (soap, "matrices")):
            opt = STRATEGIES[name](tx, mesh_of(data=8), loss, opt_state=entry)
            sent.append(audit(opt.step, opt.abstract_state(params), draw(8, 64)).total_wire_bytes)
        assert lower_bound <= sent[1] / sent[0] <= upper_bound


def test_what_is_not_a_layout_is_refused(mesh_of):
    with pytest.raises(ValueError, match=r"^fsdp: unknown opt_state 'rows'\.\nFix: use 'within'"):
        so.fsdp(muon(), mesh_of(data=8), MODEL, opt_state="rows")
    with pytest.raises(
        TypeError, match=r"^fsdp: opt_state must be a string, got 3\.\nFix: use 'within'"
    ):
        so.fsdp(muon(), mesh_of(data=8), MODEL, opt_state=3)
    with pytest.raises(
        ValueError, match=r"this placement replicates it\.\nFix: use a placement that shards it"
    ):
        so.hybrid(
            muon(),
            mesh_of(data=4, pipeline=2),
            MODEL,
            micro_batches=2,
            placement="ddp",
            opt_state="matrices",
        )


def test_the_report_says_who_owns_what_and_what_it_costs(mesh_of):
    muon_opt = so.fsdp(muon(), mesh_of(data=8), MODEL, min_shard_elements=8, opt_state="matrices")
    report = muon_opt.config.report(model_params(dtype=jnp.float32))
    assert {row.paths: (row.owners, row.state) for row in report.owners.rows} == {
        ("blocks/up",): (tuple(range(8)), True),
        ("blocks/down",): (tuple(range(8)), True),
    }
    assert "matrices of blocks/up are at owners 0-7, with their optimizer state\n" in str(report)
    # gradient there, update back: 7/8 of a shard of an eighth, of both leaves
    assert report.owners.bytes_sent == 2 * 2 * (8 * 16 * 32 * 4) * 7 // 64


@pytest.mark.fast
def test_the_report_names_the_owners_of_a_pipeline(mesh_of):
    """The owner of a block is the first device of its stage that holds the block's state.

    The mutations: the report counts stages as owners, or divides the blocks of all stages between
    the owners of one."""
    mesh = mesh_of(**PIPELINE)
    params = model_params(dtype=jnp.float32)
    opt = so.hybrid(
        muon(),
        mesh,
        MODEL,
        micro_batches=2,
        min_shard_elements=8,
        rules=RULES[:1],
        opt_state="matrices",
    )
    report = opt.config.report(params)
    assert {row.paths: (row.owners, row.state) for row in report.owners.rows} == {
        ("blocks/up",): ((0, 1, 2, 3), True),
        # no rule splits it, so two devices along tensor repeat the work
        ("blocks/down",): ((0, 0, 2, 2), True),
    }
    stage = mesh.devices.take(0, mesh.axis_names.index("pipeline")).ravel()
    leaves = {(leaf.path,): leaf for leaf in report.rows}
    for row in report.owners.rows:
        leaf = leaves[row.paths]
        slices = NamedSharding(mesh, leaf.opt_state).devices_indices_map(leaf.shape)
        blocks = [range(LAYERS)[slices[device][0]] for device in stage]
        assert row.owners == tuple(
            min(i for i in range(4) if block in blocks[i]) for block in range(LAYERS // 2)
        )


@pytest.mark.parametrize(
    ("optimizer_name", "arrays"),
    [
        ("muon", 2),
        # parameters as well: state is made of them
        pytest.param("schedule_free_muon", 3, marks=pytest.mark.slow),
        pytest.param("soap", 2, marks=pytest.mark.slow),
        pytest.param("eight_bit", 2, marks=pytest.mark.slow),
    ],
)
def test_gradients_go_to_owners_and_updates_come_back(optimizer_name, arrays, mesh_of):
    """Parameters stay, although weight decay reads them."""
    tx = (
        so.transforms.eight_bit(muon(), block_size=16, min_elements=64)
        if optimizer_name == "eight_bit"
        else OWNED[optimizer_name]()
    )
    opt = so.fsdp(tx, mesh_of(data=8), MODEL, min_shard_elements=8, opt_state="matrices")
    sent = opt.config.report(model_params(dtype=jnp.float32)).owners.bytes_sent
    assert sent == arrays * 2 * (8 * 16 * 32 * 4) * 7 // 64


def test_blocks_that_do_not_divide_go_to_owners_one_by_one(mesh_of):
    opt = so.fsdp(
        OWNED["soap"](), mesh_of(data=8), MODEL, min_shard_elements=8, opt_state="matrices"
    )
    owners = opt.config.report(model_params(6, jnp.float32)).owners
    assert [len(row.owners) for row in owners.rows] == [6, 6]
    assert sorted(owner for row in owners.rows for owner in row.owners) == sorted(
        [*range(8), *range(4)]
    )
    assert all(row.arrays[0] > 4 for row in owners.rows)  # state goes along
    assert "; their optimizer state is not: " in str(owners.lines())


@pytest.mark.slow  # test_a_stack_whose_first_dim_is_split_has_one_owner_a_matrix
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fsdp", {"data": 8}),
        pytest.param("zero1", {"data": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [6, pytest.param(8, marks=pytest.mark.slow)])
def test_the_bytes_reported_are_those_of_the_all_to_alls(layers, name, sizes, mesh_of):
    opt = strategy(name, muon(), mesh_of(**sizes), opt_state="matrices")
    params = model_params(layers, dtype=jnp.float32)
    traffic_report = audit(opt.step, opt.abstract_state(params), batches(1, jnp.float32)[0])
    assert (
        traffic_report.by_kind()["all-to-all"].wire_bytes
        == opt.config.report(params).owners.bytes_sent
    )
    report = opt.config.report(model_params(6, dtype=jnp.float32))
    # twelve blocks of one size: four devices have two
    assert sorted(owner for row in report.owners.rows for owner in row.owners)[:4] == [0, 0, 1, 1]
    assert report.owners.imbalance == pytest.approx(1 / 3, abs=0.01)
    assert report.owners.padding == report.owners.bytes_sent / 4


@pytest.mark.slow  # rooms/checkpoint, and the report of owners below
def test_checkpoints_go_from_any_layout_to_any_other(mesh_of, tmp_path, x64):
    params = model_params()
    matrices_opt = strategy("fsdp", muon(), mesh_of(data=8), opt_state="matrices")
    within = strategy("zero1", muon(), mesh_of(data=4, tensor=2))
    state = after(matrices_opt, params, 1)
    so.save(tmp_path / "owned", state)
    moved = so.restore(tmp_path / "owned", within)
    same_bits(moved, state)
    so.save(tmp_path / "within", moved)
    back = so.restore(tmp_path / "within", matrices_opt)
    same_bits(back, state)
    (batch,) = batches(1)
    same_bits(matrices_opt.step(back, batch), matrices_opt.step(state, batch))


FORMS = {
    "within, 8": ("fsdp", {"data": 8}, {}),
    "within, 4 x 2": ("zero1", {"data": 4, "tensor": 2}, {}),
    "matrices, 8": ("zero2", {"data": 8}, {"opt_state": "matrices"}),
    "matrices, 2 x 2": ("fsdp", {"data": 2, "tensor": 2}, {"opt_state": "matrices"}),
    "offload, 4": ("fsdp", {"data": 4}, {"opt_state": "host"}),
    "both, 8": ("zero1", {"data": 8}, {"opt_state": ("matrices", "host")}),
    "one device": ("ddp", {"data": 1}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("layers", [6, 8])
def test_checkpoints_of_every_form_are_restored_into_every_other(layers, bits, mesh_of, tmp_path):
    tx = muon() if bits == 32 else so.transforms.eight_bit(muon(), block_size=16, min_elements=64)
    params = model_params(layers, jnp.float32)
    forms = {
        name: strategy(strategy_name, tx, mesh_of(**sizes), **options)
        for name, (strategy_name, sizes, options) in FORMS.items()
    }
    state = forms["within, 8"].init(params)
    for batch in batches(2, jnp.float32):
        state, _ = forms["within, 8"].step(state, batch)
    assert any(x.dtype == jnp.uint8 for x in jax.tree.leaves(state.opt_state)) is (bits == 8)
    so.save(tmp_path / "first", state)
    for name, form in forms.items():
        so.save(tmp_path / name, so.restore(tmp_path / "first", form, abstract_params=params))
        for other in forms.values():
            same_bits(so.restore(tmp_path / name, other, abstract_params=params), state)


# Gradients of few bits, so that sums over any number of devices are exact: what differs is
# Newton-Schulz alone.
SLOPES = {
    name: jnp.asarray(np.random.default_rng(2).normal(size=shape), jnp.bfloat16).astype(jnp.float32)
    for name, shape in {"up": (8, 32, 64), "down": (8, 64, 32), "flat": (64, 32)}.items()
}
LINEAR = so.BlockModel(
    embed=lambda outer, batch: (batch, jnp.sum(outer["flat"] * SLOPES["flat"])),
    block=lambda w, x: (x[0], x[1] + sum(jnp.sum(w[name] * SLOPES[name][0]) for name in w)),
    loss=lambda outer, x, batch: jnp.mean(x[0]) * x[1],
)


def orthogonal():
    """Return a transformation that does Newton-Schulz and nothing else."""
    coefficients = jnp.array([3.4445, -4.7750, 2.0315])

    def one(x):
        dims = optax.contrib.MuonDimensionNumbers((x.ndim - 2,), (x.ndim - 1,))
        return optax.contrib._muon.orthogonalize_via_newton_schulz(
            x, coefficients, dimension_numbers=dims
        )

    return optax.stateless(lambda grads, params: jax.tree.map(one, grads))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_newton_schulz_has_the_same_bits_on_any_number_of_devices(name, mesh_of):
    params = {"blocks": {"up": SLOPES["up"], "down": SLOPES["down"]}, "flat": SLOPES["flat"]}
    updated_params = []
    for count in (1, 2, 4, 8):
        opt = STRATEGIES[name](orthogonal(), mesh_of(data=count), LINEAR, opt_state="matrices")
        updated_params.append(
            jax.device_get(opt.step(opt.init(params), jnp.ones((8, 1)))[0].params)
        )
    for other in updated_params[1:]:
        same_bits(other, updated_params[0])


def update_the_wrong_block(patch):
    right = owned_stage._take_block

    def wrong(x, moved, block):
        return right(x, moved, block if moved.dim is None else (block + 1) % 6)

    patch.setattr(owned_stage, "_take_block", wrong)


def bring_back_the_wrong_pieces(patch):
    right = owned_stage._split
    patch.setattr(owned_stage, "_split", lambda *args: right(*args)[::-1])


def exchange_blocks_out_of_order(patch):
    right = owners._exchange

    def wrong(x, plan, *, to_owners):
        return (
            right(x, plan, to_owners=to_owners)
            if to_owners
            else jnp.roll(right(x, plan, to_owners=to_owners), 1, 0)
        )

    patch.setattr(owners, "_exchange", wrong)


def shard_within(patch):
    patch.setattr(layout, "owned_by_blocks", lambda plan, *args, **options: plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "layers"),
    [
        (update_the_wrong_block, 6),
        (bring_back_the_wrong_pieces, 6),
        (exchange_blocks_out_of_order, 8),
    ],
)
def test_a_broken_owner_is_noticed(mutate, layers, mesh_of, x64, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test_equals_one_device_where_matrices_do_not_divide(
            layers, "fsdp", "muon", {"data": 8}, mesh_of, None
        )


@pytest.mark.slow
def test_state_within_matrices_is_noticed(mesh_of, monkeypatch):
    shard_within(monkeypatch)
    with pytest.raises(AssertionError):
        test_muon_sends_little_more_than_adam("fsdp", mesh_of)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [8, 6])
def test_replicas_that_train_apart_update_at_owners_too(layers, mesh_of, x64):
    params = model_params(layers)
    states = []
    for state_layout in ("matrices", "within"):
        inner = strategy("fsdp", muon(), mesh_of(replica=2, data=4), opt_state=state_layout)
        opt = so.local_sgd(inner, sync_every=2)
        states.append(jax.device_get(after(opt, params, 3).params))
    assert relative_difference(*states) < 1e-10
