"""Tables that are sharded by columns: steps, messages, the choice between two ways, refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.reference import relative_difference, train
from support.tiers import tiered
from support.traffic import Expected, check_traffic

import shardopt as so
from shardopt.hlo import audit
from shardopt.nn import _embedding
from shardopt.nn._embedding import exchange_bytes

VOCAB = 256
DIM = 16
ROWS = 16
LENGTH = 3
TX = optax.sgd(0.1, momentum=0.9)


def embed(outer, batch):
    return so.nn.embedding(outer["table"], batch["ids"]) + outer["shift"][None, None, :]


MODEL = so.BlockModel(
    embed=embed,
    block=lambda w, x: x + jnp.tanh(x @ w["w"]),
    loss=lambda outer, x, batch: jnp.mean((x - batch["y"]) ** 2),
    tables=("table",),
)
RULES = [("^table$", P("tensor", None)), ("w", P(None, "tensor"))]


def params_of(dtype=np.float64):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return 0.5 * rng.normal(size=shape).astype(dtype)

    return {"blocks": {"w": draw(2, DIM, DIM)}, "table": draw(VOCAB, DIM), "shift": draw(DIM)}


def batches_of(steps=4, rows=ROWS, dtype=np.float64):
    rng = np.random.default_rng(1)
    scale = np.linspace(0.2, 2.0, rows)[:, None, None]
    # few ids, so that devices add to the same rows of the table
    return [
        {
            "ids": rng.integers(0, 9, (rows, LENGTH)),
            "y": (scale * rng.normal(size=(rows, LENGTH, DIM))).astype(dtype),
        }
        for _ in range(steps)
    ]


def fsdp(mesh, model=MODEL, **options):
    return so.fsdp(TX, mesh, model, min_shard_elements=8, **options)


def sent(opt, batch):
    return audit(opt.step, opt.abstract_state(params_of(np.float32)), batch).of(axis="data")


EXACT = [
    ({"data": 4}, {}),
    ({"data": 4}, {"micro_batches": 2}),
    ({"replica": 2, "data": 2}, {"micro_batches": 2}),
    ({"data": 2, "tensor": 2}, {"rules": RULES}),
    ({"data": 4}, {"rules": [("table", "frozen")]}),
]


@pytest.mark.parametrize(("sizes", "options"), tiered(EXACT, lambda row: row in EXACT[2:4]))
def test_steps_are_those_of_one_device(sizes, options, mesh_of, x64):
    params = params_of()
    batches = batches_of()
    opt = fsdp(mesh_of(**sizes), **options)
    state = opt.init(params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    free = {"shift": params["shift"], "blocks": params["blocks"]}
    if options.get("rules") == [("table", "frozen")]:

        def loss(free, batch):
            return MODEL.loss_fn({**free, "table": params["table"]}, batch)

        _, final = train(TX, loss, free, batches)
        final = {**final, "table": params["table"]}
    else:
        _, final = train(TX, MODEL.loss_fn, params, batches)
    assert relative_difference(state.params, final) <= 1e-10
    assert state.params["table"].sharding.spec == P(
        "tensor" if options.get("rules") == RULES else None, "data"
    )


@pytest.mark.parametrize(
    "options",
    tiered(
        [{}, {"gather_dtype": jnp.bfloat16}],
        bool,
        ids=lambda options: "bfloat16" if options else "float32",
    ),
)
def test_rows_travel_where_they_are_fewer_bytes(options, mesh_of):
    n = 4
    itemsize = 2 if options else 4
    rows = jnp.bfloat16 if options else jnp.float32
    opt = fsdp(mesh_of(data=n), **options)
    few = ROWS
    many = 512
    audits = {}
    for count in (few, many):
        batch = batches_of(1, count)[0]
        audits[count] = sent(
            opt, {"ids": batch["ids"].astype(np.int32), "y": batch["y"].astype(rows)}
        )
    ids = few // n * LENGTH
    gathered, exchanged = exchange_bytes(ids, DIM, devices=n, itemsize=itemsize)
    blocks = 2 * DIM * DIM
    exchange = [
        Expected("all-to-all", "data", int(exchanged), 2),
        Expected("all-gather", "data", int(gathered) + (2 * blocks + DIM) * itemsize),
        Expected("reduce-scatter", "data", (blocks + DIM) * 4),
    ]
    check_traffic(audits[few], exchange, min_bytes=16)
    gather = [
        Expected("all-gather", "data", (VOCAB * DIM + 2 * blocks + DIM) * itemsize),
        Expected("reduce-scatter", "data", (VOCAB * DIM + blocks + DIM) * 4),
    ]
    check_traffic(audits[many], gather, min_bytes=16)
    assert (
        exchanged
        < VOCAB * DIM * (itemsize + 4)
        < exchange_bytes(many // n * LENGTH, DIM, devices=n, itemsize=4)[1]
    )


@pytest.mark.parametrize("itemsize", [2, 4])
def test_gradients_of_a_row_add_up_in_float32(itemsize, mesh_of):
    """All ids are one: in bfloat16 a sum of 512 equal numbers would stop at 256 of them."""
    dtype = jnp.bfloat16 if itemsize == 2 else jnp.float32
    model = MODEL._replace(
        embed=lambda outer, batch: so.nn.embedding(outer["table"], batch["ids"]),
        block=lambda w, x: x,
        loss=lambda outer, x, batch: jnp.mean(x.astype(jnp.float32)),
    )
    opt = so.fsdp(optax.sgd(1.0), mesh_of(data=2), model, gather_dtype=dtype, min_shard_elements=8)
    params = params_of(np.float32) | {"table": np.zeros((4096, DIM), np.float32)}
    state, _ = opt.step(opt.init(params), {"ids": np.full((512, 1), 3, np.int32)})
    expected = np.zeros((4096, DIM))
    expected[3] = -1 / DIM
    np.testing.assert_array_equal(state.params["table"], expected)


def test_ids_outside_of_the_table_give_nan(mesh_of):
    model = MODEL._replace(embed=lambda o, b: so.nn.embedding(o["table"], b["ids"]))
    batch = batches_of(1, dtype=np.float32)[0]
    batch["ids"][-1, -1] = VOCAB
    opt = fsdp(mesh_of(data=2), model)
    assert np.isnan(opt.evaluate(opt.init(params_of(np.float32)), batch)["loss"])
    assert np.isnan(jax.jit(model.loss_fn)(params_of(np.float32), batch))


def test_a_model_that_is_evaluated_may_take_the_table_whole(mesh_of):
    plain = MODEL._replace(
        embed=lambda o, b: o["table"][b["ids"]] + o["shift"][None, None, :], tables=()
    )
    params = params_of(np.float32)
    batch = batches_of(1, dtype=np.float32)[0]
    opt = fsdp(mesh_of(data=2), evaluate_fn=plain)
    np.testing.assert_allclose(
        opt.evaluate(opt.init(params), batch)["loss"], plain.loss_fn(params, batch), rtol=1e-5
    )


def refused(kind, message):
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    "take",
    [lambda table, ids: jnp.take(table, ids, axis=0), lambda table, ids: table[ids]],
    ids=["take", "index"],
)
def test_other_uses_of_a_table_are_refused(take, mesh_of):
    model = MODEL._replace(embed=lambda o, b: take(o["table"], b["ids"]))
    opt = fsdp(mesh_of(data=2), model, view="unproved")
    message = (
        "embedding: a table that BlockModel.tables names was used as an array, and it is sharded by"
        " columns.\nFix: read it by so.nn.embedding alone, in embed; or take its name out of"
        " BlockModel.tables."
    )
    with pytest.raises(TypeError, match=re.escape(message)):  # jax adds a line of its own
        opt.step(opt.init(params_of(np.float32)), batches_of(1, dtype=np.float32)[0])


def test_names_of_no_table_are_refused(mesh_of):
    message = (
        "fsdp: BlockModel.tables must name outer parameters [V, D].\n  'tabel'\n  'shift'\nFix:"
        " name some of table."
    )
    with refused(ValueError, message):
        fsdp(mesh_of(data=2), MODEL._replace(tables=("tabel", "shift"))).specs(params_of())
    with refused(TypeError, "embedding: ids must be integers, got float32."):
        so.nn.embedding(jnp.eye(3), jnp.ones(3))


@pytest.fixture(params=[False, True], ids=["scatter", "tiles"])
def with_atomics(request, monkeypatch):
    """Devices that add rows one by one, or GPUs, for which rows of one id are added in tiles first."""
    monkeypatch.setattr(_embedding, "_adds_by_atomics", lambda: request.param)


def rows_and_gradient(table, ids, cotangent=None):
    """Return the rows, and the gradient of a table for a cotangent, by default of ones."""

    @jax.jit
    def both(table, ids, cotangent):
        rows, pull_back = jax.vjp(lambda table: so.nn.embedding(table, ids), table)
        cotangent = jnp.ones_like(rows) if cotangent is None else cotangent
        return rows, pull_back(cotangent)[0]

    return jax.device_get(both(table, ids, cotangent))


def test_gradients_of_a_frequent_row_are_added_in_float32(with_atomics):
    table = np.zeros((4, 8), jnp.bfloat16)
    _, grad = rows_and_gradient(table, np.array([2] * 4096 + [0] * 3))
    assert grad.dtype == jnp.bfloat16
    # bfloat16 has no 257
    np.testing.assert_array_equal(grad.astype(np.float32)[:, 0], [3, 0, 4096, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(), (7, 41)])
def test_gradients_are_those_of_indexing(with_atomics, dtype, shape):
    rng = np.random.default_rng(0)
    ids = np.asarray(rng.integers(-120, 170, shape))  # below, in and above a table of 50 rows
    cotangent = np.asarray(rng.normal(size=(*shape, 16))).astype(dtype)
    in_table = (ids >= 0) & (ids < 50)
    expected = np.zeros((50, 16), np.float32)
    np.add.at(expected, ids[in_table], cotangent[in_table].astype(np.float32))
    _, table_gradient = rows_and_gradient(np.zeros((50, 16), dtype), ids, cotangent)
    assert np.abs(expected).max() > 0 or shape == ()
    np.testing.assert_allclose(table_gradient, expected.astype(dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(300,), (300, 4), (300, 2, 3)], ids=str)
@pytest.mark.parametrize("ids", [[], [3, 255, 3]], ids=["none", "some"])
def test_tables_of_any_width_take_ids_of_one_byte(with_atomics, shape, ids):
    _, grad = rows_and_gradient(np.ones(shape, jnp.bfloat16), np.array(ids, np.uint8))
    counts = np.bincount(np.array(ids, int), minlength=300)
    np.testing.assert_array_equal(
        grad.astype(float), np.broadcast_to(counts.reshape(-1, *[1] * (len(shape) - 1)), shape)
    )


@pytest.mark.parametrize(
    "ids",
    [
        np.array([2**31, 2**32 - 1, 7], np.uint32),
        np.array([-5, 3], np.int8),
        np.array([-400, -300], np.int16),
    ],
    ids=str,
)
def test_gradients_go_to_the_rows_that_were_read(with_atomics, ids):
    table = np.stack(np.divmod(np.arange(300), 16), axis=1).astype(jnp.bfloat16)
    rows, grad = rows_and_gradient(table, ids)
    rows = rows.astype(float)
    high, low = rows[~np.isnan(rows).any(axis=1)].T.astype(int)
    np.testing.assert_array_equal(
        grad[:, 0].astype(float), np.bincount(16 * high + low, minlength=300)
    )


def test_gradients_of_rows_that_were_not_read_are_dropped_if_they_are_nan(with_atomics):
    table = np.ones((5, 2), jnp.bfloat16)
    ids = np.array([0, 1, -100])

    @jax.jit
    def loss(table):
        return jnp.sum(jnp.where((ids >= 0)[:, None], so.nn.embedding(table, ids) ** 2, 0))

    gradient = np.asarray(jax.grad(loss)(table))
    np.testing.assert_array_equal(gradient[:, 0].astype(float), [2, 2, 0, 0, 0])


def test_tangents_are_rows_of_the_tangent(with_atomics):
    table = np.ones((3, 2), jnp.bfloat16)
    ids = np.array([2, 0, 2, -4])
    tangent = np.arange(6).astype(jnp.bfloat16).reshape(3, 2)
    read = jax.jit(lambda table: so.nn.embedding(table, ids))
    row_tangents = np.asarray(jax.jvp(read, (table,), (tangent,))[1])
    np.testing.assert_array_equal(row_tangents.astype(float), [[4, 5], [0, 1], [4, 5], [0, 0]])


def test_gradients_are_summed_over_devices_where_jax_tracks_what_varies(with_atomics, mesh_of):
    ids = np.array([0, 1, 1, 2, 0, 1, 2, 0])
    gradient = jax.grad(lambda table, ids: jnp.sum(so.nn.embedding(table, ids).astype(jnp.float32)))
    mapped = jax.shard_map(gradient, mesh=mesh_of(data=4), in_specs=(P(), P("data")), out_specs=P())
    summed = np.asarray(jax.jit(mapped)(np.ones((4, 2), jnp.bfloat16), ids))
    np.testing.assert_array_equal(summed[:, 0].astype(float), [3, 3, 2, 0])


def test_steps_in_tiles_are_those_of_one_device(mesh_of, x64, monkeypatch):
    params = params_of()
    batches = batches_of()
    _, expected = train(TX, MODEL.loss_fn, params, batches)
    monkeypatch.setattr(_embedding, "_adds_by_atomics", lambda: True)
    opt = so.fsdp(TX, mesh_of(data=2, tensor=2), MODEL, rules=RULES)
    state = opt.init(params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, expected) < 1e-12
