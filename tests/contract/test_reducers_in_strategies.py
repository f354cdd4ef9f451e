"""Contract rows of ddp and hybrid with a reducer: exact where it is exact, placed and sent as
stated, refused where it cannot be.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.groups import stated_bytes
from support.pipelines import block_problem
from support.reference import relative_difference, train
from support.tiers import tiered

import shardopt as so

R = so.reducers
EF = R.error_feedback
EXACT = [R.exact(), EF(R.top_k(1.0)), EF(R.power_sgd(64, min_ratio=0))]
LOSSY = [
    R.int8(16),
    EF(R.int8(16)),
    EF(R.top_k(0.1)),
    EF(R.power_sgd(1, min_ratio=0)),
    EF(R.sign(8)),
]
ROWS = {
    "ddp": (so.ddp, {"data": 4}),
    "ddp, replica": (so.ddp, {"replica": 2, "data": 2}),
    "ddp, tensor": (so.ddp, {"data": 2, "tensor": 2}),
    "hybrid": (
        functools.partial(so.hybrid, micro_batches=2, placement="ddp"),
        {"data": 2, "pipeline": 2},
    ),
    "hybrid zero1, tensor": (
        functools.partial(so.hybrid, micro_batches=2, placement="zero1"),
        {"data": 2, "pipeline": 2, "tensor": 2},
    ),
}


def name_of(parameter):
    return parameter.name if isinstance(parameter, R.Reducer) else parameter


def build(row, reducer, mesh_of, *, tx=None, weighted=True, steps=3):
    make, sizes = ROWS[row]
    case = block_problem("pytree", weighted=weighted, num_blocks=4, rows=16, steps=steps)
    rules = case.rules if "tensor" in sizes else ()
    return case, make(
        tx or optax.sgd(0.05, momentum=0.9),
        mesh_of(**sizes),
        case.loss_fn,
        rules=rules,
        reducer=reducer,
    )


def run(opt, case):
    state = opt.init(case.params)
    for batch in case.batches:
        state, metrics = opt.step(state, batch)
    return state, metrics


def each(reducers, quick):
    """Every reducer in every row: those (row, reducer) that are not among the quick ones are slow."""
    table = [(row, reducer) for row in ROWS for reducer in reducers]
    return tiered(table, lambda pair: reducers.index(pair[1]) == quick.get(pair[0]))


@pytest.mark.parametrize(("row", "reducer"), each(EXACT, {"ddp": 1}), ids=name_of)
def test_an_exact_reducer_is_one_device(row, reducer, mesh_of, x64):
    case, opt = build(row, reducer, mesh_of)
    state, metrics = run(opt, case)
    history, params = train(
        optax.sgd(0.05, momentum=0.9), case.reference, case.params, case.batches
    )
    assert relative_difference(state.params, params) < 1e-12
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], history[-1], rtol=1e-12)


def apart(tree):
    """Return the largest difference between copies of one piece of a leaf that devices hold."""
    largest = 0.0
    for leaf in jax.tree.leaves(tree):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data, np.float64))
        largest = max(
            [
                largest,
                *(np.max(np.abs(x - held[0]), initial=0) for held in copies.values() for x in held),
            ]
        )
    return largest


def of_one_problem(make):
    """Return a case with a large leaf, split over another axis, and small leaves that stay whole
    there.
    """

    def block(w, x):
        return x + jnp.tanh(x @ w["kernel"]) * w["scale"][None]

    model = so.BlockModel(
        lambda outer, batch: batch["x"] @ outer["in"],
        block,
        lambda outer, x, batch: jnp.mean((x * outer["out"][None]) ** 2),
    )
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape) / 3, jnp.float32)

    blocks = {"kernel": normal(2, 10, 10), "scale": normal(2, 10)}
    params = {"blocks": blocks, "in": normal(3, 10), "out": normal(10)}
    opt = make(optax.adam(0.05), model)
    state = opt.init(params)
    for _ in range(4):
        state, _ = opt.step(state, {"x": normal(8, 3)})
    return state


RULES = [("kernel", P(None, "tensor"))]
SPLIT = {
    "ddp": ({"data": 2, "tensor": 2}, lambda *args, **how: so.ddp(*args, rules=RULES, **how)),
    "hybrid": (
        {"data": 2, "tensor": 2, "pipeline": 2},
        lambda *args, **how: so.hybrid(*args, rules=RULES, micro_batches=2, placement="ddp", **how),
    ),
    "diloco": (
        {"replica": 2, "data": 2, "tensor": 2},
        lambda *args, reducer: so.diloco(
            so.fsdp(*args, rules=RULES, min_shard_elements=50), sync_every=2, reducer=reducer
        ),
    ),
}


@pytest.mark.parametrize(
    ("way", "reducer"),
    tiered(
        [(way, reducer) for way in SPLIT for reducer in (EF(R.int8(64)), EF(R.sign(64)))],
        lambda pair: pair[0] == "ddp" and "int8" in pair[1].name,
    ),
    ids=name_of,
)
def test_copies_stay_copies(way, reducer, mesh_of):
    """No block of a bucket spans a leaf that is split over another axis and one that is whole over
    it.
    """
    sizes, make = SPLIT[way]
    state = of_one_problem(lambda tx, model: make(tx, mesh_of(**sizes), model, reducer=reducer))
    assert apart(state) == 0


@pytest.mark.parametrize(
    "reducer",
    tiered(
        [R.top_k(0.3), R.warm_up(R.sign(8), 1)],
        lambda candidate: "top_k" in candidate.name,
        ids=name_of,
    ),
)
def test_a_step_that_is_skipped_uses_up_no_memory_anywhere(reducer, mesh_of):
    """The inf is in a column that one shard over tensor holds alone."""

    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) * batch["by"]) + jnp.sum(params["b"])

    tx = optax.apply_if_finite(optax.sgd(0.1), 5)
    opt = so.ddp(
        tx, mesh_of(data=2, tensor=2), loss, reducer=EF(reducer), rules=[("w", P(None, "tensor"))]
    )
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    by = np.ones((4, 4), np.float32)
    state = opt.init({"w": jnp.ones((3, 4)), "b": jnp.ones(5)})
    for _ in range(2):
        state, _ = opt.step(state, {"x": x, "by": by})
    before = jax.device_get(state.opt_state.reducer)
    bad = by.copy()
    bad[:, 0] = np.inf
    state, _ = opt.step(state, {"x": x, "by": bad})
    assert int(state.opt_state.optimizer.total_notfinite) == 1
    for was, now in zip(
        jax.tree.leaves(before), jax.tree.leaves(state.opt_state.reducer), strict=True
    ):
        np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize(
    "sizes",
    tiered([{"data": 4}, {"data": 2, "tensor": 2}], lambda sizes: "tensor" in sizes, ids=str),
)
def test_int8_of_an_exactly_representable_grid_is_exact(sizes, mesh_of):
    """Each device's gradient, and their mean, is a whole multiple of the scale of a block."""
    x = np.repeat(
        np.tile(np.array([[127, 254, -127, 0], [381, 254, 127, 0]], np.float32), (2, 1)), 2, axis=0
    )
    rules = [("w", P(None, "tensor"))] if "tensor" in sizes else ()

    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"]).sum(-1))

    opt = so.ddp(optax.sgd(1.0), mesh_of(**sizes), loss, reducer=EF(R.int8(1)), rules=rules)
    state, _ = opt.step(opt.init({"w": jnp.zeros((4, 2))}), {"x": x})
    assert state.params["w"].tolist() == [[-float(value)] * 2 for value in x.mean(0)]
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.opt_state.reducer))


@pytest.mark.parametrize(
    ("row", "reducer"),
    tiered(zip(ROWS, LOSSY, strict=True), lambda promise: False),
    ids=name_of,
)
def test_specs_are_the_shardings_and_the_second_step_compiles_nothing(row, reducer, mesh_of):
    case, opt = build(row, reducer, mesh_of, tx=optax.adam(1e-2))
    specs = jax.tree.leaves(
        opt.specs(jax.eval_shape(lambda: case.params)), is_leaf=lambda x: isinstance(x, P)
    )
    state = opt.init(case.params)
    promised = jax.tree.leaves(opt.abstract_state())

    def check(state):
        for leaf, spec, promise in zip(jax.tree.leaves(state), specs, promised, strict=True):
            assert leaf.sharding == NamedSharding(opt.mesh, spec) == promise.sharding
            assert (leaf.shape, leaf.dtype) == (promise.shape, promise.dtype)

    check(state)
    donated_leaves = jax.tree.leaves(state.opt_state.reducer)
    state, _ = opt.step(state, case.batches[0])
    check(state)
    assert all(leaf.is_deleted() for leaf in donated_leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax._src.compiler,
            "compile_or_get_cached",
            lambda *_, **__: pytest.fail("compiled again"),
        )
        state, metrics = opt.step(state, case.batches[1])
    check(state)
    assert np.isfinite(metrics["loss"])
    for leaf in jax.tree.leaves(state.opt_state.reducer):  # a row a device, and no more on any
        rows = sum(entry is not None for entry in leaf.sharding.spec)
        assert set(leaf.addressable_shards[0].data.shape[:rows]) <= {1}


@pytest.mark.parametrize(
    ("row", "reducer"),
    each([R.int8(16), EF(R.sign(8))], {"hybrid": 1}),
    ids=name_of,
)
def test_the_compiled_step_sends_what_the_reducer_states(row, reducer, mesh_of):
    """The reducer states bytes of local shapes: halves over tensor, the blocks of a stage.

    Apart from these bytes, only loss and weight cross the data axes.
    """
    case, opt = build(row, reducer, mesh_of)
    state = opt.abstract_state(jax.eval_shape(lambda: case.params))
    batch = jax.eval_shape(lambda: case.batches[0])
    axes = tuple(axis for axis in ("replica", "data") if axis in opt.mesh.shape)
    trained = [
        leaf for leaf in jax.tree.leaves(state.params) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    stated = stated_bytes(reducer, trained, axes)
    report = so.hlo.audit(opt.step, state, batch)
    sent = [
        collective
        for collective in report.of(axis="data").collectives
        if collective.axes == axes and not is_scalar(collective)
    ]
    # ZeRO 1 gathers the parameters that its devices have updated.
    gathered = gathered_bytes(opt, state) if "zero1" in row else 0
    assert sum(collective.wire_bytes * collective.calls for collective in sent) == stated + gathered
    assert not [collective for collective in sent if collective.in_loop]


def gathered_bytes(opt, state):
    """Return the bytes that ZeRO 1 gathers over data after the update. In a ring they are (N - 1) /
    N of the bytes of split leaves on a device.
    """
    count = opt.mesh.shape["data"]
    rows = {row.path: row for row in opt.config.report().rows}
    total = 0
    for row in rows.values():
        if "data" in tuple(row.opt_state):
            held_bytes = row.bytes_total
            for axis in ("tensor", "pipeline"):
                held_bytes //= opt.mesh.shape[axis] if axis in tuple(row.opt_state) else 1
            total += held_bytes * (count - 1) // count
    return total


def is_scalar(collective):
    return collective.bytes <= 16 and collective.kind == "all-reduce"


@pytest.mark.parametrize("placement", ["zero2", "fsdp"])
def test_placements_that_split_gradients_refuse_one(placement, mesh_of):
    case = block_problem("pytree", weighted=False, num_blocks=4, rows=16, steps=1)
    with pytest.raises(ValueError, match="hybrid") as caught:
        so.hybrid(
            optax.sgd(0.1),
            mesh_of(data=2, pipeline=2),
            case.loss_fn,
            micro_batches=2,
            placement=placement,
            reducer=R.int8(),
        )
    assert (
        str(caught.value)
        == "hybrid: int8(block_size=256) takes the mean of unsharded gradients, and this placement"
        " shards them.\n"
        "Fix: use so.reducers.exact(jnp.bfloat16), ddp or zero1 (so.zero(stage=1)), or leave reducer"
        " out."
    )


def test_an_argument_that_is_no_reducer_is_refused(mesh_of):
    with pytest.raises(TypeError) as caught:
        so.ddp(optax.sgd(0.1), mesh_of(data=2), lambda params, batch: 0.0, reducer=R.int8)
    assert (
        str(caught.value)
        == "ddp: reducer must be a Reducer, got int8.\nFix: pass one such as so.reducers.int8(),"
        " called."
    )


@pytest.mark.slow  # reducers/test_laws.py
def test_error_feedback_learns_where_plain_compression_stalls(mesh_of):
    """One entry in ten of the gradient of a quadratic is sent. Each other entry is sent later, so
    training still finds the optimum.
    """
    draw = np.random.default_rng(2)
    # each device's own; the mean is what all want
    goal = draw.normal(size=(4, 20)).astype(np.float32)

    def loss(params, batch):
        return jnp.mean(((params["w"][None] - batch["goal"]) ** 2).sum(-1))

    def distance(reducer, steps=150):
        opt = so.ddp(optax.sgd(0.05), mesh_of(data=4), loss, reducer=reducer)
        state = opt.init({"w": jnp.zeros(20)})
        for _ in range(steps):
            state, _ = opt.step(state, {"goal": goal})
        return float(np.abs(np.asarray(state.params["w"]) - goal.mean(0)).max())

    assert distance(EF(R.top_k(0.1))) < 0.25
    assert distance(R.top_k(0.1)) > 0.5
